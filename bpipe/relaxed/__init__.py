"""Pipelines that do without something that a synchronous one has: docs/relaxed.md says what each gives up."""

from bpipe.relaxed.auxiliary_heads import local_heads
from bpipe.relaxed.dealing import deal
from bpipe.relaxed.local_block import LocalBlock
from bpipe.relaxed.local_learning import LocalLearning
from bpipe.relaxed.paths import routed_plan
from bpipe.relaxed.routed_training import Routes
from bpipe.relaxed.stream import Stream

__all__ = ["LocalBlock", "LocalLearning", "Routes", "Stream", "deal", "local_heads", "routed_plan"]
