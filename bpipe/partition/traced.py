"""Cut a traced model into stages: what passes stages in between is found, and handed on as skips."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from bpipe.errors import ConfigurationError
from bpipe.model.cut import mark
from bpipe.partition.model_split import listed
from bpipe.partition.name_lists import Names
from bpipe.skips.routes import Skip

__all__ = ["split_traced"]

IGNORED = "nothing"  # the first argument of a stage whose predecessor hands on skips alone
OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul"
VIEWS = frozenset(("getitem", "getattr", "flatten", "reshape", "chunk", "split", "unbind", "squeeze", "unsqueeze", "transpose"))
ENLARGING = (torch.cat, torch.concat, torch.stack, nn.functional.interpolate)
IN_PLACE = frozenset(f"i{name}" for name in OPERATORS)  # of Python's module `operator`


def split_traced(model: nn.Module, stages: Sequence[Sequence[str]]) -> tuple[list[nn.Module], dict[str, Skip]]:
    """Cut a model into stages, by lists of fully qualified names, where its forward is more than a chain.

    The forward is traced by torch.fx down to the named modules, which stay as they are, with their names, hooks and modes. What is
    between them runs on the first stage that has all that it needs; but `torch.cat`, `torch.stack` and `interpolate`, whose results
    are larger than what they are made of, run where these are used. Values that later stages than the next use become skips:

        parts, skips = bpipe.split_traced(model, stages)
        stage = bpipe.PipelineStage(parts[rank], rank, len(parts), device, skips=skips)

    The first stage takes the model's arguments, the last one returns what the model returns.

    Args:
        model: the whole model; it is not changed. Between the named modules, its forward must not branch on values, and numbers
            and flags of the model are taken as they are now.
        stages: for each stage the names of its modules, which run on it wherever the forward calls them.

    Returns:
        The stages, in order, and their skips.

    Raises:
        ConfigurationError: torch.fx cannot trace the forward, or what is between the named modules depends on whether the model
            trains, or has hooks; the lists do not make up the model; a stage would need what a later one makes; stages share a
            parameter, or a tensor that is changed in place. The message lists every problem.

    Example:
        >>> from torch import nn
        >>> class Ends(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         a = self.a(x)
        ...         return self.c(self.b(a)) + a
        >>> parts, skips = split_traced(Ends(), [["a"], ["b"], ["c"]])
        >>> skips, list(parts[1].state_dict())
        ({'skip_a': (0, 1, 2)}, ['b.weight', 'b.bias'])
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"split_traced cuts an nn.Module, got {type(model).__qualname__}")
    lists = [listed(one) for one in stages]
    names = Names(model)
    names.check(lists)
    cut = _Cut(model, names, lists)
    parts = [cut.part(stage) for stage in range(len(lists))]
    mark(parts, [sorted(kept) for kept in lists])
    return parts, {cut.name_of(node): (cut.stage_of[node], *users) for node, users in cut.skips.items()}


class _Value(fx.Proxy):
    """A traced value. That of torch.fx takes `x += 1` for `x = x + 1`, which other names of the same tensor would not see."""


def _changed_by(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    change = getattr(operator, name)
    return lambda value, other: value.tracer.create_proxy("call_function", change, (value, other), {})


for _name in IN_PLACE:
    setattr(_Value, f"__{_name}__", _changed_by(_name))


class _Tracer(fx.Tracer):
    """Traces down to the named modules, and to those that have none of them inside."""

    proxy_buffer_attributes = True  # what is done with buffers belongs to the forward, too

    def __init__(self, names: Names, lists: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self._names, self._named = names, [name for kept in lists for name in kept]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self._names.is_above(module_qualified_name, self._named)


def _traced(model: nn.Module, names: Names, lists: Sequence[Sequence[str]]) -> fx.Graph:
    """Trace a model in both modes, which must do the same between the named modules."""
    named = [name for kept in lists for name in kept]
    through = {path: module for path, module in names.modules.items() if names.is_above(path, named)}
    if hooked := [path or "the model" for path, module in through.items() if module._forward_hooks or module._forward_pre_hooks]:
        raise ConfigurationError(f"{', '.join(hooked)} has hooks, and is cut into stages: put them on the named modules")
    modes, attributes = [(module, module.training) for module in through.values()], set(vars(model))
    graphs = []
    try:
        for is_other in (True, False):
            for module, trains in modes:
                module.training = trains != is_other
            graphs.append(_Tracer(names, lists).trace(model))
    except Exception as error:
        raise ConfigurationError(
            f"torch.fx cannot trace the forward of {type(model).__name__}: {error}. Name modules further outside, or cut the model "
            "by hand and give PipelineStage(skips=)"
        ) from error
    finally:
        for module, trains in modes:
            module.training = trains
        constants = set(vars(model)) - attributes  # where torch.fx keeps tensors that it met
        for name in constants:
            delattr(model, name)
    if constants:
        raise ConfigurationError(
            f"the forward of {type(model).__name__} makes a tensor out of nothing, such as torch.ones(3) or torch.randn(3), "
            "between the named modules. It would be made once: register it as a buffer, or make it of another (torch.ones_like)"
        )
    if str(graphs[0]) != str(graphs[1]):
        raise ConfigurationError(
            f"the forward of {type(model).__name__} does something else when it trains, between the named modules: use modules for "
            "that, such as nn.Dropout, and name them"
        )
    return graphs[1]


class _Cut:
    """The nodes of a traced model, by stage.

    Args:
        model: the whole model.
        names: its names.
        lists: the names of each stage's modules.
    """

    def __init__(self, model: nn.Module, names: Names, lists: Sequence[Sequence[str]]) -> None:
        self._model, self._num_stages = model, len(lists)
        self._modules, self._tensors = names.modules, names.tensors
        self._graph = _traced(model, names, lists)
        self.stage_of: dict[fx.Node, int] = {}
        problems = [*self._assign(names, lists)] or [*self._shared(), *self._changed()]
        if problems:
            raise ConfigurationError(f"these {len(lists)} stages are not a split of the model:\n  " + "\n  ".join(problems))
        self._users = {node: self._used_by(node) for node in self.stage_of}
        self.skips = {
            node: later for node, (_, *later) in self._users.items() if later and later != [self.stage_of[node] + 1]
        }

    def _assign(self, names: Names, lists: Sequence[Sequence[str]]) -> Iterable[str]:
        """Give each node its stage: that of its module, or the first one that has all that it needs."""
        latest, at = 0, dict[fx.Node, int]()
        for node in self._graph.nodes:
            needed = max((at[one] for one in node.all_input_nodes), default=0 if node.op == "placeholder" else latest)
            found = [place for place, kept in enumerate(lists) if names.is_kept(str(node.target), kept)]
            if node.op == "output":
                at[node] = self._num_stages - 1
            elif node.op in ("call_module", "get_attr") and found:
                if len(found) > 1:
                    yield f"{node.target} is in stages {', '.join(map(str, found))}: name it once"
                elif found[0] < needed and node.op == "call_module":
                    yield f"{node.target} of stage {found[0]} uses what stage {needed} makes, which runs later"
                at[node] = found[0]
            else:
                at[node] = 0 if node.op == "get_attr" else needed  # a buffer without a name is wherever it is used
            latest = max(latest, at[node]) if node.op == "call_module" else latest
        for node in reversed(self._graph.nodes):
            if node.target in ENLARGING and node.users:
                at[node] = max(at[node], min(at[user] for user in node.users))
        self.stage_of = {node: stage for node, stage in at.items() if node.op != "get_attr"}

    def _used_by(self, node: fx.Node) -> list[int]:
        """Return the stage of a value, and the later ones that use it, in ascending order."""
        own = self.stage_of[node]
        return [own, *sorted({self.stage_of[user] for user in node.users} - {own})]

    def _shared(self) -> Iterable[str]:
        """Yield a problem for each parameter that several stages use, under whatever names, and each buffer that one changes."""
        names: dict[int, str] = {}
        used: dict[int, set[int]] = {}
        for node in self._graph.nodes:
            path = str(node.target)
            if node.op == "call_module":
                module, stages = self._modules[path], {self.stage_of[node]}
                found = {f"{path}.{name}": one for name, one in module.named_parameters()}
            elif node.op == "get_attr":
                is_fixed = not isinstance(self._tensors.get(path), nn.Parameter) and not any(map(self._is_in_place, node.users))
                found = {} if is_fixed else {path: self._tensors.get(path, self._graph)}
                stages = {self.stage_of[user] for other in self._same(node) for user in other.users}
            else:
                continue
            for name, tensor in found.items():
                names.setdefault(id(tensor), name)
                used.setdefault(id(tensor), set()).update(stages)
        for key, stages in used.items():
            if len(stages) > 1:
                where = ", ".join(map(str, sorted(stages)))
                yield f"{names[key]} is used by stages {where}: cut the model by hand, and tie its weights"

    def _same(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that stand for the same parameter or buffer."""
        return [one for one in self._graph.nodes if (one.op, one.target) == (node.op, node.target)]

    def _changed(self) -> Iterable[str]:
        """Yield a problem for each value that may be changed in place, where its users would not all see that as in the model.

        A stage that runs later gets what a value is at the end of its own stage; earlier ones have used it before.
        """
        order = {node: place for place, node in enumerate(self._graph.nodes)}
        for node in (node for node in self._graph.nodes if self._is_in_place(node)):
            for value in (one for one in node.all_input_nodes if one in self.stage_of):
                own, here = self.stage_of[value], self.stage_of[node]
                others = [one for one in self._users_of_aliases(value) if self.stage_of[one] != here]
                if any(self.stage_of[one] > here if order[one] < order[node] else here != own for one in others):
                    stages = sorted({own, here, *(self.stage_of[one] for one in others)})
                    yield (
                        f"{value.name} may be changed in place by {node.name}, and stages {', '.join(map(str, stages))} have it: "
                        "clone it in the forward"
                    )

    def _users_of_aliases(self, value: fx.Node) -> set[fx.Node]:
        """Return the nodes that use a value, what it may be a view of, or what may be a view of it."""
        waiting, seen = [value], {value}
        while waiting:
            node = waiting.pop()
            before = [node.args[0]] if _may_be_view(node) and isinstance(node.args[0], fx.Node) else []
            behind = [user for user in node.users if _may_be_view(user) and user.args[0] is node]
            for other in (*before, *behind):
                if other in self.stage_of and other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return {user for node in seen for user in node.users}

    def _is_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(getattr(module, "inplace", False) for module in self._modules[str(node.target)].modules())
        if bool(node.kwargs.get("inplace", False)):
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        of_operator = getattr(node.target, "__module__", "") == "_operator" and name in IN_PLACE
        return node.op in ("call_method", "call_function") and (of_operator or (name.endswith("_") and not name.endswith("__")))

    def name_of(self, node: fx.Node) -> str:
        """Return the name of a value among the skips."""
        return f"skip_{node.name}"

    def part(self, stage: int) -> nn.Module:
        """Return the module of a stage."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        passed = self._passed(stage - 1)
        if stage and not passed:
            graph.placeholder(IGNORED)
        for node in passed:
            copies[node] = graph.placeholder(node.name)
        for node, users in self.skips.items():
            if stage in users:
                copies[node] = graph.placeholder(self.name_of(node))
        for node in self._graph.nodes:
            is_here = self.stage_of.get(node) == stage
            if node.op == "get_attr":
                is_here = any(self.stage_of[user] == stage for user in node.users)
            if is_here and node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
            elif is_here:
                graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        if stage < self._num_stages - 1:
            passed_on = [copies[node] for node in self._passed(stage)]
            made = {self.name_of(node): copies[node] for node in self.skips if self.stage_of[node] == stage}
            output: Any = tuple(passed_on) or None
            graph.output((output, made) if made else output)
        graph.lint()
        return fx.GraphModule(self._model, graph, f"{type(self._model).__name__}Stage{stage}")

    def _passed(self, stage: int) -> list[fx.Node]:
        """Return the values that a stage makes for the next one alone."""
        return [node for node, users in self._users.items() if users == [stage, stage + 1]]


def _may_be_view(node: fx.Node) -> bool:
    """Return whether a node's result may lie in the memory of its first argument."""
    name = getattr(node.target, "__name__", "")
    return bool(node.args) and (node.op == "call_method" or (node.op == "call_function" and name in VIEWS))
