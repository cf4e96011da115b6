"""Forwards that run twice: what they read and change is found, put back and compared."""

__all__: list[str] = []
