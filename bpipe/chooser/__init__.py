"""The best plan for a model, machines and memory: where to cut, in which order, and what to do with memory that is missing."""

__all__: list[str] = []
