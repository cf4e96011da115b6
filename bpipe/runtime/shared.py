"""What is known before a step about stages of one rank whose results depend on the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from bpipe.memory.storages import storages_of
from bpipe.runtime.compute import modules_of
from bpipe.stage import PipelineStage

__all__: list[str] = []


def why_in_order(stages: Mapping[int, PipelineStage], loss_fn: Any, *, shares_random: bool) -> str:
    """Why the stages of a rank must run in the order of the schedule; empty where nothing is known of it.

    Args:
        stages: they, by index.
        loss_fn: the loss, which runs with the last stage.
        shares_random: whether forwards of several stages draw from the same random numbers.
    """
    modules = {index: list(_modules(stage, loss_fn)) for index, stage in stages.items()}
    owner: dict[int, int] = {}
    for index, of_stage in modules.items():
        for key in _storages(of_stage):
            if owner.setdefault(key, index) != index:
                return f"stages {owner[key]} and {index} share a parameter or a buffer"
    drawing = (f"stage {index} has a {type(one).__name__}" for index, some in modules.items() for one in some if _draws(one))
    reason = next(drawing, "") if shares_random else ""
    return reason and f"{reason}, and other stages draw from the same random numbers"


def _modules(stage: PipelineStage, loss_fn: Any) -> Iterator[nn.Module]:
    yield from stage.submod.modules()
    if stage.is_last:
        yield from (part for loss in modules_of(loss_fn) for part in loss.modules())


def _storages(modules: Iterable[nn.Module]) -> set[int]:
    """The storages of parameters and buffers; empty ones belong to nobody."""
    tensors: list[torch.Tensor | None] = [t for m in modules for kept in (m._parameters, m._buffers) for t in kept.values()]
    known = (tensor for tensor in tensors if tensor is not None and not is_lazy(tensor))
    return {storage._cdata for tensor in known for storage in storages_of(tensor) if storage.nbytes()}


def _draws(module: nn.Module) -> bool:
    """Whether a forward of a module of torch's draws random numbers."""
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.training and module.dropout > 0
    return isinstance(module, nn.RReLU) and module.training
