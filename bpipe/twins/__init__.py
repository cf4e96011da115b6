"""Two directions: stages that hold the same weights add up their gradients; loaded for a plan in which some do."""

__all__: list[str] = []
