"""A stage's backward: as a piece of one graph, in two halves, and with the user's hooks as torch would call them."""

__all__: list[str] = []
