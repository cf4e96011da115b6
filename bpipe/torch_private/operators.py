"""Operators that have no public name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bpipe.torch_private.names import ask

__all__: list[str] = []

_ATTENTION = "_scaled_dot_product_flash_attention"


def flash_attention(device_type: str) -> Any:
    """Return the kernel of attention of a type of device, which returns the logarithms of its sums, too."""
    return ask(torch.ops.aten, f"{_ATTENTION}_for_cpu" if device_type == "cpu" else _ATTENTION)


def flash_attention_backward(device_type: str) -> Any:
    """Return the kernel of the gradients of `flash_attention`."""
    return ask(torch.ops.aten, f"{_ATTENTION}_for_cpu_backward" if device_type == "cpu" else f"{_ATTENTION}_backward")


def norms_of(tensors: Sequence[torch.Tensor], order: float) -> Sequence[torch.Tensor]:
    """Return the norm of each of some tensors [at least one], computed together where torch can."""
    together = ask(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(one, order) for one in tensors]
    return together(tensors, order)


def arguments_of(operator: Any) -> Sequence[Any]:
    """Return the arguments of an operator of torch.ops: their names and default values."""
    schema = ask(operator, "_schema", None)
    return [] if schema is None else schema.arguments
