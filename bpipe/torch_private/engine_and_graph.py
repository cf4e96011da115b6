"""The engine and the graph of autograd, beyond what torch.autograd.graph offers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable, graph, profiler
from torch.autograd.graph import Node

from bpipe.torch_private.names import ask, has

__all__: list[str] = []

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

NO_BACKWARD = -1
_SAVED = "_raw_saved_"


if TYPE_CHECKING:
    Engine = torch._C._ImperativeEngine
else:
    Engine = ask(torch._C, "_ImperativeEngine", object)  # what runs backwards, to derive another one from

# How many nodes of graphs this thread has made. If torch does not tell, all microbatches of a kind count as equal.
num_nodes_made: Callable[[], int] = ask(torch.autograd, "_get_sequence_nr", lambda: 0)

# The saved-tensor hooks that are active in this thread; None if there are none.
hooks_around: Callable[[], Hooks | None] = partial(
    ask(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None), True
)


def check_splits_backwards() -> None:
    """Raise an UnsupportedTorchError if torch does not have all that it takes to run backwards in two halves, and hooks once."""
    engine = ("_ImperativeEngine", "_current_graph_task_id", "_current_autograd_node", "_will_engine_execute_node")
    owners = {torch._C: engine, Variable: ("_execution_engine",), graph: ("_MultiHandle",)}
    for owner, names in owners.items():
        for name in names:
            ask(owner, name)


_PROFILED = "_is_profiler_enabled"
# Whether torch.profiler records now; it is asked for each action.
is_profiled: Callable[[], bool] = partial(attrgetter(_PROFILED), profiler) if has(profiler, _PROFILED) else bool


def engine() -> Any:
    """Return what runs all backwards of this process; None if torch does not tell."""
    return ask(Variable, "_execution_engine", None)


def set_engine(new: Any) -> None:
    """Let another engine run all backwards of this process, if torch tells which one runs them now."""
    if engine() is not None:
        Variable._execution_engine = new


def common_hook_class() -> Any:
    """Return what torch makes for each hook on several tensors; None if torch does not tell."""
    return ask(graph, "_MultiHandle", None)


def set_common_hook_class(make: Any) -> None:
    """Let torch call something else for each hook on several tensors."""
    if common_hook_class() is not None:
        graph._MultiHandle = make  # type: ignore[misc]


def backward_runs() -> bool:
    """Return whether the caller is called by a backward."""
    return ask(torch._C, "_current_graph_task_id")() != NO_BACKWARD


def current_node() -> Node | None:
    """Return the node of the graph that a backward runs now."""
    return ask(torch._C, "_current_autograd_node")()


def will_run(node: Node) -> bool:
    """Return whether the backward that calls the caller leads to a node."""
    return ask(torch._C, "_will_engine_execute_node")(node)


class OwnPackHook(partial[Any]):
    """A pack hook that torch.utils.checkpoint passes over when it looks for the user's hooks around it.

    Since torch 2.15 a region with a policy warns of such hooks, or calls them for what it keeps, as the user chooses.
    """

    _checkpoint_internal = True
    _user_hooks: Hooks | None = None

    def set_users(self, hooks: Hooks) -> None:
        """Say which hooks of the user's are around this one."""
        self._user_hooks = hooks


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """Return the attributes of a class of nodes that have its saved tensors, as they were packed."""
    return tuple(name for name in dir(kind) if name.startswith(_SAVED) and has(kind, name))


def function_of(node: Any) -> type:
    """Return the custom Function whose backward a node is; the node's own class if torch does not tell."""
    return ask(type(node), "_forward_cls", type(node))


def takes_statistics(node: Node) -> bool:
    """Return whether a node is that of a BatchNorm or InstanceNorm which normalises by what it is given now.

    A BatchNorm that takes the statistics that it has collected counts too, if torch does not tell.
    """
    return "BatchNorm" in type(node).__name__ and bool(ask(node, "_saved_training", True))
