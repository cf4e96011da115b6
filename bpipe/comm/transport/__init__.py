"""How messages travel: over torch.distributed, between threads of one process, or by a device itself."""

__all__: list[str] = []
