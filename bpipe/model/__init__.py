"""The user's module and inputs: stages, microbatches, and how batches are cut and merged again."""

__all__: list[str] = []
