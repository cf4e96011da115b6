"""An optimizer's state by the names of its parameters, as torch.distributed.checkpoint keeps it for pipelines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from bpipe.cleanup import keeping
from bpipe.errors import ConfigurationError
from bpipe.training.gathered import Gathered

__all__: list[str] = []

State = dict[str, Any]
NOT_SAVED = ("params", "param_names")


class OptimizerState:
    """One rank's optimizers as a Stateful: `state.<name>.<what>` and `param_groups.<name>.<what>` of each parameter.

    It is the format of `StateDictOptions(flatten_optimizer_state_dict=True)`: groups are found again by their members, so that
    another rank may hold them. State that a parameter does not have yet, as before the first step, is saved as zeros, and an
    optimizer that has not begun either loads it as no state.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str]) -> None:
        if wrong := [one for one in optimizers if not isinstance(one, Optimizer)]:
            raise ConfigurationError(f"optimizer={wrong[0]!r:.80}: give a torch.optim.Optimizer, or several in a list or a dict")
        self._optimizers, self._names = optimizers, names
        parameters = [parameter for one in optimizers for parameter in _parameters(one)]
        unknown = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
        if any(map(Gathered().has, parameters)):
            raise ConfigurationError(
                "the optimizer has weights that FSDP2 had gathered when it was made, which no step trains: call reshard() on the "
                "modules before you make it"
            )
        if unknown:
            raise ConfigurationError(
                f"the optimizer has {len(unknown)} parameters that are in none of the modules, the first of shape {unknown[0]}: "
                "give all modules of this rank, and make the optimizer when their parameters are final"
            )
        if twice := [names[parameter] for parameter, count in Counter(parameters).items() if count > 1]:
            raise ConfigurationError(
                f"{twice[0]!r} is in several optimizers, as are {len(twice) - 1} more, and a checkpoint has one state of each "
                "parameter: give each parameter to one optimizer"
            )

    def state_dict(self) -> State:
        flat: State = {}
        for optimizer in self._optimizers:
            made_up = _made_up(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name, state = self._names[parameter], made_up.get(parameter) or optimizer.state.get(parameter, {})
                    flat |= {f"state.{name}.{key}": value for key, value in state.items()}
                    flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key not in NOT_SAVED}
        return flat

    def load_state_dict(self, flat: State) -> None:
        states, settings = self._by_name(flat, "state."), self._by_name(flat, "param_groups.")
        for optimizer in self._optimizers:
            self._load(optimizer, states, settings)

    def _load(self, optimizer: Optimizer, states: Mapping[str, State], settings: Mapping[str, State]) -> None:
        for group in optimizer.param_groups:
            of_group = [settings[self._names[parameter]] for parameter in group["params"]]
            for parameter, its in zip(group["params"], of_group):
                self._check_alike(its, of_group[0], parameter)
                state = states[self._names[parameter]]
                # One that was made up before the first step cannot start NAdam, ASGD or Rprop.
                if state and (optimizer.state.get(parameter) or state.get("step", 1)):
                    optimizer.state[parameter] = state
            group.update(of_group[0] if of_group else {})

    def _by_name(self, flat: State, kind: str) -> defaultdict[str, State]:
        """Return the entries of one kind in a flat dict by the parameters' names; names and keys may have dots in them."""
        known, found = set(self._names.values()), defaultdict[str, State](dict)
        for key, value in flat.items():
            rest = name = key.removeprefix(kind) if key.startswith(kind) else ""
            while name and name not in known:
                name = name.rpartition(".")[0]
            found[name][rest[len(name) + 1 :]] = value
        return found

    def _check_alike(self, one: State, other: State, parameter: torch.Tensor) -> None:
        if one != other:
            differing = {key: (value, other.get(key)) for key, value in one.items() if value != other.get(key)}
            raise ConfigurationError(
                f"{self._names[parameter]!r} was saved in another parameter group than others of its group here: {differing}. "
                "Make the same groups as when it was saved."
            )


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _made_up(optimizer: Optimizer) -> dict[torch.Tensor, State]:
    """Make up states for the parameters that have none, for a checkpoint to fill, or to say that nothing has happened.

    Only the optimizer knows what its states look like, so it takes a step that changes nothing, and forgets it.
    """
    parameters = list(_parameters(optimizer))
    new = {parameter for parameter in parameters if parameter.requires_grad and not optimizer.state.get(parameter)}
    is_stateless = len(new) == len(parameters) and any(parameter.grad is not None for parameter in parameters)
    if not new or is_stateless:
        return {}
    gradients, rates = [parameter.grad for parameter in parameters], [group.get("lr") for group in optimizer.param_groups]
    with keeping(ExitStack()) as after:
        for parameter, gradient in zip(parameters, gradients):
            after.callback(setattr, parameter, "grad", gradient)
            parameter.grad = torch.zeros_like(parameter) if parameter in new else None
        for group, rate in zip(optimizer.param_groups, rates):
            after.callback(group.__setitem__, "lr", rate)
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
    states = {parameter: optimizer.state.pop(parameter, {}) for parameter in new}
    return {one: state | {"step": state["step"] * 0} if "step" in state else state for one, state in states.items()}
