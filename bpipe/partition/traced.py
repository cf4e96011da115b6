"""Cut a traced model into stages: what passes stages in between is found, and handed on as skips."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from bpipe.errors import ConfigurationError
from bpipe.model.cut import mark
from bpipe.partition.model_split import listed
from bpipe.partition.name_lists import Names
from bpipe.partition.traced_proof import Attributes, difference_from
from bpipe.skips.routes import Skip

__all__ = ["split_traced"]

CONSTANT = "_tensor_constant"  # the beginning of the attributes in which torch.fx keeps tensors that it meets
IGNORED = "nothing"  # the first argument of a stage whose predecessor hands on skips alone
OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul"
VIEWS = frozenset(("getitem", "getattr", "flatten", "reshape", "chunk", "split", "unbind", "squeeze", "unsqueeze", "transpose"))
ENLARGING = (torch.cat, torch.concat, torch.stack, nn.functional.interpolate)
IN_PLACE = frozenset(f"i{name}" for name in OPERATORS)  # of Python's module `operator`


def split_traced(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    prove: bool = True,
) -> tuple[list[nn.Module], dict[str, Skip]]:
    """Cut a model into stages, by lists of fully qualified names, where its forward is more than a chain.

    The forward is traced by torch.fx down to the named modules, which stay as they are, with their names, hooks and modes. What is
    between them runs on the first stage that has all that it needs; but `torch.cat`, `torch.stack` and `interpolate`, whose results
    are larger than what they are made of, run where these are used. Values that later stages than the next use become skips:

        parts, skips = bpipe.split_traced(model, stages, (example,))
        stage = bpipe.PipelineStage(parts[rank], rank, len(parts), device, skips=skips)

    The first stage takes the model's arguments, the last one returns what the model returns. A trace does not see everything, such
    as `torch.no_grad()`, a custom Function's backward, or views that are changed. So the parts are proven on an example: forward
    and backward, in both modes, with the values that pass from stage to stage copied, as a link does.

    Args:
        model: the whole model; it is not changed. Between the named modules, its forward must not branch on values, and numbers
            and flags of the model are taken as they are now.
        stages: for each stage the names of its modules, which run on it wherever the forward calls them; those without parameters
            and buffers run anywhere.
        args: an example of the positional arguments. It takes the paths that later calls take: optional arguments that are given
            now are given always.
        kwargs: likewise the keyword arguments; a pipeline gives them to the first stage's rank alone.
        prove: False to trust the trace, for a model that cannot run here, such as one on the meta device.

    Returns:
        The stages, in order, and their skips.

    Raises:
        ConfigurationError: torch.fx cannot trace the forward, or what is between the named modules depends on whether the model
            trains, or has hooks, or writes attributes; the lists do not make up the model; a stage would need what a later one
            makes; stages share a parameter, or a tensor that is changed in place; a weight is not used; or the parts compute
            something else than the model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Ends(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         a = self.a(x)
        ...         return self.c(self.b(a)) + a
        >>> parts, skips = split_traced(Ends(), [["a"], ["b"], ["c"]], (torch.randn(3, 2),))
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
    skips = {cut.name_of(node): (cut.stage_of[node], *users) for node, users in cut.skips.items()}
    if unused := dict(model.named_parameters()).keys() - {path for part in parts for path, _ in part.named_parameters()}:
        raise ConfigurationError(f"the forward uses no {', '.join(sorted(unused)[:8])}, and no stage would save it: remove it")
    if prove and (found := difference_from(model, parts, skips, args, dict(kwargs or {}))) is not None:
        raise ConfigurationError(
            f"the stages do not do what the model does: {found.text}. Name modules further outside, or cut the model by hand"
        ) from found.cause
    mark(parts, [sorted(kept) for kept in lists])
    return parts, skips


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """Return Python's `operator.iadd`, or one like it, as a function of ours: the code that torch.fx prints rebinds names."""
    change = getattr(operator, name)

    def changed(value: Any, other: Any) -> Any:
        return change(value, other)

    changed.__name__ = changed.__qualname__ = name
    return changed


CHANGES = {name: _in_place(name) for name in IN_PLACE}


class _Value(fx.Proxy):
    """A traced value. That of torch.fx takes `x += 1` for `x = x + 1`, which other names of the same tensor would not see."""


def _changed_by(change: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda value, other: value.tracer.create_proxy("call_function", change, (value, other), {})


for _name, _change in CHANGES.items():
    setattr(_Value, f"__{_name}__", _changed_by(_change))


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
    """Trace a model in both modes, which must do the same between the named modules, and leave it as it was."""
    kind, named = type(model).__name__, [name for kept in lists for name in kept]
    through = {path: module for path, module in names.modules.items() if names.is_above(path, named)}
    if hooked := [path or "the model" for path, module in through.items() if _has_hooks(module)]:
        raise ConfigurationError(f"{', '.join(hooked)} has hooks, and is cut into stages: put them on the named modules")
    if "forward" in vars(model) or type(model).__call__ is not nn.Module.__call__:
        raise ConfigurationError(f"{kind} has a forward or a __call__ of its own, which torch.fx does not trace: make it a class")
    modes, graphs = [(module, module.training) for module in names.modules.values()], []
    for is_other in (True, False):
        before, numbers = Attributes(through), (random.getstate(), torch.get_rng_state())
        try:
            for module, trains in modes:
                module.training = trains != is_other
            graphs.append(_Tracer(names, lists).trace(model))
        except Exception as error:
            raise ConfigurationError(
                f"torch.fx cannot trace the forward of {kind}: {error}. Name modules further outside, or cut the model by hand and "
                "give PipelineStage(skips=)"
            ) from error
        finally:
            for module, trains in modes:
                module.training = trains
            written = before.restore()
            drew = random.getstate() != numbers[0] or not torch.equal(torch.get_rng_state(), numbers[1])
            random.setstate(numbers[0])
            torch.set_rng_state(numbers[1])
        if written or drew:
            written = [one for one in written if not one.startswith(CONSTANT)]
            what = f"writes {', '.join(written)}" if written else "draws random numbers, or makes tensors out of nothing,"
            raise ConfigurationError(
                f"the forward of {kind} {what} between the named modules, which would be done once only, now. Do that in modules "
                "that are named; make tensors of others (torch.ones_like), or register them as buffers"
            )
    if str(graphs[0]) != str(graphs[1]):
        raise ConfigurationError(
            f"the forward of {kind} does something else when it trains, between the named modules: use modules for that, such as "
            "nn.Dropout, and name them"
        )
    return graphs[1]


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


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
        if unsendable := [node for node, users in self._users.items() if len(users) > 1 and _is_unsendable(node)]:
            raise ConfigurationError(
                f"{', '.join(str(one) for one in unsendable)}: a shape, dtype or device of one stage is used by a later one, and "
                "no message carries these: unpack a shape into its numbers, and ask the later stage's own tensors"
            )

    def _assign(self, names: Names, lists: Sequence[Sequence[str]]) -> Iterable[str]:
        """Give each node its stage: that of its module, or the first one that has all that it needs."""
        latest, at = 0, dict[fx.Node, int]()
        for node in self._graph.nodes:
            is_call = node.op in ("call_function", "call_method")
            needed = max((at[one] for one in node.all_input_nodes), default=latest if is_call else 0)
            found = [place for place, kept in enumerate(lists) if names.is_kept(str(node.target), kept)]
            if node.op == "call_module" and not self._has_state(str(node.target)):
                found = []  # it can run anywhere
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

    def _has_state(self, path: str) -> bool:
        module = self._modules[path]
        return any(True for _ in (*module.parameters(), *module.buffers()))

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
        is_ours = node.target in CHANGES.values() or "out" in node.kwargs
        return node.op in ("call_method", "call_function") and (is_ours or (name.endswith("_") and not name.endswith("__")))

    def name_of(self, node: fx.Node) -> str:
        """Return the name of a value among the skips."""
        return f"skip_{node.name}"

    def part(self, stage: int) -> nn.Module:
        """Return the module of a stage."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        passed = self._passed(stage - 1)
        if stage and not passed:
            graph.placeholder(IGNORED)
        for number, node in enumerate(passed):
            copies[node] = graph.placeholder(f"passed_{number}")
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
        part = fx.GraphModule(self._model, graph, f"{type(self._model).__name__}Stage{stage}")
        saved = self._model.state_dict().keys()
        for path in part.state_dict().keys() - saved:  # torch.fx makes all tensors that it meets buffers that are saved
            owner, _, name = path.rpartition(".")
            part.get_submodule(owner)._non_persistent_buffers_set.add(name)
        return part

    def _passed(self, stage: int) -> list[fx.Node]:
        """Return the values that a stage makes for the next one alone."""
        return [node for node, users in self._users.items() if users == [stage, stage + 1]]


def _is_unsendable(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "size":
        return len(node.args) == 1 and not node.kwargs
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "dtype", "device")


def _may_be_view(node: fx.Node) -> bool:
    """Return whether a node's result may lie in the memory of its first argument."""
    name = getattr(node.target, "__name__", "")
    return bool(node.args) and (node.op == "call_method" or (node.op == "call_function" and name in VIEWS))
