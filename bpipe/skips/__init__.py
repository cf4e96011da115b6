"""Values that a stage hands on to later stages than the next one: which messages carry them, and how a rank keeps them."""

__all__: list[str] = []
