"""Run a rank's lists: a short method for each operation. What runs when, and when memory is given back, the plan says."""

__all__: list[str] = []
