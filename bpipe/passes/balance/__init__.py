"""The balance pass: evict activations that are not needed soon to a rank with free memory, and load them back in time."""

__all__: list[str] = []
