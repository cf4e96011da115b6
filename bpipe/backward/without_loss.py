"""Steps that would train nothing, without a word: without a loss, or where a stage cuts off the gradients of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bpipe.comm.wire.dtensor import is_dtensor
from bpipe.errors import ConfigurationError, StageError
from bpipe.model.pytree import mapped

__all__: list[str] = []


def check_loss(loss_fn: object, what: str, **given: object) -> None:
    """Raise a ConfigurationError if something was given that trains or takes a loss, and there is no loss_fn."""
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if loss_fn is None and names:
        raise ConfigurationError(
            f"{what} got {' and '.join(names)}, but there is no loss_fn, so nothing would be trained and no loss computed: give "
            f"loss_fn= on all ranks, or leave {' and '.join(names)} out to run forwards alone"
        )


def checked_loss(loss: Any, place: object, *, trains: bool) -> torch.Tensor:
    """Return the loss of a microbatch or tick.

    Raises:
        StageError: `loss_fn` returned something else than a number, or one that needs no gradient although it trains.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        seen = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__qualname__
        raise StageError(f"loss_fn returned {seen} for {place}: return one number, such as loss.mean()")
    if trains and not loss.requires_grad:
        raise StageError(
            f"the loss of {place} needs no gradient, so nothing would be trained: return a loss that depends on the output, and "
            "keep at least one parameter trainable"
        )
    return loss


def cut_off(place: str) -> StageError:
    """Return the error about a stage whose outputs bring no gradient to earlier stages that want one."""
    return StageError(
        f"{place}: no output needs a gradient, but the input does, so the stages before it would train nothing. Compute an output "
        "from the input with gradients (without torch.no_grad or detach, not integers alone), or freeze those stages with "
        "requires_grad_(False)"
    )


class _Refused(torch.autograd.Function):
    """It has an input that needs a gradient, so that its result seems to need one, as that of torch's schedules does."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ConfigurationError(
            "backward() has reached an output of step(), which is without graph because the schedule has no loss_fn. Give it "
            "loss_fn=, and step() runs the backwards of all stages by itself (torch's schedule without one lets backward() train "
            "the last stage alone). Only to evaluate, call schedule.eval(), or detach the output"
        )


def refusing_backward(outputs: Any, last: Iterable[nn.Module]) -> Any:
    """Return a step's outputs so that a backward through them raises, if a last stage looks as if it should train.

    That is in train mode, with a parameter that needs a gradient, and gradients enabled: then those of torch need one, too.
    """
    modules = [module for module in last if module.training and torch.is_grad_enabled()]
    if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        return outputs
    return mapped(_refusing, outputs)


def _refusing(output: torch.Tensor) -> torch.Tensor:
    is_known = (type(output) is torch.Tensor and output.layout is torch.strided) or is_dtensor(output)
    if not is_known or output.is_inference():
        return output
    refusing: torch.Tensor = _Refused.apply(torch.empty(0, requires_grad=True), output)  # type: ignore[no-untyped-call]
    return refusing
