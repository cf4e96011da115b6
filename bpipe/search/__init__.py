"""Search for the fastest plan within a budget: orders made to measure, and the choice among all that bpipe can run."""

__all__: list[str] = []
