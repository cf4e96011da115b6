"""Read the environment variables that bpipe uses; users and launchers set them for torch."""

from __future__ import annotations

import os

from bpipe.errors import ConfigurationError

__all__: list[str] = []

INTERFACE_VARIABLES = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
MOST_DIGITS = 9
PREFIXES = ("BPIPE_", "CUDA_", "GLOO_", "NCCL_", "PYTORCH_", "TORCH_")


def gloo_interfaces() -> list[str]:
    """Return the network interfaces that gloo uses; none if none were chosen."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return given.split(",") if given else []


def interface_pattern() -> str:
    """Return which network interfaces NCCL uses, in NCCL's notation; empty if none were chosen."""
    return os.environ.get("NCCL_SOCKET_IFNAME", "")


def port_range() -> tuple[int, int] | None:
    """Return the first and the last port that ranks may listen at; None if they may take any that the system chooses.

    Raises:
        ConfigurationError: BPIPE_PORT_RANGE is not a range of ports.
    """
    given = os.environ.get("BPIPE_PORT_RANGE", "")
    if not given:
        return None
    first, _, last = given.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 2**16):
        raise ConfigurationError(f"BPIPE_PORT_RANGE={given!r} is not a range of ports: give two ports, such as 29600-29700")
    return int(first), int(last)


def shared_secret() -> bytes:
    """Return the secret by which the ranks of a job know each other; empty if there is none."""
    return os.environ.get("BPIPE_SECRET", "").encode(errors="surrogateescape")


def gloo_connects_late() -> bool:
    """Return whether gloo connects two ranks only when they have something to say to each other."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "y", "yes", "t", "true")


def may_share_memory() -> bool:
    """Return whether processes of one host may pass tensors through memory that both map: yes unless BPIPE_SHARED_MEMORY is 0."""
    return os.environ.get("BPIPE_SHARED_MEMORY", "1") != "0"


def copies_messages() -> bool:
    """Return whether GPUs of one host may copy messages to each other instead of using NCCL: unless BPIPE_COPY_MESSAGES is 0."""
    return os.environ.get("BPIPE_COPY_MESSAGES", "1") != "0"


def shows_own_frames() -> bool:
    """Return whether tracebacks show bpipe's own frames: if BPIPE_TRACEBACKS is "full"."""
    return os.environ.get("BPIPE_TRACEBACKS", "") == "full"


def ranks_on_this_node() -> int | None:
    """Return how many ranks torchrun has started on this node; None if torchrun did not start this process."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() and len(given) <= MOST_DIGITS else None


def names_set() -> list[str]:
    """Return which variables of bpipe, PyTorch and its backends are set; not to what, since values may be secrets or addresses."""
    return sorted(name for name in os.environ if name.startswith(PREFIXES))
