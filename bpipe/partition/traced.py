"""Cut a traced model into stages: what passes stages in between is found, and handed on as skips."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from bpipe.device.generators import PYTHON, TORCH, are_equal
from bpipe.errors import ConfigurationError
from bpipe.flow.shape_arguments import Skip
from bpipe.model.cut import mark
from bpipe.partition.model_split import listed
from bpipe.partition.name_lists import Names, raise_all
from bpipe.partition.split_check import DifferenceError, compare
from bpipe.partition.traced_proof import Attributes, in_mode
from bpipe.partition.transformers import transformer_layers
from bpipe.torch_private.modules import hooks_of

__all__ = ["split_traced"]

CONSTANT = "_tensor_constant"  # the beginning of the attributes in which torch.fx keeps tensors that it meets
IGNORED = "nothing"  # the first argument of a stage whose predecessor hands on skips alone
# Of Python's module `operator`.
OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul"
VIEWS = frozenset(("getitem", "getattr", "flatten", "reshape", "chunk", "split", "unbind", "squeeze", "unsqueeze", "transpose"))
ENLARGING = (torch.cat, torch.concat, torch.stack, nn.functional.interpolate)


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
            now are given always, those that are not given now never; and None, True, False and texts stay what they are now.
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
    lists = [listed(one) for one in stages]
    names = Names(model, "split_traced cuts")
    names.check(lists)
    example = dict(kwargs or {})
    graph = _traced(model, names, [name for kept in lists for name in kept], _fixed(model, args, example))
    cut = _Cut(model, names, lists, graph)
    parts = cut.parts
    skips = {cut.name_of(node): (cut.stage_of[node], *users) for node, users in cut.skips.items()}
    if unused := dict(model.named_parameters()).keys() - {path for part in parts for path, _ in part.named_parameters()}:
        raise ConfigurationError(f"the forward uses no {', '.join(sorted(unused)[:8])}, and no stage would save it: remove it")
    try:
        for is_other in (False, True) if prove else ():
            with in_mode([module for one in (model, *parts) for module in one.modules()], is_other=is_other):
                compare(model, parts, args, example, skips=skips)
    except DifferenceError as found:
        raise ConfigurationError(
            f"the stages do not do what the model does: {found}. Name modules further outside, or cut the model by hand"
        ) from found.__cause__
    mark(parts, [sorted(kept) for kept in lists])
    return parts, skips


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """Return Python's `operator.iadd`, or one like it, as a function of ours: the code that torch.fx prints rebinds names."""
    change = getattr(operator, name)

    def changed(value: Any, other: Any) -> Any:
        return change(value, other)

    changed.__name__ = changed.__qualname__ = name
    return changed


CHANGES = {name: _in_place(name) for name in (f"i{operation}" for operation in OPERATORS)}  # in place


def _fixed(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments on which a forward may branch, by name: None, flags and texts, as the example has them."""
    if not args and not kwargs:
        return {}  # there is no example
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigurationError(f"{type(model).__name__} does not take the example: {error}") from error
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if value is None or isinstance(value, (bool, str))}


def _check_fixed(value: Any, traced: Any, name: str) -> None:
    """Raise unless an argument of a stage is what it was in the example."""
    if value is not traced and not (isinstance(value, (bool, str)) and value == traced):
        found = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
        raise ConfigurationError(
            f"{name} is {found}, and was {traced!r} in the example by which split_traced has cut the model: give {name} there as "
            "it will be in each step"
        )


class _Value(fx.Proxy):
    """A traced value. That of torch.fx takes `x += 1` for `x = x + 1`, which other names of the same tensor would not see."""


def _changed_by(change: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda value, other: value.tracer.create_proxy("call_function", change, (value, other), {})


for _name, _change in CHANGES.items():
    setattr(_Value, f"__{_name}__", _changed_by(_change))


class _Tracer(fx.Tracer):
    """Traces down to the named modules, and to those that have none of them inside."""

    proxy_buffer_attributes = True  # what is done with buffers belongs to the forward, too

    def __init__(self, names: Names, named: Sequence[str], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self._names, self._named, self._fixed = names, named, fixed

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        for place, arg in enumerate(args):
            name = str(arg.node.target) if isinstance(arg, fx.Proxy) else ""
            if name in self._fixed:
                args[place] = self._fixed[name]
                self.create_proxy("call_function", _check_fixed, (arg, self._fixed[name], name), {})
        return function, args

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self._names.is_above(module_qualified_name, self._named)


def _traced(model: nn.Module, names: Names, named: Sequence[str], fixed: Mapping[str, Any]) -> fx.Graph:
    """Trace a model in both modes, which must do the same between the named modules, and leave it as it was."""
    kind = type(model).__name__
    through = {path: module for path, module in names.modules.items() if names.is_above(path, named)}
    if hooked := [path or "the model" for path, module in through.items() if any(hooks_of(module))]:
        raise ConfigurationError(f"{', '.join(hooked)} has hooks, and is cut into stages: put them on the named modules")
    if "forward" in vars(model) or type(model).__call__ is not nn.Module.__call__:
        raise ConfigurationError(f"{kind} has a forward or a __call__ of its own, which torch.fx does not trace: make it a class")
    graphs = []
    for is_other in (True, False):
        before, numbers = Attributes(through), [(source, source.get()) for source in (PYTHON, TORCH)]
        try:
            with in_mode(names.modules.values(), is_other=is_other):
                graphs.append(_Tracer(names, named, fixed).trace(model))
        except Exception as error:
            why, ways = _why(model, error), _other_ways(model)
            raise ConfigurationError(f"torch.fx cannot trace the forward of {kind}: {why}. {ways}") from error
        finally:
            written = before.restore()
            drew = not all(are_equal(source.get(), state) for source, state in numbers)
            for source, state in numbers:
                source.set(state)
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


def _why(model: nn.Module, error: Exception) -> str:
    """Return why torch.fx has failed, which says of forwards like the first that "co_varnames is too small"."""
    inner = inspect.unwrap(type(model).forward)
    takes_any = any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in inspect.signature(inner).parameters.values())
    return "a decorator wraps it, and it takes *args or **kwargs" if inner is not type(model).forward and takes_any else str(error)


def _other_ways(model: nn.Module) -> str:
    """Return the other ways to cut a model, that for Transformers models first if it is one that can be cut so."""
    try:
        transformer_layers(model)
    except ConfigurationError:
        return (
            "Name modules further outside, cut the model by hand and give PipelineStage(skips=), or let torch's tracer cut it "
            "(torch.distributed.pipelining.pipeline), whose stages schedules take"
        )
    return "Cut it with bpipe.split_transformer(model, n), which takes such models"


class _Cut:
    """The nodes of a traced model, by stage."""

    def __init__(self, model: nn.Module, names: Names, lists: Sequence[Sequence[str]], graph: fx.Graph) -> None:
        self._graph = graph
        self._model, self._num_stages = model, len(lists)
        self._modules = names.modules
        self.stage_of: dict[fx.Node, int] = {}
        not_a_split = f"these {len(lists)} stages are not a split of the model:"
        raise_all(not_a_split, [*self._assign(names, lists)])
        self._users = {node: self._used_by(node) for node in self.stage_of}
        self.skips = {node: later for node, (_, *later) in self._users.items() if later and later != [self.stage_of[node] + 1]}
        self.parts = [self._part(stage) for stage in range(len(lists))]
        raise_all(not_a_split, [*self._shared(), *self._changed()])
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
        reads = (node for node in self._graph.nodes if node.op == "get_attr")
        changed = {node.target for node in reads if any(map(self._is_in_place, node.users))}
        used: dict[int, tuple[str, list[int]]] = {}
        for stage, part in enumerate(self.parts):
            buffers = [named for named in part.named_buffers() if named[0] in changed]
            for name, tensor in (*part.named_parameters(), *buffers):
                used.setdefault(id(tensor), (name, []))[1].append(stage)
        for name, stages in used.values():
            if len(stages) > 1:
                yield f"{name} is used by stages {', '.join(map(str, stages))}: cut the model by hand, and tie its weights"

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

    def _part(self, stage: int) -> nn.Module:
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
        for path in dict(part.named_buffers()).keys() - saved:  # torch.fx makes all tensors that it meets buffers that are saved
            owner, _, name = path.rpartition(".")
            below = part.get_submodule(owner)
            below.register_buffer(name, below.get_buffer(name), persistent=False)
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
