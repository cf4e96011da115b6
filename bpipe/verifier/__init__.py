"""Verify a plan before its first transfer: a table of rules, and one error with every violation."""

__all__: list[str] = []
