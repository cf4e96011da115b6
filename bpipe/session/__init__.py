"""Run the steps of one rank of a pipeline, from a call to its results: prepare, agree with the other ranks, run, count."""

__all__: list[str] = []
