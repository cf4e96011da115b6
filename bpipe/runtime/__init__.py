"""Run a rank's action lists, with a short method for each operation. The plan says what runs when, and when memory is freed."""

__all__: list[str] = []
