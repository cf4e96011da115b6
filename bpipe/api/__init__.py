"""The public face: schedules, the loopback, and what they say of a step."""

__all__: list[str] = []
