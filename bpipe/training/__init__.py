"""The work of a training loop between two steps of a pipeline, in small objects that each say what they communicate."""

__all__: list[str] = []
