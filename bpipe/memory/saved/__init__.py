"""What a microbatch saves for its backward: followed, counted, and moved."""

__all__: list[str] = []
