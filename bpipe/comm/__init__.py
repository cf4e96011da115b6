"""Messages between the ranks of a pipeline: what they say, how they travel, and what is agreed beforehand."""

__all__: list[str] = []
