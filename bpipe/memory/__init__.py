"""Count and reserve a rank's memory: static bytes, activations, and buffers for others; `saved` handles the saved tensors."""

__all__: list[str] = []
