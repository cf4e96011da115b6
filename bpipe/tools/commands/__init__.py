"""One module a command, loaded when it is called."""

__all__: list[str] = []
