"""The plan of a pipeline's steps, and its components: actions, memory, sizes, orders. Pure Python, without torch."""

__all__: list[str] = []
