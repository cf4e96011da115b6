"""Watch one forward of a whole model: record which modules ran, their order, their inputs, and what each of them saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bpipe.errors import ConfigurationError
from bpipe.memory.saved.storages import Storage, element_bytes, keys_of, storages_of
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import mapped
from bpipe.torch_private.operators import flash_attention
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class Seen:
    """The observations of one module, or of the loss."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output_bytes: int = 0
    saved: dict[int, Storage] = field(default_factory=dict)  # by identity; held, so that none takes another's place


def observed(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Loss | None,
    target: Any,
) -> dict[str, Seen]:
    """Run a model once; return the observations of some modules, in the order that they ran in, and of the loss, under ""."""
    non_activations = keys_of([*model.parameters(), *model.buffers(), *tensors_in([args, kwargs, target])])
    seen: dict[str, Seen] = {}  # what is saved counts for the last one

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in seen:
            raise ConfigurationError(
                f"{name} runs twice in a forward, and a pipeline runs each layer once: give each place a module of its own, "
                "or name a module around both in layers="
            )
        seen[name] = Seen(_detached(args), _detached(kwargs))

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[name].output_bytes = sum(map(element_bytes, tensors_in(output)))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if seen:
            own = {address_of(storage): storage for storage in storages_of(tensor)}
            seen[next(reversed(seen))].saved.update((key, own[key]) for key in own.keys() - non_activations)
        return tensor.detach()  # the tensor itself would keep itself alive

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        if any(parameter.is_meta for parameter in model.parameters()):
            hooks.enter_context(_FusedAttention())
        output = model(*args, **kwargs)
        if loss_fn is not None:
            seen[""] = Seen(_detached((output, target)))
            loss_fn(output, target)
    return seen


class _FusedAttention(TorchFunctionMode):
    """Computes attention on the meta device as real devices do, in one kernel that does not save the matrix of weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and len({one.shape[1] for one in args[:3]}) == 1:
            return flash_attention("cpu")(*args[:3])[0]
        return func(*args, **(kwargs or {}))


def _detached(tree: Any) -> Any:
    """Detach tensors from their graph; those that required a gradient still do."""
    return mapped(lambda one: one.detach().requires_grad_(one.requires_grad), tree)
