"""Find out before a step whether the results of a rank's stages depend on the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.engine.setup import modules_of
from bpipe.memory.saved.storages import storages_of
from bpipe.model.stage import PipelineStage
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

DROPOUT: Any = nn.Dropout.__base__  # the class of all of torch's


def why_in_order(stages: Mapping[int, PipelineStage], loss_fn: Any, *, shares_random: bool) -> str:
    """Return why the stages of a rank must run in the order of the schedule; empty if no reason is known.

    Args:
        stages: these stages, by index.
        loss_fn: the loss, which runs with the last stage.
        shares_random: whether forwards of several stages draw from the same random numbers.
    """
    modules = {index: list(_modules(stage, loss_fn)) for index, stage in stages.items()}
    owner: dict[int, int] = {}
    for index, of_stage in modules.items():
        for key in _kept(of_stage):
            if owner.setdefault(key, index) != index:
                return f"stages {owner[key]} and {index} share a parameter or a buffer"
    drawing = (f"stage {index} has a {type(one).__name__}" for index, some in modules.items() for one in some if _draws(one))
    reason = next(drawing, "") if shares_random else ""
    return reason and f"{reason}, and other stages draw from the same random numbers"


def _modules(stage: PipelineStage, loss_fn: Any) -> Iterator[nn.Module]:
    yield from stage.submod.modules()
    if stage.is_last:
        yield from (part for loss in modules_of(loss_fn) for part in loss.modules())


def _kept(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of parameters, whose gradients add up, and of the storages of buffers, which forwards may write.

    Two parameters over one storage have a gradient each: it does not matter to them which stage comes first.
    """
    parameters = {id(p) for module in modules for p in module._parameters.values() if p is not None}
    buffers = (b for module in modules for b in module._buffers.values() if b is not None and not is_lazy(b))
    return parameters | {address_of(storage) for buffer in buffers for storage in storages_of(buffer) if storage.nbytes()}


def _draws(module: nn.Module) -> bool:
    """Return whether a forward of one of torch's modules draws random numbers."""
    if isinstance(module, DROPOUT):
        return bool(module.training and module.p > 0)
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.training and module.dropout > 0
    return isinstance(module, nn.RReLU) and module.training
