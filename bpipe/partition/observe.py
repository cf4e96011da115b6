"""Watch one forward of a whole model: record which modules ran, their order, their inputs, and what each of them saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bpipe.errors import ConfigurationError
from bpipe.memory.saved.storages import Storage, element_bytes, storages_of

__all__: list[str] = []

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class Seen:
    """The observations of one module, or of the loss."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output_bytes: int = 0
    saved: dict[int, Storage] = field(default_factory=dict)  # by identity; held, so that none takes another's place


class Observer:
    """Watches modules while a model runs."""

    def __init__(self, modules: Mapping[str, nn.Module], non_activations: set[int]) -> None:
        self.seen: dict[str, Seen] = {}  # in the order that they ran in
        self._modules, self._non_activations = modules, non_activations
        self._now: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the modules that run inside the context."""
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                for handle in (
                    module.register_forward_pre_hook(self._entering(name), with_kwargs=True),
                    module.register_forward_hook(self._leaving(name)),
                ):
                    hooks.callback(handle.remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def begin(self, name: str, *args: Any) -> None:
        """Attribute everything that is saved from now on to this module, or to the loss."""
        self._now = name
        self.seen[name] = Seen(args=_detached(args))

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self.seen:
                raise ConfigurationError(
                    f"{name} runs twice in a forward, and a pipeline runs each layer once: give each place a module of its own, "
                    "or name a module around both in layers="
                )
            self.begin(name, *args)
            self.seen[name].kwargs = _detached(kwargs)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.seen[name].output_bytes = sum(element_bytes(one) for one in tree_leaves(output) if isinstance(one, torch.Tensor))

        return leave

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._now is not None:
            own = {storage._cdata: storage for storage in storages_of(tensor) if storage._cdata not in self._non_activations}
            self.seen[self._now].saved.update(own)
        return tensor.detach()  # the tensor itself would keep itself alive


def observed(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Loss | None,
    target: Any,
) -> dict[str, Seen]:
    """Run a model once; return the observations of some modules, in the order that they ran in, and of the loss, under ""."""
    given = [one for one in tree_leaves([args, kwargs, target]) if isinstance(one, torch.Tensor)]
    non_activations = {storage._cdata for one in (*model.parameters(), *model.buffers(), *given) for storage in storages_of(one)}
    observer = Observer(modules, non_activations)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    with observer.watching(), _FusedAttention() if is_meta else nullcontext():
        output = model(*args, **kwargs)
        if loss_fn is not None:
            observer.begin("", output, target)
            loss_fn(output, target)
    return observer.seen


class _FusedAttention(TorchFunctionMode):
    """Computes attention on the meta device as real devices do, in one kernel that does not save the matrix of weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and len({one.shape[1] for one in args[:3]}) == 1:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args[:3])[0]
        return func(*args, **(kwargs or {}))


def _detached(tree: Any) -> Any:
    """Detach tensors from their graph; those that required a gradient still do."""
    return tree_map_only(torch.Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), tree)
