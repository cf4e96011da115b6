"""One rank's dry run: the actions of a few microbatches, by the engine that runs steps, on fake tensors.

Ranks give each other the headers of their messages, which say what a stage's output looks like, and send no tensor. They do so in
rounds: in each one, every rank goes on as far as the headers that it has allow, and then all give away what they have written.

    round    rank 0       rank 1       rank 2
    1        0F0
    2                     1F0
    3                                  2F0 2B0
    4                     1B0
    5        0B0
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.dtensor import is_dtensor
from bpipe.dry_run.fake_transport import FakeTransport, Over
from bpipe.engine.remembered import Memory
from bpipe.engine.run import Run
from bpipe.engine.setup import StepInputs, modules_of
from bpipe.errors import UnsupportedTorchError, format_error
from bpipe.memory.makeup import Makeups
from bpipe.memory.static import bytes_under
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import tensors_of
from bpipe.model.stage import ModuleSnapshot, PipelineStage
from bpipe.parallel.ddp import replicas_in
from bpipe.parallel.fsdp import units_in
from bpipe.parallel.shared_weights import Shared
from bpipe.plan.action import COMPUTE, SHARDING, START_OF, WAIT_OF, channel_of
from bpipe.prediction.fake_modules import FakeModules, check_gone, is_a_librarys
from bpipe.prediction.known_values import MOST_KNOWN, forget
from bpipe.schedules import Action, Channel, Op, Plan, Purpose
from bpipe.session.context import RankContext
from bpipe.session.prepare import PreparedCall
from bpipe.session.report import RankSizes
from bpipe.torch_private.engine_and_graph import hooks_around
from bpipe.torch_private.fakes import forget_results
from bpipe.torch_private.modes import dispatch_modes
from bpipe.torch_private.modules import FORWARD, hooks_of, is_compiled, parametrize_is_cached

__all__: list[str] = []

RECEIVED = frozenset({Op.WAIT_RECV_F, Op.WAIT_RECV_B})


class Header(NamedTuple):
    """The header of a message that a rank would send."""

    purpose: str
    src: int
    dst: int
    data: bytes


class Round(NamedTuple):
    """What a rank tells the others in one round.

    Args:
        alike: in the first round, for each unit the first one whose inputs on this rank look like its own.
        headers: of the messages that it would have sent since the round before.
        is_over: whether it has run all of its actions.
        failure: why it cannot go on; empty if it can.
    """

    alike: tuple[int, ...] = ()
    headers: tuple[Header, ...] = ()
    is_over: bool = False
    failure: str = ""

    def pack(self) -> bytes:
        return encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Round:
        return decode(cls, data, "round of a dry run", math.inf)


def last_round(advance: Callable[[Sequence[bytes]], list[bytes]]) -> list[bytes]:
    """Let all ranks advance until they have ended, with what they have told in the round before; return what they tell last."""
    packed = advance(())
    while not has_ended([Round.unpack(data) for data in packed]):
        packed = advance(packed)
    return packed


def has_ended(rounds: Sequence[Round]) -> bool:
    """Return whether all ranks are over, or at least one cannot go on, or nobody has said anything new."""
    goes_on = any(one.alike or one.headers for one in rounds) and not all(one.is_over for one in rounds)
    return not goes_on or any(one.failure for one in rounds)


def why_not(context: RankContext) -> str:
    """Return why the stages of a rank cannot run on fake tensors; empty if no reason is known.

    Raises:
        UnsupportedTorchError: this torch does not show it.
    """
    modules = list({id(part): part for module in context.modules() for part in module.modules()}.values())
    reasons = {
        "the process group is a fake one": isinstance(context.transport, FakeTransport),
        "saved-tensor hooks are active around the step": hooks_around() is not None,
        "stages are under FSDP2 or DDP": bool(units_in(modules) or replicas_in(modules)),
        "parameters are DTensors": any(is_dtensor(one) for module in modules for one in module.parameters(recurse=False)),
        "modules are compiled": any(map(is_compiled, modules)),
        "modules are of torch.jit": any(isinstance(one, torch.jit.ScriptModule) for one in modules),
        "modules have hooks of their forward": any(map(_has_own_hooks, modules)),
        "modes see the step's operations": bool(dispatch_modes()),
        "parametrizations are cached": parametrize_is_cached(),
        "a stage has a forward context": any(one.forward_contexts for one in context.stages.values()),
        "a stage has a dw_builder": any(one.dw_builder is not None for one in context.stages.values()),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _has_own_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks that no library has put there run before or after a module's forward: they may change sizes."""
    return not all(is_a_librarys(hook) for hooks in hooks_of(module)[:FORWARD] for hook in hooks.values())


class Mail:
    """The headers that have come to a rank, and those that it has written since the latest round."""

    def __init__(self) -> None:
        self.written: list[Header] = []
        self._come: dict[Channel, deque[bytes]] = defaultdict(deque)
        self.num_come: Counter[Channel] = Counter()

    def hear(self, channel: Channel, data: bytes) -> None:
        """Take the header of a message that is sent."""
        self.written.append(Header(channel.purpose, channel.src, channel.dst, data))

    def announce(self, channel: Channel) -> bytes:
        """Return the next header of a channel."""
        return self._come[channel].popleft()

    def bring(self, headers: Sequence[Header], rank: int) -> None:
        """Take what another rank has written to this one."""
        for one in headers:
            if one.dst == rank:
                channel = Channel(Purpose(one.purpose), one.src, one.dst)
                self._come[channel].append(one.data)
                self.num_come[channel] += 1


class HeadersAlone(FakeTransport):
    """A transport of headers: of the tensors that arrive, nothing is known."""

    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], *, may_have_note: bool = False) -> Transfer:
        for tensor in tensors:
            forget(tensor)
        return Over()


class DryRun:
    """One rank's dry run of a step that it is ready for.

    Args:
        context: of the rank.
        call: what the step is given.
        plan: a plan of the step's computations and messages, of which a few microbatches are run.
        shared: the weights that other ranks have, too.
        most_parts: the most parts in which a microbatch may move.

    Attributes:
        is_over: whether it has ended on all ranks.
        failure: why it could not go on, on any rank; empty if it could.
        sizes: what was found, on this rank.
    """

    def __init__(self, context: RankContext, call: PreparedCall, plan: Plan, shared: Shared, most_parts: int) -> None:
        self.is_over, self.failure, self.sizes = False, "", RankSizes()
        self._context, self._plan, self._shared = context, plan, shared
        self._given = call.given
        self._memory = Memory(grows=True, most_parts=dict.fromkeys(context.stages, most_parts))
        self._mail, self._lane, self._count = Mail(), deque[Action](), Counter[int]()
        self._run: Run | None = None
        self._aside: AbstractContextManager[object] = nullcontext()  # gradients of earlier steps
        try:
            self._own_failure = why_not(context)
        except UnsupportedTorchError as error:
            self._own_failure = format_error(error)

    def advance(self, packed: Sequence[bytes]) -> bytes:
        """Go on as far as the headers of other ranks allow; return what they need to know.

        Args:
            packed: what all ranks have returned in the round before; empty in the first one.
        """
        if packed:
            self.hear(packed)
        if not self._count:
            return Round(self._alike(), failure=self._own_failure).pack()
        if not (self._own_failure or self.is_over):
            try:
                with self._modules:
                    self._go_on()
            except Exception as error:
                self._own_failure = format_error(error)
        written, self._mail.written = tuple(self._mail.written), []
        return Round(headers=written, is_over=not self._lane, failure=self._own_failure).pack()

    def hear(self, packed: Sequence[bytes]) -> None:
        """Take what all ranks have returned in a round."""
        rounds = [Round.unpack(data) for data in packed]
        self.failure = next((f"rank {rank}: {one.failure}" for rank, one in enumerate(rounds) if one.failure), "")
        if self.failure or self._count:
            for one in rounds:
                self._mail.bring(one.headers, self._context.plan_rank)
        else:
            self._choose([one.alike for one in rounds])
        if has_ended(rounds) and not self.is_over:
            self.failure = self.failure or ("" if all(one.is_over for one in rounds) else "no rank can go on")
            self._end()

    def _choose(self, alike: Sequence[tuple[int, ...]]) -> None:
        """Choose few microbatches that show each computation of each stage, on inputs of each look, and prepare to run them."""
        units, groups = self._plan.units, defaultdict[object, list[int]](list)  # of microbatches that pass the same stages, alike
        computed: list[set[tuple[Op, int, int]]] = [set() for _ in range(self._plan.num_microbatches)]
        for action in (one for lane in self._plan.actions for one in lane if one.op in COMPUTE):
            microbatch, place = self._plan.slice_of(action.microbatch)
            computed[microbatch].add((action.op, action.stage, place))
        for microbatch, some in enumerate(computed):
            stages = frozenset(stage for _, stage, _ in some)
            groups[stages, *(one[unit] for one in alike for unit in units.of(microbatch))].append(microbatch)
        for group in groups.values():
            left, count = set[object]().union(*(computed[one] for one in group)), len(group)
            while left:
                shows_most = max(group, key=lambda one: len(computed[one] & left))
                left -= computed[shows_most]
                self._count[shows_most], count = count, 0  # the first one counts for all
        chosen = {unit for microbatch in self._count for unit in units.of(microbatch)}
        lanes = tuple(tuple(one for one in lane if one.op in SHARDING or one.microbatch in chosen) for lane in self._plan.actions)
        self._plan = replace(self._plan, actions=lanes, served=((),) * len(lanes))
        self._lane.extend(one for one in lanes[self._context.plan_rank] if one.op is not Op.WAIT_REDUCE_GRAD)

    def _alike(self) -> tuple[int, ...]:
        """Return for each unit the first one whose inputs look alike, and have masks and indices that are zero nowhere, or are."""
        given, first = self._given, dict[object, int]()
        targets = given.targets or [None] * len(given.args)
        whole = [tensors_of([*of_unit]) for of_unit in zip(given.args, given.kwargs, targets)]
        decided = [tuple(_is_full(one) for one in tensors) for tensors in whole]
        return tuple(first.setdefault(kind, unit) for unit, kind in enumerate(zip(given.descriptions, decided)))

    @cached_property
    def _modules(self) -> FakeModules:
        context = self._context
        return FakeModules([*context.modules(), *modules_of(context.loss_fn)], context.loss_fn, context.transport.device)

    def _go_on(self) -> None:
        if self._run is None:
            self._run = self._prepared()
            self._aside = self._run.exchanges.in_charge(None)
            self._aside.__enter__()  # for all rounds
        with self._run.hooks.watched(), self._run.setup.loss_scale.in_force():
            while self._lane and self._can_run(self._lane[0]):
                self._run.execute(self._lane.popleft())

    def _can_run(self, action: Action) -> bool:
        """Return whether the headers have come that an action reads."""
        if action.op not in RECEIVED:
            return True
        channel = channel_of(START_OF[action.op], self._context.plan_rank, action.peer)
        return self._mail.num_come[channel] >= self._place[action]

    @cached_property
    def _place(self) -> dict[Action, int]:
        """How many headers a channel has once that of a receive has come."""
        rank, found, counts = self._context.plan_rank, dict[Action, int](), Counter[Channel]()
        for one in self._plan.actions[rank]:
            if one.op in (Op.RECV_F, Op.RECV_B):
                counts[channel := channel_of(one.op, rank, one.peer)] += 1
                found[one._replace(op=WAIT_OF[one.op])] = counts[channel]
        return found

    def _prepared(self) -> Run:
        """Return the run of the chosen microbatches."""
        context, rank = self._context, self._context.plan_rank
        stages = {index: _as_if_unused(stage) for index, stage in context.stages.items()}
        return Run(
            plan=self._plan,
            rank=rank,
            step=0,
            stages=stages,
            parts={index: ModuleSnapshot.of(stage.submod, Makeups()) for index, stage in stages.items()},
            transport=HeadersAlone(context.transport.device, rank, self._plan.num_ranks, self._mail),
            given=self._fakes(),
            specs={},
            is_learning=True,
            memory=self._memory,
            name=f"rank {rank} of the plan, in a dry run",
            conventions=context.cutter.conventions(),
            observer=None,
            shared=Shared({one: self._modules.fake(weights) for one, weights in self._shared.weights.items()}, frozenset()),
        )

    def _fakes(self) -> StepInputs:
        """Return what the step is given, with fake tensors for the chosen microbatches."""
        given, fake = self._given, self._modules.fake
        units = {unit for microbatch in self._count for unit in self._plan.units.of(microbatch)}

        def chosen(values: Sequence[Any]) -> list[Any]:
            return [fake(value) if unit in units else value for unit, value in enumerate(values)]

        return replace(
            given,
            args=chosen(given.args),
            kwargs=chosen(given.kwargs),
            targets=None if given.targets is None else chosen(given.targets),
            loss_kwargs=fake(given.loss_kwargs),
            loss_parameters=[(name, fake(one)) for name, one in given.loss_parameters],
        )

    def _end(self) -> None:
        """Keep the sizes that were found, and forget all else."""
        self.is_over = True
        run, self._run = self._run, None
        if run is not None and not self.failure:
            returned_bytes = sum(num * self._returned_bytes(run, microbatch) for microbatch, num in self._count.items())
            self.sizes = RankSizes.of(run, returned_bytes)
        del run, self._given
        self._memory, self._aside = Memory(), nullcontext()
        modules: FakeModules | None = vars(self).pop("_modules", None)
        made = () if modules is None or self.failure else modules.made  # an error may keep some as long as it is known
        if modules is not None:
            forget_results()
        del modules
        check_gone(made, self._context.transport.device)

    def _returned_bytes(self, run: Run, microbatch: int) -> int:
        """Return the bytes of what the step returns for a microbatch."""
        results, units = run.results, self._plan.units.of(microbatch)
        return bytes_under(tensors_in([of.get(unit) for of in (results.losses, results.outputs) for unit in units]))


def _is_full(tensor: torch.Tensor) -> bool | None:
    """Return whether no element is zero, of a tensor whose values may decide what runs; None for others."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
    if not is_plain or tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or tensor.numel() > MOST_KNOWN:
        return None
    return bool(tensor.all())


def _as_if_unused(stage: PipelineStage) -> PipelineStage:
    """Return a stage whose examples are not compared, which happens once."""
    made = object.__new__(type(stage))
    vars(made).update(vars(stage), examples={})
    return made
