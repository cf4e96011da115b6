"""Run a stage's backward: as a piece of one graph, split into backward_input and backward_weight, with the user's hooks."""

__all__: list[str] = []
