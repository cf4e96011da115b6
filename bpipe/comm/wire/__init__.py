"""The wire format: messages, their headers and frames."""

__all__: list[str] = []
