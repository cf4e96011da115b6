"""Read the environment variables that bpipe uses; users and launchers set them for torch."""

from __future__ import annotations

import os

__all__: list[str] = []


def gloo_interface() -> str:
    """Return the network interface that gloo uses; empty if none was chosen."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def may_share_memory() -> bool:
    """Return whether processes of one host may pass tensors through memory that both map: yes unless BPIPE_SHARED_MEMORY is 0."""
    return os.environ.get("BPIPE_SHARED_MEMORY", "1") != "0"


def ranks_on_this_node() -> int | None:
    """Return how many ranks torchrun has started on this node; None if torchrun did not start this process."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else None
