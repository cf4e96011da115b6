"""What a pipeline tells DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from bpipe.torch_private.names import ask

__all__: list[str] = []

DELAYS = "_delay_all_reduce_all_params"  # set by delay_all_reduce_named_params=


def option_of(replica: DistributedDataParallel, name: str) -> object:
    """Return the value of an option."""
    return ask(replica, name) if name == DELAYS else getattr(replica, name, None)


def make_buffers_equal(replica: DistributedDataParallel) -> bool:
    """Send the first rank's buffers to all, if the next forward would; return whether it did."""
    is_due = bool(ask(replica, "_check_sync_bufs_pre_fwd")())
    if is_due:
        ask(replica, "_sync_buffers")()
    return is_due


def averages_check(replica: DistributedDataParallel) -> Callable[[], None]:
    """Return what raises a RuntimeError if a backward has not averaged all gradients."""
    return ask(replica.reducer, "_check_reducer_finalized")


def forget_backward(replica: DistributedDataParallel) -> None:
    """Cancel the averages of a backward that will not be finished."""
    ask(replica.reducer, "_reset_state", lambda: None)()
