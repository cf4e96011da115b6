"""Run a rank's lists: a short method for each operation. What runs when, and when memory is given back, the plan says."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from bpipe import microbatch as mb
from bpipe.autograd import Box, edges_of, enter, run_backward
from bpipe.comm import header
from bpipe.comm.header import Subject
from bpipe.comm.message import Layout, dense, meta_of, put_together, take_apart
from bpipe.comm.transport import Transfer, Transport
from bpipe.errors import CommError, StageError
from bpipe.memory.bundle import Bundle
from bpipe.memory.guests import Rooms
from bpipe.memory.ledger import Footprint, Ledger, footprint_of
from bpipe.memory.stash import Contents, Stash
from bpipe.memory.storages import Held, bytes_of, keys_of
from bpipe.schedules import Action, Op, Plan, Purpose
from bpipe.schedules.action import START_OF, WAIT_OF
from bpipe.stage import PipelineStage

__all__: list[str] = []

Key = tuple[int, int]  # stage, microbatch
Layouts = MutableMapping[tuple[Purpose, int, int], Layout]  # by purpose, stage before the boundary, microbatch


@dataclass
class Inputs:
    """What the user gave for one step, by microbatch."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any] | None

    def descriptions(self) -> list[str]:
        """What each microbatch looks like."""
        targets = self.targets or [None] * len(self.args)
        return [mb.describe(parts) for parts in zip(self.args, self.kwargs, targets)]


@dataclass
class Memory:
    """What a schedule remembers from step to step: measured footprints and the rooms for guests."""

    profile: dict[tuple[int, str], tuple[Footprint, Mapping[int, Held]]] = field(default_factory=dict)
    rooms: dict[int, Rooms] = field(default_factory=dict)

    @property
    def guest_bytes(self) -> int:
        return sum(rooms.num_bytes for rooms in self.rooms.values())


@dataclass
class Graph:
    """What is kept of a microbatch between its forward and its backward, besides what autograd saved."""

    edges: list[GradientEdge]
    box: Box


Loss = Callable[..., torch.Tensor]


class Run:
    """One step of one rank.

    Args:
        plan: what to run; `rank` is this rank's place in it.
        stages: the stages on this rank by index.
        layouts: the agreed messages, or an empty mapping to learn them into when `is_learning`.
        memory: what the schedule remembers.
        loss_fn: called as `loss_fn(output, target, **loss_kwargs)` on the last stage, or None.
        loss_scale: the gradient with which the backward of each microbatch's loss starts.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        step: int,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        inputs: Inputs,
        descriptions: Sequence[str],
        layouts: Layouts,
        is_learning: bool,
        memory: Memory,
        loss_fn: Loss | None,
        loss_kwargs: Mapping[str, Any],
        loss_scale: float,
        keeps_outputs: bool,
        observer: Callable[[int, Action], None] | None = None,
    ) -> None:
        self.plan, self.rank, self.step, self.device = plan, rank, step, transport.device
        self.ledger = Ledger()
        self.predicted: dict[Key, Footprint] = {}
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.waited_s: dict[Op, float] = defaultdict(float)
        self._stages, self._transport, self._memory = stages, transport, memory
        self._inputs, self._descriptions = inputs, descriptions
        self._layouts, self._is_learning = layouts, is_learning
        self._loss_fn, self._loss_kwargs, self._loss_scale = loss_fn, loss_kwargs, loss_scale
        self._keeps_outputs = keeps_outputs and self.holds_last_stage
        self._observer = observer
        self._evicted = set(plan.evicted(rank))
        self._foreign: dict[int, str] | None = None
        self._graphs: dict[Key, Graph] = {}
        self._stashes: dict[Key, Stash] = {}
        self._bundles: dict[Key, Bundle] = {}
        self._arrived: dict[tuple[Op, int, int], tuple[Layout, list[torch.Tensor | None]]] = {}
        self._outgoing: dict[tuple[Op, int, int], tuple[Layout, list[torch.Tensor | None]]] = {}
        self._landing: dict[tuple[Op, int, int], list[Any]] = {}
        self._transfers: dict[tuple[Op, int, int], Transfer] = {}
        self._leaving: dict[tuple[Op, int, int], list[torch.Tensor]] = {}

    @property
    def holds_last_stage(self) -> bool:
        return any(stage.is_last for stage in self._stages.values())

    def execute(self, action: Action) -> None:
        """Do one action of the compute lane or the served lane."""
        try:
            _METHODS[action.op](self, action)
        except Exception as error:
            error.add_note(
                f"bpipe: rank {self.rank}, stage {action.stage}, microbatch {action.microbatch}, action {action}, step {self.step}"
            )
            raise
        if self._observer is not None:
            self._observer(self.rank, action)

    # Forward and backward

    def _forward(self, action: Action) -> None:
        stage, index, key = self._stages[action.stage], action.microbatch, (action.stage, action.microbatch)
        args, box, shapes = self._arguments(action)
        stash = self._follow(key, shapes)
        with torch.set_grad_enabled(self.plan.has_backward), stash.capture() if stash is not None else nullcontext():
            output = stage.submod(*args, **self._inputs.kwargs[index])
            del args
            loss = self._loss(output, action) if stage.is_last and self._loss_fn is not None else None
        if stage.is_last:
            self._finish_microbatch(output, loss, box, key)
        else:
            self._hand_on(output, box, action)
        del output, loss
        self._enter_in_ledger(key, shapes, stash)

    def _arguments(self, action: Action) -> tuple[tuple[Any, ...], Box, str]:
        """The positional arguments of a forward, the box for their gradients, and what they look like."""
        shapes = self._descriptions[action.microbatch]
        if action.stage == 0:
            return self._inputs.args[action.microbatch], Box(0), shapes
        layout, tensors = self._arrived.pop(action[:3])
        metas = [meta for meta in layout.tensors if meta is not None]
        entered, box = enter([t for t in tensors if t is not None], [meta.requires_grad and self.plan.has_backward for meta in metas])
        value = put_together(layout.nest, entered)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,), box, f"{shapes} {layout}"

    def _loss(self, output: Any, action: Action) -> torch.Tensor:
        assert self._loss_fn is not None
        target = None if self._inputs.targets is None else self._inputs.targets[action.microbatch]
        if target is None and not self.plan.has_backward:
            return None  # type: ignore[return-value]
        loss = self._loss_fn(output, target, **self._loss_kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__qualname__
            raise StageError(f"loss_fn returned {seen} for microbatch {action.microbatch}: return one number, such as loss.mean()")
        if self.plan.has_backward and not loss.requires_grad:
            raise StageError(
                f"the loss of microbatch {action.microbatch} needs no gradient, so nothing would be trained: "
                "return a loss that depends on the output, and keep something trainable"
            )
        return loss

    def _finish_microbatch(self, output: Any, loss: torch.Tensor | None, box: Box, key: Key) -> None:
        if loss is not None:
            self.losses.append(loss.detach())
            if self.plan.has_backward:
                self._graphs[key] = Graph(edges_of([loss]), box)
        if self._keeps_outputs:
            self.outputs.append(_detached(output))

    def _hand_on(self, output: Any, box: Box, action: Action) -> None:
        """Take a stage's output apart for the next one, and keep the edges for the backward."""
        nest, tensors = take_apart(output, f"stage {action.stage}, microbatch {action.microbatch}")
        if self.plan.has_backward:
            self._graphs[action.stage, action.microbatch] = Graph(edges_of(tensors), box)
        sent = [dense(tensor) for tensor in tensors]
        layout = Layout(nest, tuple(meta_of(t, requires_grad=tensor.requires_grad) for t, tensor in zip(sent, tensors)))
        self._pass((Op.SEND_F, action.stage, action.microbatch), (Op.F, action.stage + 1, action.microbatch), layout, sent)

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        graph = self._graphs.pop(key)
        if self._stages[action.stage].is_last:
            gradients: list[torch.Tensor | None] = [torch.full_like(self.losses[action.microbatch], self._loss_scale)]
        else:
            gradients = self._arrived.pop((Op.B, *key))[1]
        run_backward(graph.edges, gradients)
        del gradients
        self._stashes.pop(key, None)
        self.ledger.backward(key)
        if action.stage:
            self._hand_back(graph.box, action)

    def _hand_back(self, box: Box, action: Action) -> None:
        sent = [None if gradient is None else dense(gradient) for gradient in box.gradients]
        layout = Layout("", tuple(None if gradient is None else meta_of(gradient, requires_grad=False) for gradient in sent))
        self._pass((Op.SEND_B, action.stage, action.microbatch), (Op.B, action.stage - 1, action.microbatch), layout, sent)

    def _pass(
        self, send: tuple[Op, int, int], use: tuple[Op, int, int], layout: Layout, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        """Leave a stage's result for its send, or at once for the neighbouring stage on this rank."""
        if use[1] in self._stages:
            self._arrived[use] = (layout, list(tensors))
        else:
            self._outgoing[send] = (layout, list(tensors))

    # Memory

    def _follow(self, key: Key, shapes: str) -> Stash | None:
        """A stash for a microbatch that will be evicted, or is the first of its stage with these shapes; else nothing."""
        if not self.plan.has_backward or (key not in self._evicted and (key[0], shapes) in self._memory.profile):
            return None
        if self._foreign is None:
            self._foreign = self._find_foreign()
        stash = Stash(f"microbatch {key[1]} of stage {key[0]}", self._foreign)
        self._stashes[key] = stash
        return stash

    def _find_foreign(self) -> dict[int, str]:
        """Storages that are no activations, and what they are."""
        batch = mb.tensors_in([self._inputs.args, self._inputs.kwargs, self._inputs.targets])
        foreign = dict.fromkeys(keys_of(batch), "the step's batch")
        for stage in self._stages.values():
            foreign |= dict.fromkeys(keys_of(stage.submod.buffers()), "a buffer")
            foreign |= dict.fromkeys(keys_of(stage.submod.parameters()), "a parameter")
        return foreign

    def _look(self, stash: Stash) -> Contents:
        leaving = [tensor for tensors in self._leaving.values() for tensor in tensors]
        waiting = [tensor for _, tensors in self._outgoing.values() for tensor in tensors if tensor is not None]
        return stash.contents(ours=mb.tensors_in([self.outputs, self.losses]), leaving=[*leaving, *waiting])

    def _enter_in_ledger(self, key: Key, shapes: str, stash: Stash | None) -> None:
        if not self.plan.has_backward:
            return
        kind = (key[0], shapes)
        if stash is not None:
            contents = self._look(stash)
            self.ledger.foreign = contents.foreign
            self._memory.profile.setdefault(kind, (footprint_of(contents), contents.shared))
            self.ledger.forward(key, footprint_of(contents), contents.shared)
        else:
            self.ledger.forward(key, *self._memory.profile[kind])
        self.predicted[key] = self._memory.profile[kind][0]
        if key not in self._evicted:
            self._stashes.pop(key, None)

    # Transfers between stages

    def _send(self, action: Action) -> None:
        layout, tensors = self._outgoing.pop(action[:3])
        boundary = (action.channel(self.rank).purpose, action.stage - (action.op is Op.SEND_B), action.microbatch)
        data = None
        if self._is_learning:
            self._layouts[boundary] = layout
            data = header.pack_layout(Subject(self.step, action.stage, action.microbatch), layout)
        else:
            self._check_agreed(layout, self._layouts[boundary], action)
        views = [bytes_of(tensor) for tensor in tensors if tensor is not None]
        self._leaving[action[:3]] = views
        self._transfers[action[:3]] = self._transport.send(action.channel(self.rank), views, data)

    def _check_agreed(self, layout: Layout, agreed: Layout, action: Action) -> None:
        if layout != agreed:
            what = "output" if action.op is Op.SEND_F else "gradient of the input"
            raise StageError(
                f"stage {action.stage}, microbatch {action.microbatch}: the {what} changed although this step's inputs look like an "
                f"earlier step's: agreed {agreed}, got {layout}. Shapes must follow from the shapes of the inputs; "
                "send what varies as a tensor of fixed shape, with a mask or a length."
            )

    def _wait_send(self, action: Action) -> None:
        self._wait(action)
        del self._leaving[START_OF[action.op], action.stage, action.microbatch]

    def _receive(self, action: Action) -> None:
        if not self._is_learning:
            boundary = (action.channel(self.rank).purpose, action.stage - (action.op is Op.RECV_F), action.microbatch)
            self._post_receive(action, self._layouts[boundary])

    def _post_receive(self, action: Action, layout: Layout) -> None:
        tensors = [None if meta is None else meta.new(self.device) for meta in layout.tensors]
        self._landing[action[:3]] = [layout, tensors]
        views = [bytes_of(tensor) for tensor in tensors if tensor is not None]
        self._transfers[action[:3]] = self._transport.receive(action.channel(self.rank), views)

    def _wait_receive(self, action: Action) -> None:
        start = action._replace(op=START_OF[action.op])
        if self._is_learning:
            self._post_receive(start, self._learn(start))
        self._wait(action)
        layout, tensors = self._landing.pop(start[:3])
        self._arrived[Op.F if start.op is Op.RECV_F else Op.B, action.stage, action.microbatch] = (layout, tensors)

    def _learn(self, start: Action) -> Layout:
        """Read the header that says what is about to come."""
        sender = start.stage + (-1 if start.op is Op.RECV_F else 1)
        channel = start.channel(self.rank)
        data = self._timed(WAIT_OF[start.op], lambda: self._transport.receive_header(channel))
        layout = header.unpack_layout(data, Subject(self.step, sender, start.microbatch))
        self._layouts[channel.purpose, start.stage - (start.op is Op.RECV_F), start.microbatch] = layout
        return layout

    # Evictions and loads

    def _evict(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        stash = self._stashes[key]
        bundle = self._bundles[key] = Bundle(self._look(stash).movable, stash.name)
        data = header.pack_eviction(Subject(self.step, *key), bundle.message_sizes)
        stash.mark(away=True)
        self._transfers[action[:3]] = self._transport.send(action.channel(self.rank), bundle.messages(), data)

    def _wait_evict(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        self._wait(action)
        bundle = self._bundles[key]
        bundle.empty()
        self.ledger.evicted(key, bundle.num_bytes)

    def _load(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        self.ledger.loading(key)
        messages = self._landing[action[:3]] = self._bundles[key].refill()
        self._transfers[action[:3]] = self._transport.receive(action.channel(self.rank), messages)

    def _wait_load(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        self._wait(action)
        self._bundles.pop(key).scatter(self._landing.pop((Op.LOAD, *key)))
        self._stashes[key].mark(away=False)

    # The acceptor's lane

    def _accept(self, action: Action) -> None:
        assert action.peer is not None
        channel, key = action.channel(self.rank), (action.stage, action.microbatch)
        sizes = header.unpack_eviction(self._transport.receive_header(channel), Subject(self.step, *key))
        parts = self._memory.rooms[action.peer].take(key, sizes)
        self._landing[Op.RETURN, *key] = parts
        self._transfers[action[:3]] = self._transport.receive(channel, parts)

    def _return(self, action: Action) -> None:
        parts = self._landing.pop(action[:3])
        self._transfers[action[:3]] = self._transport.send(action.channel(self.rank), parts)

    def _wait_return(self, action: Action) -> None:
        assert action.peer is not None
        self._wait(action)
        self._memory.rooms[action.peer].leave((action.stage, action.microbatch))

    # Waiting

    def _wait(self, action: Action) -> None:
        transfer = self._transfers.pop((START_OF[action.op], action.stage, action.microbatch))
        self._timed(action.op, transfer.wait)

    def _timed(self, op: Op, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.waited_s[op] += time.perf_counter() - start
        return result


# A table beside the class, not bound methods in each run: those would be a cycle, and keep a step's tensors until collected.
_METHODS: dict[Op, Callable[[Run, Action], None]] = {
    Op.F: Run._forward,
    Op.B: Run._backward,
    Op.SEND_F: Run._send,
    Op.SEND_B: Run._send,
    Op.RECV_F: Run._receive,
    Op.RECV_B: Run._receive,
    Op.EVICT: Run._evict,
    Op.LOAD: Run._load,
    Op.ACCEPT: Run._accept,
    Op.RETURN: Run._return,
    Op.WAIT_SEND_F: Run._wait_send,
    Op.WAIT_SEND_B: Run._wait_send,
    Op.WAIT_RECV_F: Run._wait_receive,
    Op.WAIT_RECV_B: Run._wait_receive,
    Op.WAIT_EVICT: Run._wait_evict,
    Op.WAIT_LOAD: Run._wait_load,
    Op.WAIT_ACCEPT: Run._wait,
    Op.WAIT_RETURN: Run._wait_return,
}


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)


class Server(threading.Thread):
    """Serves one evictor during a step, whatever this rank computes meanwhile. Runs none of the user's code."""

    def __init__(self, run: Run, chain: Sequence[Action], stream: torch.cuda.Stream | None) -> None:
        super().__init__(name=f"bpipe-serve-{chain[0].peer}", daemon=True)
        self._run, self._chain, self._stream = run, chain, stream
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                for action in self._chain:
                    self._run.execute(action)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait until the evictor has everything back.

        Raises:
            CommError: serving failed; the original error is its cause.
        """
        self.join()
        if self._error is not None:
            raise CommError(f"serving rank {self._chain[0].peer} failed: {self._error}") from self._error
