"""The state of each microbatch of a stage: one record for each, and one mapping that owns the records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from bpipe.backward.autograd import Graph
from bpipe.backward.split import DeferredWeightGrad
from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire.message import MessageSpec
from bpipe.engine.stage_links import Links, Way, links_in
from bpipe.flow.flow import Flow
from bpipe.flow.units import Units
from bpipe.memory.ledger import Account
from bpipe.memory.saved.bundle import Bundle
from bpipe.memory.saved.shown import Shown
from bpipe.memory.saved.stash import Stash
from bpipe.memory.saved.storages import MessageBytes
from bpipe.plan.whereabouts import whereabouts
from bpipe.schedules import Action, Op
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

LAST = frozenset({Op.F, Op.B, Op.W, Op.WAIT_SEND_F, Op.WAIT_SEND_B, Op.WAIT_RETURN})  # possible last actions of a microbatch

StateKey = tuple[int, int]  # stage, microbatch
Versions = list[tuple[torch.Tensor, int]]  # tensors that must not change, each with its version at that time


class Message(NamedTuple):
    """Values that go from one stage to another, or their gradients: tensors, and their spec."""

    spec: MessageSpec
    tensors: list[torch.Tensor | None]


class PostedTransfer(NamedTuple):
    """A transfer that was posted, and the tensors that it reads in place."""

    transfer: Transfer
    tensors: Sequence[torch.Tensor] = ()


Transfers = dict[tuple[Op, int], PostedTransfer]  # in flight, by operation and part


class StoredPart(NamedTuple):
    """An evicted part of a microbatch: its messages in this rank's memory, and their transfers."""

    messages: list[torch.Tensor]
    transfers: Transfers


@dataclass(slots=True, eq=False)
class EdgeState:
    """What a rank has of the values between two stages in one microbatch, and of their gradients, seen from one of the stages.

    Args:
        values: from when they are made or received until they are sent or used.
        gradients: likewise.
        unsent_versions: the tensor versions of what waits to be sent or used, if other computations may run before that.
        sent_versions: the tensor versions of what is being sent.
        landing: what is being received.
        unused_gradients: for each gradient that is agreed to come back, whether the stage has no use for it.
        transfers: of values and gradients.
    """

    values: Message | None = None
    gradients: Message | None = None
    unsent_versions: Versions | None = None
    sent_versions: Versions = field(default_factory=list)
    landing: Message | None = None
    unused_gradients: list[bool] | None = None
    transfers: Transfers = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the rank has nothing of it."""
        return not (self.values or self.gradients or self.landing or self.transfers)


@dataclass(slots=True, eq=False)
class MemoryState:
    """What is known of the memory that a microbatch takes on a stage, and where its saved tensors are.

    Args:
        account: its entry in the ledger.
        num_nodes: how many nodes autograd had made when its forward began.
        followed: how many nodes its graph has and what they show, if it was followed.
        stash: its saved tensors, if it was followed.
        evicted: its parts that are in a store, or on the way there.
        refilled: the messages that are coming back, by part.
        transfers: of evictions.
        received_bytes: the bytes of its input, if it is followed.
        sent_bytes: the bytes of its output, if it is followed.
        returned_bytes: the bytes of its result that is not sent.
        loss_bytes: what a loss of several, this one and those before, took while it was computed; None if it is this one's alone.
        value_bytes: the bytes of other values that its forward has used or made, by name, and of their gradients.
        lent: the tensors that its forward has got or made and that other stages of this rank have, too.
        left_bytes: of what the first of its two forwards has left to others on its stage.
    """

    account: Account
    num_nodes: int
    followed: tuple[int, Shown | None] | None = None
    stash: Stash | None = None
    evicted: dict[int, Bundle] = field(default_factory=dict)
    refilled: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    transfers: Transfers = field(default_factory=dict)
    received_bytes: MessageBytes | None = None
    sent_bytes: MessageBytes | None = None
    returned_bytes: MessageBytes | None = None
    loss_bytes: int | None = None
    value_bytes: dict[str, tuple[MessageBytes, int]] = field(default_factory=dict)
    lent: list[torch.Tensor] = field(default_factory=list)
    left_bytes: int = 0


@dataclass(slots=True, eq=False)
class MicrobatchState:
    """Everything that a rank has of one microbatch of one of its stages.

    The code that takes a message, a graph or a stash out of here owns it from then on: saved memory can move only while it has
    no other owner, so each action empties the field that it uses.

    Args:
        stage: its index in the model.
        microbatch: its number.
        units: those of the plan, of which it is one.
        links: the values that its stage gets and makes.
        latest: the latest action that was run.
        edges: the values that it gets from other stages and makes for them, and their gradients.
        left: what it has left for others on its stage.
        output: what it has left for a loss of several, or its gradients, which wait for the backward.
        record: of a forward that will run a second time, what it runs from.
        graph: the autograd graph for the backward.
        half: the deferred weight gradient of the backward, if it waits.
        memory: the memory that it takes, from its forward on.
        stored: of a microbatch of another rank, its parts that this rank stores.
    """

    stage: int
    microbatch: int
    units: Units
    links: Links
    latest: Action | None = None
    edges: dict[Way, EdgeState] = field(default_factory=partial(defaultdict, EdgeState))
    left: Any = None
    output: Any = None
    record: Any = None
    graph: Graph | None = None
    half: DeferredWeightGrad | None = None
    memory: MemoryState | None = None
    stored: dict[int, StoredPart] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """What it is, for messages."""
        return self.units.name(self.microbatch)

    @property
    def name(self) -> str:
        """The same, with its stage."""
        return f"{self.unit} of stage {self.stage}"

    @property
    def is_over(self) -> bool:
        """Whether this rank holds nothing of it any more."""
        has_edges = any(not edge.is_empty for edge in self.edges.values())
        is_saved = self.graph or self.left or self.output or self.record or self.half or (self.memory and self.memory.evicted)
        return not (has_edges or is_saved or self.stored)

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.unit}"

    @property
    def whereabouts(self) -> str:
        """Its name, and where it is."""
        return f"{self.name}: {'no action has run' if self.latest is None else whereabouts(self.latest)}"


class MicrobatchStates(dict[StateKey, MicrobatchState]):
    """The states of the microbatches that a rank holds, by stage and microbatch, in the order in which they arrived.

    A state is created when it is first asked for.

    Args:
        flow: of the step.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._units, self._links = flow.units, links_in(flow)

    def __missing__(self, key: StateKey) -> MicrobatchState:
        state = self[key] = MicrobatchState(*key, self._units, self._links[key])
        return state

    def drop(self, state: MicrobatchState) -> None:
        """Forget a state if this rank holds nothing of it any more."""
        if state.is_over:
            self.pop((state.stage, state.microbatch), None)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors between stages that the pipeline itself holds now, each once, however many messages carry it."""
        found: list[torch.Tensor] = []
        for edge in (edge for state in self.values() for edge in state.edges.values()):
            for message in (edge.values, edge.gradients):
                if message is not None:
                    found += [tensor for tensor in message.tensors if tensor is not None]
            for _, sent in edge.transfers.values():
                found += sent
        return list({id(tensor): tensor for tensor in found}.values())


def versions_of(tensors: Iterable[torch.Tensor | None]) -> Versions:
    """Return the tensors that record in-place changes, with their versions."""
    return [(tensor, version_of(tensor)) for tensor in tensors if tensor is not None and not tensor.is_inference()]
