"""Save and load a pipeline with torch.distributed.checkpoint, under the names of the original model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from bpipe.comm.wire.dtensor import mesh_of
from bpipe.errors import ConfigurationError
from bpipe.memory.optimizers import Optimizers, several
from bpipe.model.state.checksums import own_checksum
from bpipe.model.ties import tied_in
from bpipe.torch_private.modules import WRAPPERS
from bpipe.training.gathered import Gathered
from bpipe.training.optimizer_state import OptimizerState
from bpipe.training.pipeline_ranks import Ranks
from bpipe.training.tied import TiedWeights

__all__ = ["training_state"]


def training_state(
    modules: nn.Module | Iterable[nn.Module],
    optimizer: Optimizers | None = None,
    *,
    tied: TiedWeights | None = None,
    group: Any = None,
) -> dict[str, Stateful]:
    """Wrap the model and the optimizer so that torch.distributed.checkpoint saves and loads them over any number of stages.

        dcp.save(bpipe.training_state(module, optimizer), checkpoint_id=folder)
        dcp.load(bpipe.training_state(module, optimizer), checkpoint_id=folder)

    Names are the modules' own, so the modules must have those of the original model: `blocks.3.weight` wherever block 3 is. Then
    stages may be cut differently for loading, several may share a rank, they may be sharded (FSDP2, tensor parallelism) or
    not, and a single process reads the same files. The checkpoint has "model.<name>", "optimizer.state.<name>.<what>" and
    "optimizer.param_groups.<name>.<what>", as torch's own functions make them with `flatten_optimizer_state_dict=True`.
    Buffers are saved as `state_dict` has them.

    Saving and loading each communicate first two all_gathers of the names over the pipeline's group, and two of the checksums
    of tensors that several ranks have; then what torch.distributed.checkpoint itself does. Collective; blocks the host.
    `dcp.async_save` goes on communicating while the training does: give it a group of its own,
    `process_group=dist.new_group(backend="gloo")`, or its messages are taken for the training's.

    Args:
        modules: this rank's stage, or all its stages.
        optimizer: over their parameters, in any groups; None to leave it out. Several, in a list or a dict, each with parameters
            of its own, are saved as one: which of them has a parameter may be another one when it is loaded, if it keeps the same.
        tied: weights that stages share and bpipe does not know: the optimizer's states of all copies are saved under the first
            one's name, as a single process has them, and as those that it knows are.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.

    Returns:
        What `dcp.save`, `dcp.async_save` and `dcp.load` take, alone or with more beside: {**training_state(...), "step": 3}.

    Raises:
        ConfigurationError: two stages have different tensors of one name; raised when it is saved or loaded, on all ranks. Or
            the optimizer has parameters of other modules, two optimizers have the same ones, or it is no optimizer.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> state = training_state(module, torch.optim.AdamW(module.parameters()))
        >>> list(state), list(state["model"].state_dict())
        (['model', 'optimizer'], ['weight', 'bias'])
    """
    held = [modules] if isinstance(modules, nn.Module) else list(modules)
    ranks = Ranks(group, "save the state_dict of all stages' modules and of their optimizer")
    states: dict[str, Stateful] = {"model": _ModelState(held, ranks)}
    if optimizer is not None:
        states["optimizer"] = OptimizerState(several(optimizer, "param_groups"), _names(held, tied))
    return states


class _ModelState:
    """A rank's modules as one Stateful."""

    def __init__(self, modules: Sequence[nn.Module], ranks: Ranks) -> None:
        self._modules, self._ranks = modules, ranks

    def state_dict(self) -> dict[str, Any]:
        states = [get_model_state_dict(module) for module in self._modules]
        _check_names(states, self._ranks)
        return dict(chain.from_iterable(state.items() for state in states))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for module in self._modules:
            set_model_state_dict(module, {name: state[name] for name in get_model_state_dict(module)})


def _names(modules: Sequence[nn.Module], tied: TiedWeights | None) -> dict[torch.Tensor, str]:
    """Return the names of all parameters in the original model; the first one for tied parameters."""
    gathered = Gathered()
    names: dict[torch.Tensor, str] = {weight: name for name, weight in tied.weights.items()} if tied is not None else {}
    for shared in chain.from_iterable(tied_in(module, 0) for module in modules):
        names.setdefault(gathered.sharded(shared.parameter), shared.first_name)
    for name, parameter in chain.from_iterable(map(_named, modules)):
        names.setdefault(gathered.sharded(parameter), name)
    return names


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with the names that torch's get_model_state_dict gives them: without those of wrappers."""
    wrapped = [f"{name}." if name else "" for name, child in module.named_modules() if isinstance(child, DistributedDataParallel)]
    for name, parameter in module.named_parameters():
        for prefix in reversed(wrapped):  # the inner ones first: their names have the outer ones' in them
            if name.startswith(f"{prefix}module."):
                name = prefix + name.removeprefix(f"{prefix}module.")
        for wrapper in WRAPPERS:
            name = name.replace(f"{wrapper}.", "")
        yield name, parameter


def _check_names(states: Sequence[Mapping[str, Any]], ranks: Ranks) -> None:
    """Raise on all ranks if two stages have different tensors of one name, because one of them would be saved for both."""
    own = [(_key(name, value), value) for state in states for name, value in state.items() if isinstance(value, torch.Tensor)]
    seen = Counter(chain.from_iterable(json.loads(data) for data in ranks.gather_bytes(_packed([key for key, _ in own]))))
    sums = [(key, own_checksum(value), list(value.shape)) for key, value in own if seen[key] > 1]
    values: dict[str, set[str]] = {}
    for key, *value in chain.from_iterable(json.loads(data) for data in ranks.gather_bytes(_packed(sums))):
        values.setdefault(key, set()).add(str(value))
    differing = sorted(key.partition("@")[0] for key, found in values.items() if len(found) > 1)
    if differing:
        raise ConfigurationError(
            f"{len(differing)} names stand for different tensors of several stages, among them {differing[0]!r}, of which a "
            "checkpoint would keep one. Give the stages' modules the names of the original model (nn.ModuleDict({'3': block}) "
            "for block 3, instead of a new nn.Sequential), and tied weights equal values"
        )


def _key(name: str, value: torch.Tensor) -> str:
    """Return a name, with the place of the shard for sharded tensors, because a shard is compared with no other."""
    mesh = mesh_of(value)
    return name if mesh is None else f"{name}@{mesh.get_coordinate()}"


def _packed(value: Any) -> bytes:
    return json.dumps(value).encode()
