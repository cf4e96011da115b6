"""Pipelines under data parallelism: FSDP2, DDP, replicas, and where the ranks are."""
