"""Run forwards twice: find the state that they read and change, restore it, and compare the results."""

__all__: list[str] = []
