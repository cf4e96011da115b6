"""The public interface: schedules, the loopback, and the numbers of a step."""

__all__: list[str] = []
