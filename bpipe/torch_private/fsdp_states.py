"""FSDP2's states, groups of parameters and parameters, one of each for a module, for what it gathers at once, and for a parameter.

They also have attributes without an underscore, such as `reduce_grads`, that belong to private classes; `bpipe.parallel.fsdp` and
`bpipe.training.gathered` use those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from bpipe.torch_private.names import ask

__all__: list[str] = []


def state_of(unit: Any) -> Any:
    """Return the state of a module under FSDP2, ready for a step."""
    state = ask(unit, "_get_fsdp_state")()
    ask(state, "_lazy_init")()
    return state


def groups_of(unit: Any) -> list[Any]:
    """Return the groups of parameters of a module under FSDP2."""
    return _groups(ask(unit, "_get_fsdp_state")())


def _groups(state: Any) -> list[Any]:
    """Return the groups of a state: several since torch 2.12, at most one before."""
    several = ask(state, "_fsdp_param_groups", None)
    if several is None:
        one = ask(state, "_fsdp_param_group")
        return [] if one is None else [one]
    return list(several)


def all_groups() -> Iterator[Any]:
    """Yield the groups of all modules under FSDP2 in this process: a gathered parameter does not know its own."""
    if "torch.distributed.fsdp" in sys.modules:
        states = ask(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping")
        alive = {id(state): state for state in (reference() for reference in list(states.values())) if state is not None}
        for state in alive.values():
            if type(state).__module__.startswith("torch.distributed.fsdp."):
                yield from _groups(state)


def is_root(state: Any) -> bool:
    """Return whether a state is that of an outermost module."""
    return bool(ask(state, "_is_root"))


def shared_by(root: Any) -> Any:
    """Return what all states under a root share."""
    return ask(root, "_state_ctx")


def streams_of(root: Any) -> Any:
    """Return the streams of a root's collectives."""
    return ask(root, "_comm_ctx")


def end_backward(root: Any) -> None:
    """Do what FSDP2 does when a backward ends: reduce gradients, and free weights."""
    shared = shared_by(root)
    if getattr(shared, "manual_backward_finalization_active", False) is None:  # since torch 2.15
        shared.manual_backward_finalization_active = False
    ask(root, "_root_post_backward_final_callback")()


def gathered(parameter: Any) -> torch.Tensor | None:
    """Return the gathered parameter; None if it was never gathered. It keeps its gradient when it is freed."""
    return _set_later(parameter, "_unsharded_param")


def _set_later(parameter: Any, name: str) -> Any:
    """Return an attribute that its class only declares until something is gathered."""
    return ask(parameter, name, None) if name in type(parameter).__annotations__ else ask(parameter, name)


def stand_ins(parameter: Any) -> list[torch.Tensor]:
    """Return the gathered parameter, and that of `reshard_after_forward=4`, sharded over fewer ranks, as far as they exist."""
    return [one for one in (gathered(parameter), _set_later(parameter, "_sharded_post_forward_param")) if one is not None]


def partly_reduced(group: Any) -> torch.Tensor | None:
    """Return the gradients that are reduced over some of the ranks, and wait for the others."""
    return ask(group, "_partial_reduce_output")


def free(group: Any) -> None:
    """Free what a group has gathered."""
    ask(group, "_to_sharded")()


def forget_gathering(group: Any) -> None:
    """Drop what a group has begun to gather, and nobody has waited for."""
    ask(group, "_all_gather_result")
    group._all_gather_result = None


def pass_over(group: Any) -> None:
    """Let the end of a backward find nothing to do for a group."""
    group._training_state = type(ask(group, "_training_state")).POST_BACKWARD
