"""Run a rank's action lists: one short method per operation. The plan decides what runs when, and when memory is freed."""

__all__: list[str] = []
