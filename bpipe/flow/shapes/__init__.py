"""The shapes of flows, each in a file of its own, which is imported when it is used."""

__all__: list[str] = []
