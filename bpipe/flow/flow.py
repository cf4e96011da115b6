"""The flow of a step: its computations, what each needs from others, and the ranks that run them.

A model is cut into parts. A node is an operation on a part, its forward F or its backward B: one computation for each unit, which
is a microbatch or a slice of one. An edge leads from one node to another: from each unit's computation to that of the same unit.
So a flow has a few nodes and edges for each part of the model, however many microbatches a step has. Which stage runs a part may
differ between microbatches: stages that take turns are replicas of each other, or twins of two directions.

    part      0         1         2
    forward   F ------> F ------> F      VALUE: a result whose gradient comes back
              |         |         |      SAVED: what a forward keeps for its backward
    backward  B <------ B <------ B      GRADIENT: of a value

Shapes make flows, and make other flows from them: see `bpipe.flow.shapes`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from bpipe.flow.units import Units

__all__: list[str] = []

FORWARD, BACKWARD = "F", "B"


class Kind(StrEnum):
    """What an edge carries. Values and gradients may lead to another rank.

    Example:
        >>> Kind.STATE.value
        'state'
    """

    VALUE = "value"  # a result, whose gradient comes back
    DETACHED = "detached"  # a result whose gradient nobody asks for
    GRADIENT = "gradient"  # of a value, on its way back
    STATE = "state"  # what a slice leaves to others on its stage, such as keys and values, or gives back, their gradients
    SAVED = "saved"  # what a forward keeps for its backward


class Node(NamedTuple):
    """The computations of one operation on one part of the model, one for each unit."""

    op: str
    part: int


class Edge(NamedTuple):
    """What the computations of one node give to those of another, for each unit.

    An edge from a node to itself leads from each slice of a microbatch to those that the node runs after it.

    Args:
        source: makes it.
        target: uses it.
        kind: what it is.
        name: which value, or gradient; empty for a part's own output.
        turns: the microbatches for which it exists, modulo `Flow.period`; empty for all.
    """

    source: Node
    target: Node
    kind: Kind
    name: str = ""
    turns: tuple[int, ...] = ()


class Shape(NamedTuple):
    """A call that made a flow: the name of a module in `bpipe.flow.shapes`, and its arguments besides the flow it began with."""

    name: str
    arguments: tuple[Any, ...]


class End(NamedTuple):
    """The other end of an edge, seen from one computation."""

    op: str
    stage: int
    kind: Kind
    name: str


class Message(NamedTuple):
    """All edges between two computations on different ranks, seen from one of them.

    Args:
        op: of the computation at the other end.
        stage: of the computation at the other end.
        rank: of that stage.
        is_gradient: whether it carries gradients, not values.
        names: of the values that it carries, or whose gradients; empty for a part's own output.
        returns: whether a gradient comes back for it.
    """

    op: str
    stage: int
    rank: int
    is_gradient: bool
    names: tuple[str, ...]
    returns: bool

    @property
    def is_aside(self) -> bool:
        """Whether all it carries has names: it is not the output that the next part waits for, and may be used much later."""
        return all(self.names)


class Exchange(NamedTuple):
    """An exchange of gradients, seen from one of its two stages.

    Args:
        other: the stage at the other end.
        after: the stages on this rank that hold the weights, all of whose backwards come before.
    """

    other: int
    after: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What a step computes, who needs it, and where it runs.

    Args:
        stage_ranks: the rank of each stage.
        parts: the part that each stage runs.
        num_microbatches: of a step.
        units: what passes through the stages by itself: whole microbatches, or the slices of each.
        routes: for each part, the stages that run it, which microbatches take in turns.
        nodes: all of them.
        edges: between them.
        sums: stages on several ranks that hold the same weights, or have some in common, and add up the gradients of these when
            all is computed: two twins, or the holders of tied weights.
        shapes: what made it, in order.
    """

    stage_ranks: tuple[int, ...]
    parts: tuple[int, ...]
    num_microbatches: int
    units: Units
    routes: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    sums: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # another process has other hashes

    @cached_property
    def _hash(self) -> int:
        return hash((self.stage_ranks, self.num_microbatches, self.units, self.edges))  # once: much is looked up by flow

    @property
    def num_units(self) -> int:
        """The number of microbatches, or of slices of all microbatches."""
        return self.num_microbatches * self.units

    @cached_property
    def period(self) -> int:
        """After how many microbatches the routes repeat."""
        return math.lcm(*map(len, self.routes))

    @cached_property
    def exchanges(self) -> dict[tuple[int, int], Exchange]:
        """For each rank's exchanges of gradients with other ranks, by stage and part of their actions, what each needs.

        Two ranks exchange those of all weights that the same two stages stand for at once. The part is 0 for twins, and otherwise
        one more than the stage at the other end.
        """
        found: dict[tuple[int, int], Exchange] = {}
        for group in self.sums:
            by_rank: dict[int, list[int]] = defaultdict(list)
            for stage in group:
                by_rank[self.stage_ranks[stage]].append(stage)
            for (one, *more), (other, *_) in permutations(by_rank.values(), 2):
                key = one, other + 1 if self.parts[one] != self.parts[other] else 0
                known = found.get(key, Exchange(other, frozenset()))
                found[key] = known._replace(after=known.after | {one, *more})
        return found

    @cached_property
    def has_backward(self) -> bool:
        """Whether there are backwards."""
        return any(node.op == BACKWARD for node in self.nodes)

    @cached_property
    def has_asides(self) -> bool:
        """Whether anything but the output of a part goes to another part."""
        return any(edge.name for edge in self.edges)

    @cached_property
    def problem(self) -> str:
        """Why it cannot be run, whatever made it; empty if it can."""
        return _problem(self)

    def arguments(self, name: str) -> tuple[Any, ...] | None:
        """Return the arguments of the latest shape of a name that made the flow; None if there was none."""
        return next((shape.arguments for shape in reversed(self.shapes) if shape.name == name), None)

    def turn_of(self, unit: int) -> int:
        """Return which turn of the routes a unit takes."""
        return unit // self.units % self.period

    def stage_of(self, part: int, turn: int) -> int:
        """Return the stage that runs a part in a turn."""
        stages = self.routes[part]
        return stages[turn % len(stages)]

    def turns_of(self, stage: int) -> tuple[int, ...]:
        """Return the turns in which a stage runs its part."""
        return self._turns[stage]

    def needs(self, op: str, stage: int, turn: int) -> tuple[End, ...]:
        """Return what a computation gets from others, besides slices of its own microbatch: the sources of its edges."""
        return self._ends(op, stage, turn, is_source=False)

    def gives(self, op: str, stage: int, turn: int) -> tuple[End, ...]:
        """Return what others get from a computation, besides slices of its own microbatch: the targets of its edges."""
        return self._ends(op, stage, turn, is_source=True)

    def received(self, op: str, stage: int, turn: int) -> tuple[Message, ...]:
        """Return the messages from other ranks that a computation needs, in the order in which they are sent."""
        return self._messages(op, stage, turn, is_source=False)

    def sent(self, op: str, stage: int, turn: int) -> tuple[Message, ...]:
        """Return the messages to other ranks that follow a computation, in their order: first its own output, then asides.

        What is used first is sent first: values go to earlier parts before later ones, gradients to later ones before earlier ones.
        """
        return self._messages(op, stage, turn, is_source=True)

    def message(self, stage: int, other: int, turn: int) -> Message:
        """Return the message of values between two stages, seen from the first one."""
        messages = (one for find in (self.sent, self.received) for one in find(FORWARD, stage, turn))
        return next(one for one in messages if one.stage == other)

    def shares_memory(self, stage: int) -> bool:
        """Return whether a stage gets tensors from another one of its rank, or hands them over to it, without a message."""
        ends = (end for find in (self.needs, self.gives) for turn in self.turns_of(stage) for end in find(FORWARD, stage, turn))
        return any(end.stage != stage and self.stage_ranks[end.stage] == self.stage_ranks[stage] for end in ends)

    def units_of(self, op: str, stage: int) -> Iterator[int]:
        """Yield the units of a stage in the order in which an operation takes them.

        Microbatches are in ascending order, because sums of gradients, dropout and BatchNorm depend on it. The slices of one run
        forward in the order of the sequence, and backward against it.
        """
        turns, step = set(self.turns_of(stage)), 1 if op == FORWARD else -1
        for microbatch in range(self.num_microbatches):
            if microbatch % self.period in turns:
                yield from self.units.of(microbatch)[::step]

    def previous(self, op: str, stage: int) -> array[int]:
        """Return for each unit the one that an operation of a stage takes before it; -1 if there is none."""
        key = self.turns_of(stage), op == FORWARD
        if key not in self._found:
            previous = array("q", [-1]) * self.num_units
            for earlier, later in pairwise(self.units_of(op, stage)):
                previous[later] = earlier
            self._found[key] = previous
        found: array[int] = self._found[key]
        return found

    @cached_property
    def stateful(self) -> frozenset[Node]:
        """The nodes whose slices read what those before them left."""
        return frozenset(edge.source for edge in self.edges if edge.source == edge.target)

    @cached_property
    def latest_sources(self) -> dict[Node, tuple[Node, ...]]:
        """For each node those that it needs, without those that another one of them needs, too, itself or two steps before."""
        sources: dict[Node, dict[Node, None]] = {node: {} for node in self.nodes}
        for edge in self.edges:
            if edge.source != edge.target:
                sources[edge.target][edge.source] = None

        def is_before(early: Node, late: Node) -> bool:
            return early in sources[late] or any(early in sources[between] for between in sources[late])

        return {
            node: tuple(one for one in needed if not any(is_before(one, other) for other in needed if other != one))
            for node, needed in sources.items()
        }

    @cached_property
    def _turns(self) -> dict[int, tuple[int, ...]]:
        turns = defaultdict(list)
        for part in range(len(self.routes)):
            for turn in range(self.period):
                turns[self.stage_of(part, turn)].append(turn)
        return defaultdict(tuple, {stage: tuple(own) for stage, own in turns.items()})

    @cached_property
    def _edges(self) -> dict[tuple[Node, bool], list[Edge]]:
        """By node, and whether it is their source, the edges between different nodes."""
        by_node = defaultdict(list)
        for edge in (edge for edge in self.edges if edge.source != edge.target):
            by_node[edge.source, True].append(edge)
            by_node[edge.target, False].append(edge)
        return by_node

    @cached_property
    def _found(self) -> dict[Any, Any]:
        """What was looked up before: the same few nodes are asked about for each unit."""
        return {}

    def _ends(self, op: str, stage: int, turn: int, *, is_source: bool) -> tuple[End, ...]:
        key = op, stage, turn, is_source
        if key not in self._found:
            edges = self._edges.get((Node(op, self.parts[stage]), is_source), ())
            ends = [(edge, edge.target if is_source else edge.source) for edge in edges if not edge.turns or turn in edge.turns]
            self._found[key] = tuple(End(node.op, self.stage_of(node.part, turn), edge.kind, edge.name) for edge, node in ends)
        found: tuple[End, ...] = self._found[key]
        return found

    def _messages(self, op: str, stage: int, turn: int, *, is_source: bool) -> tuple[Message, ...]:
        key = op, stage, turn, is_source, Message
        if key not in self._found:
            by_end = defaultdict(list)
            for end in self._ends(op, stage, turn, is_source=is_source):
                if self.stage_ranks[end.stage] != self.stage_ranks[stage]:
                    by_end[end.op, end.stage].append(end)
            messages = [
                Message(
                    *end,
                    self.stage_ranks[end[1]],
                    any(edge.kind is Kind.GRADIENT for edge in edges),
                    tuple(edge.name for edge in edges),
                    any(edge.kind is Kind.VALUE for edge in edges),
                )
                for end, edges in by_end.items()
            ]
            messages.sort(key=lambda one: (one.is_aside, self.parts[one.stage] * (-1 if one.is_gradient else 1)))
            self._found[key] = tuple(messages)
        found: tuple[Message, ...] = self._found[key]
        return found


def value_name(parts: Iterable[int]) -> str:
    """Return the name of a value that one part makes and others use, in a flow and among sizes.

    Example:
        >>> value_name((0, 2, 3))
        '0-2-3'
    """
    return "-".join(map(str, parts))


def _problem(flow: Flow) -> str:
    """Return why a flow cannot be run, whatever made it; empty if it can.

    Every edge has computations at both its ends, and its source can run before its target. Gradients mirror values. One part gets
    another one's output. What stays on a stage stays on its rank. Stages that add up gradients are on several ranks.
    """
    if len(flow.parts) != len(flow.stage_ranks) or not set(flow.parts) <= set(range(len(flow.routes))):
        return f"{len(flow.stage_ranks)} stages run parts {flow.parts} of {len(flow.routes)}"
    for part, stages in enumerate(flow.routes):
        if not stages or any(not 0 <= stage < len(flow.parts) or flow.parts[stage] != part for stage in stages):
            return f"part {part} is run by stages {stages}, which are none of its own"
    nodes = set(flow.nodes)
    for edge in flow.edges:
        if not {edge.source, edge.target} <= nodes:
            return f"an edge from {edge.source} to {edge.target} leads to a node that is not there"
        if edge.kind in (Kind.STATE, Kind.SAVED) and edge.source.part != edge.target.part:
            return f"{edge.kind} of part {edge.source.part} leads to part {edge.target.part}: it stays on its stage"
        if (edge.kind is Kind.STATE) != (edge.source == edge.target):
            return f"an edge of kind {edge.kind} from {edge.source} to {edge.target}: only state leads to other slices"
    kept = {(edge.source, edge.target) for edge in flow.edges if edge.kind is Kind.SAVED}
    backward = dict(kept)
    values = {(e.source, e.target, e.name, e.turns) for e in flow.edges if e.kind is Kind.VALUE}
    gradients = {(e.target, e.source, e.name, e.turns) for e in flow.edges if e.kind is Kind.GRADIENT}
    back = {(backward.get(source), backward.get(target), name, turns) for source, target, name, turns in values}
    if len(backward) < len(kept) or back != gradients:
        return "gradients do not come back along the edges of the values"
    outputs = [edge.source for edge in flow.edges if edge.kind in (Kind.VALUE, Kind.DETACHED) and not edge.name]
    if len(set(outputs)) < len(outputs):
        return "a part's output goes to several parts: values besides the one for the next part have names"
    return _problem_with_sums(flow) or _cycle(flow)


def _problem_with_sums(flow: Flow) -> str:
    """Return why gradients cannot be added up as a flow says; empty if they can."""
    summed = Counter(stage for group in flow.sums for stage in group)
    for group in flow.sums:
        if not set(group) <= set(range(len(flow.parts))) or list(group) != sorted(set(group)):
            return f"stages {group} add up gradients: expected some of {len(flow.parts)} stages, in ascending order"
        if len({flow.stage_ranks[stage] for stage in group}) < 2:
            return f"stages {group} add up gradients, but are not on two ranks"
        has_twins = len({flow.parts[stage] for stage in group}) < len(group)
        if has_twins and (len(group) > 2 or any(summed[stage] > 1 for stage in group)):
            return "a stage adds up its gradients with its twin and with others: two by two, they would not have the same sums"
    return ""


def _cycle(flow: Flow) -> str:
    """Return which computations of a microbatch wait for each other, if some do: for each slice, in the order of its node."""
    before, num_units = defaultdict(set), min(flow.units, 2)  # a cycle through more of them goes through two of them, too
    for edge in flow.edges:
        for i in range(num_units if edge.source != edge.target else 0):
            before[edge.target, i].add((edge.source, i))
    for node in flow.nodes:
        order = range(num_units)[:: 1 if node.op == FORWARD else -1]
        for earlier, later in pairwise(order):
            before[node, later].add((node, earlier))
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return f"computations wait for each other: {' after '.join(f'{node.op} of part {node.part}' for node, _ in error.args[1])}"
    return ""
