"""The sizes of microbatches before the first step: each rank runs its stages on fake tensors, which compute nothing."""

__all__: list[str] = []
