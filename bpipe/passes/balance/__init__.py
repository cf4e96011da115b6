"""The balance pass: evict what is not needed soon to a rank with room, and load it back in time."""

__all__: list[str] = []
