"""Command line, drawings and traces: everything that looks at plans and timelines from outside."""

__all__: list[str] = []
