"""Read the environment variables that bpipe uses; users and launchers set them for torch."""

from __future__ import annotations

import os

__all__: list[str] = []


def gloo_interfaces() -> list[str]:
    """Return the network interfaces that gloo uses; none if none were chosen."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return given.split(",") if given else []


def gloo_connects_late() -> bool:
    """Return whether gloo connects two ranks only when they have something to say to each other."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "y", "yes", "t", "true")


def ranks_on_this_node() -> int | None:
    """Return how many ranks torchrun has started on this node; None if torchrun did not start this process."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else None
