"""What a module leads to: found, reduced to numbers, and compared at two times."""

__all__: list[str] = []
