"""The proof of a plan before its first transfer: a table of rules, every violation reported at once."""

__all__: list[str] = []
