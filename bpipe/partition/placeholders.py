"""Placeholders for modules of the whole model that a stage lacks."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.errors import ConfigurationError

__all__: list[str] = []


class PassThrough(torch.nn.Module):
    """Hands the hidden states on, in place of a layer, a norm or a head that another stage has.

    They are `inputs_embeds` where the caller names them so, else the first argument that is not None.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (kwargs.get("inputs_embeds"), *args, *kwargs.values())
        return next((one for one in given if one is not None), None)


class AddsNothing(torch.nn.Module):
    """Returns a zero in place of position embeddings that the first stage has added; adding it changes no bit."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(-0.0)  # x + 0.0 would turn -0.0 into 0.0; and a number of no dimension leaves the dtype alone


_KINDS = {"pass": PassThrough, "zero": AddsNothing, "none": None}


def check_kind(kind: str, where: str) -> None:
    """Raise unless there is such a placeholder."""
    if kind not in _KINDS:
        raise ConfigurationError(f"{where}={kind!r}: a missing module is one of {', '.join(map(repr, _KINDS))}")


def placeholder(kind: str, module: torch.nn.Module) -> torch.nn.Module | None:
    """Return what stands for a module: "pass" it through, add "zero", or "none". It has the module's plain attributes."""
    chosen = _KINDS[kind]
    if chosen is None:
        return None
    stand_in = chosen().train(module.training)
    for name, value in vars(module).items():
        if isinstance(value, (str, bool, int, float)) and not hasattr(stand_in, name):
            setattr(stand_in, name, value)
    return stand_in
