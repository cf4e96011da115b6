"""What a training loop does between two steps of a pipeline, each a small object that says what it communicates."""

__all__: list[str] = []
