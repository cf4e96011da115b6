"""Transports for messages: over torch.distributed, between ranks of one process, or by a device itself."""

__all__: list[str] = []
