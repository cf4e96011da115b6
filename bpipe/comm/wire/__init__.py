"""What ranks say to each other: messages, their headers and frames."""

__all__: list[str] = []
