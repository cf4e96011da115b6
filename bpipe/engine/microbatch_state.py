"""The state of each microbatch of a stage: one record for each, and one mapping that owns the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bpipe.backward.autograd import Graph
from bpipe.backward.split import DeferredWeightGrad
from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire.message import MessageSpec
from bpipe.memory.ledger import Account
from bpipe.memory.saved.bundle import Bundle
from bpipe.memory.saved.shown import Shown
from bpipe.memory.saved.stash import Stash
from bpipe.memory.saved.storages import MessageBytes
from bpipe.plan.whereabouts import named, whereabouts
from bpipe.recomputation.rerun import Rerun
from bpipe.schedules import Action, Op
from bpipe.skips.held import Held, Made, Use
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

LAST = frozenset({Op.F, Op.B, Op.W, Op.WAIT_SEND_F, Op.WAIT_SEND_B, Op.WAIT_RETURN})  # possible last actions of a microbatch

HALF = (torch.float16, torch.bfloat16)
StateKey = tuple[int, int] | tuple[int, int, int]  # stage, microbatch; of a message of skips also the part
Versions = list[tuple[torch.Tensor, int]]  # tensors that must not change, each with its version at that time


class Message(NamedTuple):
    """A message across the boundary between two stages: tensors, and their spec."""

    spec: MessageSpec
    tensors: list[torch.Tensor | None]


class Arrived(NamedTuple):
    """What a forward gets from other stages: the message from the one before, if there is one, and by source those of skips."""

    message: Message | None
    skips: Sequence[tuple[int, Message]] = ()


class PostedTransfer(NamedTuple):
    """A transfer that was posted, and the tensors that it reads in place."""

    transfer: Transfer
    tensors: Sequence[torch.Tensor] = ()


@dataclass
class SliceState:
    """What a slice has left on a stage for the later slices of its sequence.

    Args:
        tree: the state without its tensors.
        tensors: its tensors, without their graph.
        is_needed: for each tensor, whether it needs a gradient.
        versions: of the tensors, which no later slice may change; 0 for inference tensors, which have none.
        copies: of inference tensors, to compare them with.
        gradients: the sums of what later slices have given so far, one for each tensor that needs a gradient; None if nothing.
    """

    tree: str
    tensors: list[torch.Tensor]
    is_needed: list[bool]
    versions: list[int]
    copies: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    @classmethod
    def of(cls, tree: str, tensors: Sequence[torch.Tensor], *, keeps_copies: bool) -> SliceState:
        """Keep the state of a slice, as `flatten_message` has split it.

        Args:
            keeps_copies: whether to copy inference tensors: of one sequence in a step, as what is done in place is done to all.
        """
        is_needed = [tensor.requires_grad for tensor in tensors]
        kept = [tensor.detach() for tensor in tensors]
        copies = [tensor.clone() for tensor in kept if tensor.is_inference()] if keeps_copies else []
        return cls(tree, kept, is_needed, _versions(kept), copies, [None] * sum(is_needed))

    @property
    def is_changed(self) -> bool:
        """Whether a tensor was changed in place."""
        inference = [tensor for tensor in self.tensors if tensor.is_inference()]
        return _versions(self.tensors) != self.versions or not all(map(_is_same, inference, self.copies))

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what a later slice gives to those tensors that need a gradient, in single precision at least.

        In half precision, a sum of many slices' gradients would lose more than the whole sequence's, whose kernels add in single
        precision. Later slices come in the same order in each step, so that the sums are the same to the bit.
        """
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                wide = gradient.float() if gradient.dtype in HALF else gradient
                known = self.gradients[place]
                self.gradients[place] = wide if known is None else known + wide

    def summed(self) -> list[torch.Tensor | None]:
        """Return the gradients as the backward takes them."""
        needed = [tensor for tensor, is_needed in zip(self.tensors, self.is_needed) if is_needed]
        return [one if one is None else one.to(tensor.dtype) for one, tensor in zip(self.gradients, needed, strict=True)]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal; NaN is equal to itself."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


@dataclass(slots=True, eq=False)
class MicrobatchState:
    """Everything that a rank has of one microbatch of one of its stages, or of a message of skips to or from it.

    The code that takes a message, a graph or a stash out of here owns it from then on: saved memory can move only while it has
    no other owner, so each action empties the field that it uses.

    Args:
        stage: its index in the model.
        microbatch: its number.
        part: 0, or of a message of skips, one more than the stage at its other end.
        latest: the latest action that was run.
        input: the message from the previous stage, until the forward.
        output: the forward's message for the next stage, until it is sent.
        output_gradients: the message that the next stage has sent back, until the backward.
        input_gradients: the backward's message for the previous stage, until it is sent.
        unsent_versions: the tensor versions of a message that waits to be sent, if other computations may run before that.
        sent_versions: the tensor versions of a message that is being sent, by the operation that sends it.
        landing: the message that is being received, by the operation that receives it.
        unused_gradients: for each gradient that is agreed to come back, whether the stage has no use for it.
        transfers: the transfers in flight, by operation and part.
        graph: the autograd graph for the backward.
        left: what it has left for later slices of its sequence, if it is a slice.
        left_bytes: the bytes of that, as far as they are counted after the first of two forwards.
        rerun: the second forward that waits, with its input.
        half: the deferred weight gradient of the backward, if it waits.
        account: its entry in the ledger.
        num_nodes: how many nodes autograd had made when its forward began.
        followed: how many nodes its graph has and what they show, if it was followed.
        stash: its saved tensors, if it was followed.
        evicted: its parts that are on another rank or the host, or on the way there.
        refilled: the messages that are coming back, by part.
        received_bytes: the bytes of its input, if it is followed.
        returned_bytes: the bytes of its result that is not sent.
        kept: its parts that this rank stores for their evictor.
        held: of a message of skips, what later stages of this rank use of it.
        uses: the messages of skips that its forward has used.
        made: the messages that its forward has made, if it hands on skips.
        value_bytes: the bytes of the skips that its forward has used or made, by name, and of their gradients, until they are
            counted.
        lent: the tensors that its forward has got or made and that later stages of this rank get, until they are counted.
        slices: how many slices each sequence has, of which it may be one.
        name: its name in messages.
        place: the same, beginning with the stage.
    """

    stage: int
    microbatch: int
    part: int = 0
    latest: Action | None = None
    input: Message | None = None
    output: Message | None = None
    output_gradients: Message | None = None
    input_gradients: Message | None = None
    unsent_versions: Versions | None = None
    sent_versions: dict[Op, Versions] = field(default_factory=dict)
    landing: dict[Op, Message] = field(default_factory=dict)
    unused_gradients: list[bool] | None = None
    transfers: dict[tuple[Op, int], PostedTransfer] = field(default_factory=dict)
    graph: Graph | None = None
    left: SliceState | None = None
    left_bytes: int = 0
    rerun: tuple[Rerun, Arrived] | None = None
    half: DeferredWeightGrad | None = None
    account: Account | None = None
    num_nodes: int = 0
    followed: tuple[int, Shown | None] | None = None
    stash: Stash | None = None
    evicted: dict[int, Bundle] = field(default_factory=dict)
    refilled: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    received_bytes: MessageBytes | None = None
    returned_bytes: MessageBytes | None = None
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    held: Held | None = None
    uses: Sequence[Use] = ()
    made: Sequence[Made] = ()
    value_bytes: dict[str, tuple[MessageBytes, int]] = field(default_factory=dict)
    lent: list[torch.Tensor] = field(default_factory=list)
    slices: int = 1
    name: str = field(init=False)
    place: str = field(init=False)

    def __post_init__(self) -> None:
        unit = named(self.microbatch, self.slices) if self.slices > 1 else f"microbatch {self.microbatch}"
        if self.part:
            unit = f"{unit}, its skips between this stage and stage {self.part - 1}"
        self.name, self.place = f"{unit} of stage {self.stage}", f"stage {self.stage}, {unit}"

    @property
    def key(self) -> StateKey:
        """Its key among a rank's states."""
        return (self.stage, self.microbatch, self.part) if self.part else (self.stage, self.microbatch)

    @property
    def is_over(self) -> bool:
        """Whether this rank holds nothing of it any more."""
        messages = self.input or self.output or self.output_gradients or self.input_gradients or self.landing or self.transfers
        of_skips = self.held or (self.part and self.unused_gradients)
        others = self.graph or self.left or self.rerun or self.half or self.stash or self.evicted or self.kept
        return not (messages or of_skips or others)

    def __str__(self) -> str:
        return f"{self.name}: {'no action has run' if self.latest is None else whereabouts(self.latest)}"


class MicrobatchStates(dict[StateKey, MicrobatchState]):
    """The states of the microbatches that a rank holds, by stage and microbatch, in the order in which they arrived.

    Messages of skips have states of their own, by stage, microbatch and part. A state is created when it is first asked for.

    Args:
        slices: into how many slices each sequence is cut, which its messages name.
    """

    def __init__(self, slices: int = 1) -> None:
        super().__init__()
        self._slices = slices

    def named(self, unit: int) -> str:
        """Return the name of a unit in messages."""
        return named(unit, self._slices)

    def drop(self, state: MicrobatchState) -> None:
        """Forget a state if this rank holds nothing of it any more."""
        if state.is_over:
            self.pop(state.key, None)

    def __missing__(self, key: StateKey) -> MicrobatchState:
        state = self[key] = MicrobatchState(key[0], key[1], key[2] if len(key) > 2 else 0, slices=self._slices)
        return state

    def before(self, state: MicrobatchState, slices: int) -> list[MicrobatchState]:
        """Return the states of the slices before one, where each sequence is cut into so many; the first one first."""
        first = state.microbatch - state.microbatch % slices
        return [self[state.stage, unit] for unit in range(first, state.microbatch)]

    def release(self, states: Iterable[MicrobatchState]) -> None:
        """Forget what slices have left, once no later one will ask for it, and those slices that are over now."""
        for state in states:
            state.left = None
            self.drop(state)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors between stages that the pipeline itself holds now, each once, however many messages carry it."""
        found: list[torch.Tensor] = []
        for state in self.values():
            for message in (state.output, state.input, state.output_gradients, state.input_gradients):
                if message is not None:
                    found += [tensor for tensor in message.tensors if tensor is not None]
            for _, sent in state.transfers.values():
                found += sent
            if state.held is not None:
                found += state.held.tensors
        return list({id(tensor): tensor for tensor in found}.values())
