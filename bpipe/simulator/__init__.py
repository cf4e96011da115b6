"""Run a plan on a cost model: when each action runs, and which chain of them decides. Pure Python."""

__all__: list[str] = []
