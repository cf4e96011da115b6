"""The steps of one rank of a pipeline, from a call to its results: get ready, agree with the other ranks, run, count."""

__all__: list[str] = []
