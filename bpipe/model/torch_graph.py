"""The graph of stages that torch's tracer has cut a model into: values that later stages than the next one use become skips."""

from __future__ import annotations

import operator
import re
from types import SimpleNamespace
from typing import Any

import torch

from bpipe.comm.wire.dtensor import local
from bpipe.errors import ConfigurationError, StageError
from bpipe.flow.shape_arguments import Skip
from bpipe.model.ties import MARK, Tie, mark_ties, shared_by

__all__: list[str] = []


class TracedCalls:
    """How the stages of torch's tracer, which a graph calls one after the other, are called where one needs values of several."""

    def __init__(self, graph: Any) -> None:
        stages = stages_in(graph)
        _check_outputs(graph, stages)
        self._arguments: list[list[str]] = []  # of each stage
        self._places: dict[str, Any] = {}  # of each value in its maker's result, which is None for the whole result
        users: dict[str, Skip] = {}  # of each value, behind the stage that makes it
        for user, node in enumerate(stages):
            makers = {one: _maker(one) for one in node.args}
            names = {one: f"skip_{one.name}" if maker in stages else str(one.target) for one, maker in makers.items()}
            self._arguments.append(list(names.values()))
            for one, maker in makers.items():
                if maker in stages:
                    self._places[names[one]] = None if one is maker else one.args[1]
                    users[names[one]] = (*users.get(names[one], (stages.index(maker),)), user)
        self.skips = {name: skip for name, skip in users.items() if skip != (skip[0], skip[0] + 1)}
        self._passed = [[name for name in names if name in users.keys() - self.skips.keys()] for names in self._arguments]

    def run(self, stage: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a stage's module as the tracer has left it, and return what it makes as a stage with skips does."""
        index = stage.stage_index
        if index:
            kwargs |= zip(self._passed[index], args)
            if missing := [name for name in self._arguments[index] if name not in kwargs]:
                raise StageError(f"stage {index} needs {', '.join(missing)} of the model's arguments: give them to step there")
            args = tuple(kwargs.pop(name) for name in self._arguments[index])
        result = stage.submod(*args, **kwargs)
        if index + 1 == len(self._arguments):
            return result
        made = {name: self._value(name, result) for name, (source, *_) in self.skips.items() if source == index}
        output = tuple(self._value(name, result) for name in self._passed[index + 1]) or None
        return (output, made) if made else output

    def _value(self, name: str, result: Any) -> Any:
        place = self._places[name]
        return result if place is None else result[place]


NO_GRAPH = SimpleNamespace(nodes=())
CALL = re.compile(r"@\d+")  # the number of a call in the name of a module that is called several times


def mark_copies(graph: Any, module: Any) -> None:
    """Mark the weights that the tracer has copied, because several of its stages use them: it leaves them their name."""
    model = getattr(graph, "owning_module", None)
    if model is None or hasattr(module, MARK):
        return
    parts = [model.get_submodule(str(node.target)) for node in stages_in(graph)]
    shared: dict[str, dict[int, list[str]]] = {}
    unclear: set[str] = set()
    for number, part in enumerate(parts):
        unclear |= _tie_aliases(part)
        for name, _ in part.named_parameters(remove_duplicate=False):
            shared.setdefault(CALL.sub("", name), {}).setdefault(number, []).append(name)
    copies = [Tie(names, is_one=name not in unclear) for name, names in shared.items() if len(names) > 1]
    mark_ties(parts, [*shared_by(parts), *copies])


def _tie_aliases(part: Any) -> set[str]:
    """Let names that a stage does not use stand for the parameter that they are another name of; return those for which none is.

    The tracer leaves a stage all names of a parameter that it uses, with a copy for each. The right one has the same values; if
    others have them, too, as biases that are zero, nothing shows which it is.
    """
    called = {str(node.target) for node in getattr(part, "graph", NO_GRAPH).nodes if node.op in ("call_module", "get_attr")}
    named = dict(part.named_parameters(remove_duplicate=False))
    used = {name: one for name, one in named.items() if not called or any(f"{name}.".startswith(f"{own}.") for own in called)}
    unclear = set()
    for name in named.keys() - used.keys():
        alike = [one for one in used.values() if _is_alike(one, named[name])]
        if len({*map(id, alike)}) == 1:
            owner, _, entry = name.rpartition(".")
            setattr(part.get_submodule(owner), entry, alike[0])
        else:
            unclear.add(CALL.sub("", name))
    return unclear


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    looks = [(each.shape, each.dtype, each.device) for each in (one, other)]
    return one is other or (looks[0] == looks[1] and not one.is_meta and torch.equal(local(one), local(other)))


def stages_in(graph: Any) -> list[Any]:
    """Return the calls of a graph's stages; those that do not need each other stand in any order."""
    return sorted((node for node in graph.nodes if node.op == "call_module"), key=lambda node: int(node.target.rpartition("_")[2]))


def _check_outputs(graph: Any, stages: list[Any]) -> None:
    """Raise a ConfigurationError if the model returns what another stage than the last one makes: schedules return the last's."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    for maker in map(_maker, output.all_input_nodes):
        if maker in stages[:-1]:
            raise ConfigurationError(
                f"torch's tracer has cut the model so that it returns a value of stage {stages.index(maker)} of {len(stages)}, and "
                "a schedule returns what the last stage does: let the model's last part take that value and return it"
            )


def _maker(node: Any) -> Any:
    """Return the node whose result, or an entry of it, a node of the graph of stages stands for."""
    return node.args[0] if node.target is operator.getitem else node
