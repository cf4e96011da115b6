"""Follow, count and move the tensors that a microbatch saves for its backward."""

__all__: list[str] = []
