"""Command line, drawings and traces: what looks at plans and timelines from outside."""

__all__: list[str] = []
