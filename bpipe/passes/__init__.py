"""Passes over a plan: each takes a valid plan, and returns a valid plan with more in it."""

__all__: list[str] = []
