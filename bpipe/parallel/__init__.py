"""Pipelines under data parallelism: FSDP2, DDP, replicas, and the placement of ranks on nodes."""

__all__: list[str] = []
