"""The loss that a mixture of experts adds for its router, where the model is cut into stages.

Such a model (Mixtral and its like, with `output_router_logits`) computes one loss of the router's logits of all layers, and adds it
to that of the words. It is no sum over layers: how often all of them choose an expert weighs its probability in each. So the logits
go along with the hidden states, and the last stage lets the model compute its loss of all of them. That has its gradient with the
gradient of the words' logits, times what the pipeline multiplies its losses by.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from bpipe.backward.loss_scale import loss_scale
from bpipe.errors import ConfigurationError
from bpipe.partition.shrink import text_config

__all__: list[str] = []

ASKS = "output_router_logits"  # the argument of a forward, and the attribute of a configuration
COEFFICIENTS = "router_aux_loss_coef", "aux_loss_coef"


@cache
def can_add(cls: Any) -> bool:
    """Return whether the forward of a class of models computes the loss of its router where it is asked to."""
    return ASKS in inspect.signature(cls.forward).parameters


def is_configured(config: Any) -> bool:
    """Return whether a configuration asks for the router's logits."""
    return any(bool(getattr(one, ASKS, False)) for one in (config, text_config(config)))


def router_logits_of(output: Any) -> tuple[torch.Tensor, ...]:
    """Return the router's logits in an output, by layer, each once: hooks that are installed twice record them twice."""
    found = output.get("router_logits") or ()
    return tuple({id(one): one for one in found if one is not None}.values())


@contextmanager
def behind(base: nn.Module, earlier: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the output of the part of a model below its head have the router's logits of earlier stages, too."""

    def joined(module: nn.Module, args: Any, output: Any) -> Any:
        output["router_logits"] = (*earlier, *router_logits_of(output))
        return output

    with base.register_forward_hook(joined):
        yield


def plain(model: nn.Module, output: Any) -> Any:
    """Return an output as stages do: of a Hugging Face model's dict, the logits, or the first value, alone.

    The logits' backward also runs that of the router's loss in the output, if it has one.
    """
    if not (isinstance(output, dict) and hasattr(output, "to_tuple")):
        return output
    if "logits" not in output:
        return output.to_tuple()[0]
    logits: torch.Tensor = output["logits"]
    loss: Any = output.get("aux_loss")
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or not torch.is_grad_enabled():
        return logits
    owners: tuple[Any, ...] = model, text_config(model.config)
    found = [getattr(one, name) for one in owners for name in COEFFICIENTS if isinstance(getattr(one, name, None), (int, float))]
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no {' or '.join(COEFFICIENTS)}, by which it would multiply the loss of its router: set "
            f"one, or leave {ASKS} out"
        )
    return _Joined.apply(logits, found[0] * loss.to(logits.device))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    """The first argument; in the backward, the second one is a loss of the step."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.scale = torch.full_like(loss, loss_scale())
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, ctx.scale
