"""Pipelines that do without something that a synchronous one has: `Routes`, without ranks that can be relied upon."""

from bpipe.relaxed.dealing import deal
from bpipe.relaxed.paths import routed_plan
from bpipe.relaxed.routed_training import Routes

__all__ = ["Routes", "deal", "routed_plan"]
