"""Pipelines that do without something that a synchronous one has; the core does not import them."""

from bpipe.relaxed.stream import Stream

__all__ = ["Stream"]
