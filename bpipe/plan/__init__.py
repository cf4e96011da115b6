"""The plan of a pipeline's steps, and what it is made of: actions, memory, sizes, orders. Pure Python, without torch."""

__all__: list[str] = []
