"""Pipelines under data parallelism: FSDP2, DDP, replicas, and where the ranks are."""

__all__: list[str] = []
