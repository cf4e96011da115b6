"""What a microbatch keeps for its backward: captured, counted, emptied, refilled; and the acceptor's rooms."""

__all__: list[str] = []
