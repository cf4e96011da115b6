"""The parts of torch.amp.GradScaler."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.torch_private.names import ask

__all__: list[str] = []


def scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
    """Return a scaler's scale, made on a device if it has scaled nothing yet."""
    if ask(scaler, "_scale") is None:
        ask(scaler, "_lazy_init_scale_growth_tracker")(device)
    return ask(scaler, "_scale")


def take_state(scaler: torch.amp.GradScaler, optimizer: object) -> dict[str, Any]:
    """Return what a scaler knows of the step of an object in place of an optimizer, and let it forget that."""
    return ask(scaler, "_per_optimizer_states").pop(id(optimizer))


def state_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return what a scaler knows of an optimizer's step."""
    return ask(scaler, "_per_optimizer_states")[id(optimizer)]


def has_states(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler has unscaled the gradients of an optimizer, or of none, since its latest update."""
    return bool(ask(scaler, "_per_optimizer_states"))
