"""Messages between the ranks of a pipeline: their format, their transport, and the agreement that comes before them."""

__all__: list[str] = []
