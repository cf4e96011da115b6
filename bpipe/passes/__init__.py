"""Passes over a plan: each takes a valid plan, and returns one that does more."""

__all__: list[str] = []
