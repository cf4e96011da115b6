"""The commands, one module each, which is loaded when its command is called."""

__all__: list[str] = []
