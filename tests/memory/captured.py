"""Capture what a module saves, the way the runtime does: the graph alone owns it, and somebody independent counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bpipe.backward.autograd import edges_of, enter, run_backward
from bpipe.memory.saved.stash import Stash, StashContents
from bpipe.memory.saved.storages import keys_of
from tests.storages import StorageCount

NAME = "microbatch 3 of stage 1"


class Captured:
    """The forward of one microbatch, of which nothing is left but its graph.

    Args:
        module: called with `make_input()`, whose result nobody else keeps.
        foreign: storages of the user, besides the module's parameters and buffers.
        follows: whether a stash looks on.
    """

    def __init__(
        self,
        module: Callable[[Any], Any],
        make_input: Callable[[], torch.Tensor],
        non_activations: Mapping[int, str] = {},
        follows: bool = True,
    ) -> None:
        self.tensors = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
        mine = dict.fromkeys(keys_of(self.tensors), "a buffer")
        if isinstance(module, nn.Module):
            mine |= dict.fromkeys(keys_of(module.parameters()), "a parameter")
        self.stash = Stash(NAME, {**mine, **non_activations})
        self.count = StorageCount()
        with self.count.mode():
            inputs, self.box = enter([make_input()], [make_input().is_floating_point()])
            if follows:
                with self.stash.capture():
                    output = module(inputs.pop())
            else:
                output = module(inputs.pop())
        self.shape, self.dtype = output.shape, output.dtype
        self.edges = edges_of([output])

    def contents(self, ours: Iterable[torch.Tensor] = (), leaving: Iterable[torch.Tensor] = ()) -> StashContents:
        return self.stash.contents(ours, leaving)

    def backward(self) -> list[torch.Tensor | None]:
        """Run it, and return the gradients of the input and of the parameters."""
        for tensor in self.tensors:
            tensor.grad = None
        generator = torch.Generator().manual_seed(1)
        run_backward(self.edges, [torch.randn(self.shape, generator=generator).to(self.dtype)])
        self.edges = []
        return [*self.box.gradients, *(tensor.grad for tensor in self.tensors)]

    @property
    def alive(self) -> int:
        """How many saved tensors are left."""
        return sum(ref() is not None for ref in self.stash._saved)

    def live_bytes(self) -> int:
        """What the independent count finds, without parameters and buffers."""
        return self.count.live_bytes(self.tensors)


def equal(ones: Iterable[torch.Tensor | None], others: Iterable[torch.Tensor | None]) -> bool:
    """Whether all gradients are there on both sides, or on neither, and equal to the bit."""
    return all(a is b is None or torch.equal(a, b) for a, b in zip(ones, others, strict=True))  # type: ignore[arg-type]
