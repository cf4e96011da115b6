"""Split a stage's backward: compute the gradients of its inputs first, and those of its parameters when there is time.

Nodes of the graph that lead to the stage's inputs are its trunk. A branch begins where the way to a parameter leaves the trunk:

    outputs -> ... -> N -> ... -> N' -> ... -> inputs        the trunk: backward_input
                      |           |
                      +-> T -> w  +-> T' -> w'               the branches: backward_weight, from the gradients of N and N'

Autograd computes only the gradients that a run asks for: each of the two passes computes one of the two products in the backward of
a matrix product. The hooks of N run in `backward_input`. `backward_weight` calls N directly, without hooks, and continues from T:
so each hook runs once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, register_multi_grad_hook

from bpipe.backward.autograd import Alone, InputGrads, go_on, run_backward
from bpipe.errors import SavedTensorError, StageError
from bpipe.memory.saved.joined import Joined
from bpipe.memory.saved.nodes import saved_by
from bpipe.memory.saved.saved_tensor import FORGOTTEN, Packed, Saved
from bpipe.torch_private.engine_and_graph import current_node
from bpipe.torch_private.owners_and_versions import hooks_on, version_of

__all__: list[str] = []

# These run a backward of their own (as libraries' own checkpoints do), or free saved tensors: they run once, in the whole graph.
INDIVISIBLE = frozenset({"CompiledFunctionBackward"})
LEAF = "AccumulateGrad"

_FILE_OF_COMMON_HOOKS = register_multi_grad_hook.__code__.co_filename

Gradients = Sequence[torch.Tensor | None]
Graph = dict[Node, list[Node]]  # each node's successors
Trunk = dict[Node, list[Node]]  # each trunk node's successors outside the trunk; a node comes after those it leads to


class _Branch:
    """The paths from a node of the trunk to some leaves; they leave it at `starts`, the first nodes outside."""

    def __init__(self, starts: Sequence[Node], node: Node | None = None, gradients: Gradients = ()) -> None:
        self.nodes, self.starts, self.leaves = [] if node is None else [node], starts, list[GradientEdge]()
        self.is_early = node is not None and (isinstance(node, BackwardCFunction) or _is_recomputed(node))
        self.gradients, self._versions = list(gradients), list[int]()

    def watch(self) -> None:
        """Remember the gradients that reach the node; if it has a hook on all its results, mark it to be computed early instead."""
        handle = self.nodes[0].register_hook(_memory(self.gradients, self._versions))
        hooks = handle.hooks_dict_ref()
        if hooks is not None and len(hooks) > 1:
            handle.remove()
            self.is_early = True

    def keep(self, gradients: Gradients) -> None:
        """Keep these gradients in place of the present ones, with the same values."""
        self._check_unchanged()
        self.gradients[:] = gradients
        self._versions[:] = _versions(gradients)

    def _check_unchanged(self) -> None:
        if self._versions != _versions(self.gradients):
            raise StageError(
                "a gradient was changed in place between backward_input and backward_weight, probably by a hook: "
                "let the hook return a new tensor, as torch requires, or use a schedule with whole backwards"
            )

    def run(self, alone: Alone) -> None:
        """Continue with the gradients to the leaves, if any have arrived."""
        if not self.gradients:
            return
        self._check_unchanged()
        node, starts = self.nodes[0], set(self.starts)
        following = enumerate(node.next_functions)
        edges = {index: GradientEdge(start, nr) for index, (start, nr) in following if start is not None and start in starts}
        results = alone.call(node, self.gradients, edges.values())
        products = [(edge, results[index]) for index, edge in edges.items()]
        del results
        self.gradients.clear()
        _forget([node])
        go_on(products)


class _Outside(_Branch):
    """The paths to leaves from outputs that do not depend on the inputs."""

    def __init__(self, edges: Sequence[GradientEdge], gradients: Gradients) -> None:
        super().__init__([edge.node for edge in edges], None, gradients)
        self._edges = edges

    def watch(self) -> None:
        """Do nothing, because the gradients are there already."""

    def keep(self, gradients: Gradients) -> None:
        self.gradients[:] = gradients

    def run(self, alone: Alone) -> None:
        run_backward(self._edges, self.gradients)


def _memory(gradients: list[torch.Tensor | None], versions: list[int]) -> Callable[[Gradients, Gradients], None]:
    """Return a hook that stores the gradients that a node gets, as its other hooks have left them."""

    def hook(_: Gradients, arriving: Gradients) -> None:
        gradients[:] = arriving
        versions[:] = _versions(arriving)

    return hook


def _versions(gradients: Gradients) -> list[int]:
    return [-1 if gradient is None else version_of(gradient) for gradient in gradients]


class DeferredWeightGrad:
    """The part of a backward that remains after `backward_input`. It owns the graph, and frees it branch by branch."""

    def __init__(self, branches: Iterable[_Branch] = ()) -> None:
        self._branches = deque(branches)
        self._running: _Branch | None = None

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that it stores until it runs."""
        return [gradient for branch in self._branches for gradient in branch.gradients if gradient is not None]

    def replace(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Replace `gradients()` by others with the same values."""
        others = iter(gradients)
        for branch in self._branches:
            branch.keep([None if gradient is None else next(others) for gradient in branch.gradients])

    def leads_to(self, leaves: Set[Node]) -> bool:
        """Return whether it has gradients for some of these leaves; also True if that is unknown."""
        return any(not branch.leaves or not leaves.isdisjoint(edge.node for edge in branch.leaves) for branch in self._branches)

    def run(self) -> None:
        """Add the gradients of parameters and other leaves to their `.grad`."""
        alone = Alone()
        while self._branches:
            self._running = self._branches.popleft()
            self._running.run(alone)
        self._running = None

    def is_running(self) -> bool:
        """Return whether the backward that calls this, through a hook, is this object's own, and not one started inside it."""
        return self._running is not None and current_node() in self._running.nodes


class GivenWeightGrad(DeferredWeightGrad):
    """A weight gradient that a stage's module computes by itself, when its runner is called."""

    def __init__(self, runner: Callable[..., None]) -> None:
        super().__init__()
        self._runner = runner

    def run(self) -> None:
        self._runner()


def run_backward_input(
    edges: Sequence[GradientEdge], gradients: Gradients, input_grads: InputGrads, before: Callable[[Set[Node]], None]
) -> DeferredWeightGrad:
    """Compute the gradients of a stage's inputs, and free memory that the weight gradients do not need.

    `backward_input` and `backward_weight` together equal one backward to the bit. Therefore a leaf that several branches lead to
    gets its gradient now, added up in the order of one backward. So does a leaf behind an operation that would run twice (a custom
    autograd Function, or a recomputation), or that has a hook on all of its results; and so do vectors, such as a norm's weights,
    whose gradients need less memory than waiting does.

    Args:
        input_grads: collects the gradients of the stage's inputs.
        before: called with the leaves whose gradients are computed now, before they are.
    """
    if all(gradient is None for gradient in gradients):
        return DeferredWeightGrad()
    if input_grads.anchor is None:
        return DeferredWeightGrad([_Outside(edges, gradients)])
    anchor = get_gradient_edge(input_grads.anchor)
    next_of, trunk = _explore(edges, anchor.node)
    branches = [] if _is_indivisible(next_of) else _branches(next_of, trunk, edges, gradients)
    for branch in branches:
        if not branch.is_early:
            branch.watch()
    late = [branch for branch in branches if not branch.is_early]
    early = [leaf for branch in branches if branch.is_early for leaf in branch.leaves]
    leaves = {leaf.node for leaf in early} if late else {node for node, following in next_of.items() if not following}
    before(leaves)
    if not late:
        run_backward(edges, gradients)
        return DeferredWeightGrad()
    run_backward(edges, gradients, inputs=[anchor, *early], retain_graph=True)
    _forget(next_of.keys() - {node for branch in late for node in branch.nodes})
    return DeferredWeightGrad(late)


def _explore(edges: Iterable[GradientEdge], anchor: Node) -> tuple[Graph, Trunk]:
    """Walk the graph behind some edges, and find its trunk."""
    next_of: Graph = {}
    trunk: Trunk = {anchor: []}
    stack = [edge.node for edge in edges]
    while stack:
        node = stack[-1]
        if node not in next_of:
            next_of[node] = [following for following, _ in node.next_functions if following is not None]
            stack += [following for following in next_of[node] if following not in next_of]
        elif stack.pop() not in trunk:
            beside = [following for following in next_of[node] if following not in trunk]
            if len(beside) < len(next_of[node]):
                trunk[node] = beside
    return next_of, trunk


def _is_indivisible(next_of: Graph) -> bool:
    """Return whether a graph must run as a whole, because a part of it must, or because code outside observes all of it."""
    names = {type(node).__name__ for node in next_of}
    if torch.is_anomaly_enabled() or not INDIVISIBLE.isdisjoint(names) or "Checkpoint" in " ".join(names):
        return True
    leaves = [node.variable for node in next_of if type(node).__name__ == LEAF]  # type: ignore[attr-defined]
    return any(map(_has_common_hook, leaves))


def _has_common_hook(leaf: torch.Tensor) -> bool:
    """Return whether a hook waits for the gradients of several leaves, in one backward (`register_multi_grad_hook`)."""
    hooks, _ = hooks_on(leaf)
    return any(getattr(getattr(hook, "__code__", None), "co_filename", None) == _FILE_OF_COMMON_HOOKS for hook in hooks.values())


def _branches(next_of: Graph, trunk: Trunk, edges: Sequence[GradientEdge], gradients: Gradients) -> list[_Branch]:
    """Find the branches, those nearest to the outputs first, and their leaves."""
    branches = [_Branch(beside, node) for node, beside in reversed(trunk.items()) if beside]
    outside = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if edge.node not in trunk]
    if outside:
        branches.append(_Outside(*zip(*outside)))
    owners: dict[Node, _Branch] = {}
    for branch in branches:
        _claim(branch, next_of, owners)
        branch.is_early |= all(_is_vector(leaf.node) for leaf in branch.leaves)
    return branches


def _claim(branch: _Branch, next_of: Graph, owners: dict[Node, _Branch]) -> None:
    """Follow a branch to its leaves. Branches that meet are computed early: their sum must be formed in one run."""
    stack = list(branch.starts)
    while stack:
        node = stack.pop()
        if node not in owners:
            owners[node] = branch
            branch.nodes.append(node)
            branch.is_early |= _is_recomputed(node)
            stack += next_of[node]
            if not next_of[node]:
                branch.leaves.append(GradientEdge(node, 0))
        elif owners[node] is not branch:
            branch.is_early = owners[node].is_early = True


def _is_vector(leaf: Node) -> bool:
    variable = getattr(leaf, "variable", None)
    return variable is not None and variable.ndim < 2


def _is_recomputed(node: Node) -> bool:
    """Return whether a node's backward first reruns a forward (activation checkpointing), as all or none of its tensors show."""
    data = next((data for _, data in saved_by(node) if data is not None), None)
    return type(data).__module__ == "torch.utils.checkpoint"


def _forget(nodes: Iterable[Node]) -> None:
    """Free the tensors that nodes have saved and that no backward will read again."""
    for node in nodes:
        for saved, data in saved_by(node):
            if isinstance(data, (Saved, Packed, Joined)):
                data.forget()
            elif isinstance(data, torch.Tensor):
                try:
                    saved.register_hooks(_nothing, _gone)
                except RuntimeError:
                    continue  # it has hooks that bpipe did not set


def _nothing(_: torch.Tensor) -> None:
    """Keep nothing of a tensor that is no longer needed."""


def _gone(_: None) -> torch.Tensor:
    raise SavedTensorError(FORGOTTEN)
