"""What stays on a device, what a rank holds, and the memory that it lends to others; `saved` is what microbatches keep."""

__all__: list[str] = []
