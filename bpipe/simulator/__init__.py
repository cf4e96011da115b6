"""Run a plan on a cost model: when each action runs, and the critical path. Pure Python."""

__all__: list[str] = []
