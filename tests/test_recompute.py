"""Microbatches that run forward twice: the same gradients, losses, outputs and buffers to the bit, and the bytes of the plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.estimate.calibrate import calibrated
from bpipe.passes.communicate import computations_only
from bpipe.schedules import Costs, Destinations, Op, Plan, finish, simulate
from bpipe.simulator.critical import critical_path
from bpipe.tools.draw import draw
from tests.models import WIDTH, Block, Result, as_rank, assert_same, batch_of, in_loopback, joined, modules_of, mse, single_process
from tests.over import Over, pipeline
from tests.ranks import run_ranks
from tests.replicas import assert_gradients, averaged
from tests.test_balanced import ONE_STAGE, SCHEDULES, squeezed
from tests.test_balanced_memory import EXACT, MODELS, UNLIKE, assert_enough, assert_exact, assert_peaks, counted
from tests.test_balanced_memory import squeezed as a_microbatch_less
from tests.test_ddp import Replica as Replicated
from tests.test_sharding import Replica as Sharded

pytestmark = pytest.mark.usefixtures("one_thread")

M, STEPS = 8, 2
LOWEST: dict[str, Any] = {"budget": "lowest", "by": "recompute"}
BY_COUNT: dict[str, Any] = {"budget": None, "by": "recompute"}


def recomputed(schedules: list[Any]) -> int:
    """How many microbatches run forward twice on all ranks together."""
    return sum(len(one.plan.recomputed(rank)) for rank, one in enumerate(schedules))


def made_by(schedule: Any, options: dict[str, Any], made: list[Any]) -> Any:
    """`Over`, which notes the schedules that it makes."""

    class Noted(Over):
        def __call__(self, *args: Any, **others: Any) -> bpipe.Balanced:
            made.append(super().__call__(*args, **others))
            return made[-1]

    return Noted(schedule, options)


# Whose highest rank cannot do with less: weight halves wait there, or its two stages are neighbours.
LEVEL: list[Any] = [bpipe.ZBH1, bpipe.ZBH2]
LEVEL_BY_COUNT = [*LEVEL, bpipe.ZBV, bpipe.VHalf, bpipe.VMin, bpipe.DualPipeV]


@cache
def reference(kind: str, steps: int = STEPS, m: int = M) -> Result:
    return single_process(kind, 4, m, steps)


def trained(schedule: Any, kind: str, options: dict[str, Any], steps: int = STEPS, m: int = M) -> tuple[Result, int]:
    made: list[Any] = []
    num_ranks = 4 if schedule in ONE_STAGE else 2
    result = in_loopback(kind, 4, m, made_by(schedule, options, made), steps, num_ranks=num_ranks)
    return result, recomputed(made)


# Gradients, losses, outputs and buffers.


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.rule)
def test_equals_a_single_process(schedule):
    """Convolutions, whose statistics are buffers; in the first step by count something runs twice already."""
    unlimited, none = trained(schedule, "conv", {"budget": 2**40, "by": "recompute"}, 2, 6)
    assert none == 0
    for options in (LOWEST, BY_COUNT, {"budget": squeezed(unlimited, 0.5), "by": "recompute"}):
        result, number = trained(schedule, "conv", options, 2, 6)
        assert_same(result, reference("conv", 2, 6))
        assert number > 0 or schedule in (LEVEL_BY_COUNT if options is BY_COUNT else LEVEL if options is LOWEST else ())
        for name in ("peak_bytes", "device_peak_bytes"):
            assert [stats[name] for stats in result.stats] == [stats[f"predicted_{name}"] for stats in result.stats]
        assert all(stats["evicted_bytes"] == 0 for stats in result.stats)


KINDS_OF = {
    bpipe.OneFOneB: ["transformer", "lstm", "views", "autocast", "tied", "nested", "pair"],
    bpipe.GPipe: ["transformer", "nested", "frozen"],
    bpipe.ZBH1: ["transformer"],
    bpipe.Interleaved1F1B: ["quiet"],
}


@pytest.mark.parametrize("schedule, kind", [(schedule, kind) for schedule, kinds in KINDS_OF.items() for kind in kinds])
def test_equals_a_single_process_whatever_the_stages(schedule, kind):
    unlimited, _ = trained(schedule, kind, {"budget": 2**40, "by": "recompute"}, 2)
    squeeze = {"budget": squeezed(unlimited, 0.5), "by": "recompute"}
    for options in (squeeze, BY_COUNT):
        result, number = trained(schedule, kind, options)
        assert_same(result, reference(kind))
        assert number > 0 or (schedule in LEVEL_BY_COUNT if options is BY_COUNT else kind == "frozen")  # rank 0 saves nothing


def as_noted(rank: int, kind: str, options: dict[str, Any]) -> tuple[Result, int]:
    made: list[Any] = []
    result = as_rank(rank, kind, 4, M, made_by(bpipe.OneFOneB, options, made), STEPS, {})
    return result, len(made[0].plan.recomputed(rank))


@pytest.mark.parametrize("options", [LOWEST])
def test_processes(options):
    results = run_ranks(as_noted, 4, "transformer", options)
    result = joined([result for result, _ in results])
    assert_same(result, reference("transformer"))
    assert sum(number for _, number in results) > 0
    assert [s["device_peak_bytes"] for s in result.stats] == [s["predicted_device_peak_bytes"] for s in result.stats]


# Bytes.

CLEAN = ["lstm", "views", "autocast", "tied", "ends in relu"]  # no buffers that change, and nothing done to an input


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s is not bpipe.BalancedOneFOneB], ids=lambda schedule: schedule.rule)
def test_every_action_leaves_what_the_plan_says(schedule):
    schedules, counts = counted(schedule, "quiet", budget=a_microbatch_less(schedule), by="recompute")
    for count in counts:
        assert_exact(count)
    assert_peaks(schedules, counts)
    assert recomputed(schedules) > 0
    for one in schedules:
        assert one.ledger.live_bytes == one.ledger.slots == 0


class Forgets(nn.Module):
    """Saves what it makes of its input, and not its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sigmoid(torch.tanh(x).exp()))


@pytest.mark.parametrize("schedule, kind", [(one, kind) for one, kinds in EXACT.items() for kind in kinds if kind in CLEAN])
def test_whatever_stages_save_of_their_messages(schedule, kind):
    schedules, counts = counted(schedule, kind, **LOWEST)
    for count in counts:
        assert_exact(count)
    assert_peaks(schedules, counts)


@pytest.mark.parametrize("schedule", [bpipe.GPipe, bpipe.ZBH1, bpipe.Interleaved1F1B])
def test_what_forgets_its_input_gives_it_back(monkeypatch, schedule):
    monkeypatch.setitem(MODELS, "forgets", lambda stage: Forgets())
    plan = counted(schedule, "forgets", budget=2**40, by="recompute")[0][1].plan
    budget = [peak - plan.sizes.stages[1].saved if rank == 1 else None for rank, peak in enumerate(plan.device_peak_bytes)]
    schedules, counts = counted(schedule, "forgets", budget=budget, by="recompute")
    for count in counts:
        assert_enough(count)  # a module that has returned has let go of its input, which is planned to stay until the loss is there
        assert all(moment.counted_after == moment.planned_after for moment in count.moments())
    assert_peaks(schedules, counts)
    assert recomputed(schedules) > 0


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_plan_never_says_too_little(kind):
    schedules, counts = counted(bpipe.OneFOneB, kind, **LOWEST)
    for count in counts:
        assert_enough(count)
    assert_peaks(schedules, counts, messages=2)


def test_buffers_that_a_forward_writes_are_kept_beside_the_input():
    """They are no activations, and no plan counts them: a copy for each microbatch that waits to run again."""
    schedules, counts = counted(bpipe.OneFOneB, "conv", **LOWEST)
    assert recomputed(schedules) > 0
    for rank, (one, count) in enumerate(zip(schedules, counts, strict=True)):
        copy = sum(buffer.nbytes for buffer in one.session.context.stages[rank].submod.buffers())
        most = len(one.plan.recomputed(rank)) * copy
        assert all(0 <= moment.counted_after - moment.planned_after <= most for moment in count.moments())


# Around stages: hooks, autocast, checkpoints, compilers, evaluations, arguments.


Pairs = list[tuple[Any, Any, list[nn.Module]]]


def pair_of(make: Callable[[int], nn.Module], *, schedule: Any = bpipe.GPipe) -> Pairs:
    """The same stages, plain and recomputing: a loopback, its schedules and their modules, each."""
    found = []
    for over in (schedule, Over(schedule, BY_COUNT)):
        torch.manual_seed(0)
        modules = [make(stage) for stage in range(4)]
        found.append((*pipeline(over, modules, M, mse), modules))
    return found


def left_by(modules: list[nn.Module]) -> list[torch.Tensor]:
    tensors = [tensor for module in modules for tensor in (*(p.grad for p in module.parameters()), *module.buffers())]
    return [tensor.clone() for tensor in tensors if tensor is not None]


def assert_alike(pairs: Pairs, steps: int = 2, around: Callable[[], Any] = nullcontext, **kwargs: Any) -> None:
    """Steps of both, from the same random numbers, leave the same to the bit; gradients accumulate over them."""
    left, returned = [], []
    for loopback, schedules, modules in pairs:
        torch.manual_seed(1)
        losses: list[torch.Tensor] = []
        for step in range(steps):
            x, y = batch_of("quiet", 2 * M, step)
            with around():
                out = loopback.step(schedules, x, target=y, losses=losses, **kwargs)
        left.append(left_by(modules))
        returned.append([*losses, *torch.utils._pytree.tree_leaves(out), torch.rand(1)])
    assert len(left[0]) == len(left[1]) > 0 and all(map(torch.equal, *left))
    assert all(map(torch.equal, *returned))
    assert recomputed(pairs[1][1]) > 0 == recomputed(pairs[0][1])


def test_gradients_add_up_over_steps():
    assert_alike(pair_of(lambda stage: Block()), steps=4)


def test_autocast_around_the_step():
    """Its cache of weights in low precision is filled by a forward that saves nothing, too."""
    assert_alike(pair_of(lambda stage: Block()), around=lambda: torch.autocast("cpu", torch.bfloat16))


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.GPipe])
def test_the_users_hooks_on_saved_tensors(schedule):
    """They see each saved tensor once: nothing of a first forward."""
    seen: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    for which, (loopback, schedules, _) in enumerate(pair_of(lambda stage: nn.Linear(WIDTH, WIDTH), schedule=schedule)):
        x, y = batch_of("quiet", 2 * M)
        loopback.step(schedules, x, target=y)  # the first one measures, under hooks of its own
        with saved_tensors_hooks(lambda t, which=which: seen[which].append(tuple(t.shape)) or t, lambda t: t):
            loopback.step(schedules, x, target=y)
    assert sorted(seen[0]) == sorted(seen[1]) != []
    assert_alike(pair_of(lambda stage: Block(), schedule=schedule), around=save_on_cpu)


class Under(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_inside(use_reentrant):
    assert_alike(pair_of(lambda stage: nn.Sequential(Block(), Under(Block(), use_reentrant=use_reentrant))))


class Statistics(nn.Module):
    """Compiles quickly, and keeps a mean that its forward reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("again", self.mean)  # under a second name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x - self.again))
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return y + x * self.again.clone()


def test_buffers_that_a_forward_reads_and_writes():
    """Each microbatch finds another mean, both times the same one."""
    assert_alike(pair_of(lambda stage: Statistics()), steps=3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler looks at
def test_compiled_stages():
    torch._dynamo.reset()
    assert_alike(pair_of(lambda stage: torch.compile(Statistics(), backend="aot_eager", fullgraph=True)))
    torch._dynamo.reset()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.block(x) * scale


def test_keyword_arguments_of_stages():
    assert_alike(pair_of(lambda stage: Scaled()), scale=torch.rand(2 * M, 1, 1, generator=torch.Generator().manual_seed(3)))


def test_evaluations_between_steps():
    left = []
    for loopback, schedules, modules in pair_of(lambda stage: Statistics()):
        found = []
        for step in range(3):
            x, y = batch_of("quiet", 2 * M, step)
            loopback.step(schedules, x, target=y)
            for module in modules:
                module.eval()
            found.append(loopback.eval(schedules, x))
            for module in modules:
                module.train()
        left.append([*found, *left_by(modules)])
    assert all(map(torch.equal, *left))


class OwnNorm(nn.Module):
    """BatchNorm by hand, which writes its statistics without counting it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(self.linear(x), self.mean, self.variance, training=self.training)


@pytest.mark.parametrize("make", [Statistics, OwnNorm])
def test_stages_that_are_frozen_first(make):
    """In eval mode nothing is written, and nothing is learned of what train mode writes."""
    left = []
    for loopback, schedules, modules in pair_of(lambda stage: make()):
        for step, is_training in enumerate((False, True, True)):
            for module in modules:
                module.train(is_training)
            x, y = batch_of("quiet", 2 * M, step)
            loopback.step(schedules, x, target=y)
        left.append(left_by(modules))
    assert all(map(torch.equal, *left))


class Weighted(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(1))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(0.9)
        return mse(output, target) * self.weight.clone()


@pytest.mark.parametrize("name", ["__call__", "forward"])
def test_a_loss_with_buffers(name):
    left = []
    for over in (bpipe.GPipe, Over(bpipe.GPipe, BY_COUNT)):
        torch.manual_seed(0)
        modules, loss = [nn.Linear(WIDTH, WIDTH) for _ in range(4)], Weighted()
        loopback, schedules = pipeline(over, modules, M, loss if name == "__call__" else loss.forward)
        for step in range(2):
            x, y = batch_of("quiet", 2 * M, step)
            loopback.step(schedules, x, target=y)
        left.append(left_by([*modules, loss]))
    assert all(map(torch.equal, *left))


def test_the_loss_runs_twice_on_the_last_stage():
    calls = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return mse(nn.functional.dropout(output, 0.5), target)

    left = []
    for over in (bpipe.GPipe, Over(bpipe.GPipe, BY_COUNT)):
        torch.manual_seed(0)
        modules = [Block() for _ in range(4)]
        loopback, schedules = pipeline(over, modules, M, loss_fn)
        x, y = batch_of("quiet", 2 * M)
        torch.manual_seed(1)
        calls.clear()
        loopback.step(schedules, x, target=y)
        left.append(left_by(modules))
    assert all(map(torch.equal, *left))
    assert len(calls) == M + len(schedules[3].plan.recomputed(3)) > M


# What cannot be recomputed.


class Changes(nn.Module):
    """Does something to its input, or to a buffer now and then."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.calls = nn.Linear(WIDTH, WIDTH), what, 0
        self.register_buffer("often", torch.zeros(2**15))  # too large to be copied each time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.what == "input":
            x = x.mul_(2)
        elif self.what == "buffer" and self.calls == M:
            self.often.add_(1)
        elif self.what == "parameter":
            with torch.no_grad():
                self.linear.bias.mul_(0.9)
        elif self.what == "gradient":
            value = x.detach().requires_grad_()
            x = x + torch.autograd.grad(self.linear(value).square().sum(), value)[0]
        elif self.what == "transform":
            x = x + torch.func.grad(lambda value: self.linear(value).square().sum())(x)
        return self.linear(x)


def fails(rank: int, what: str) -> str:
    """What a rank is told when stage 1 cannot run again."""
    module = Changes(what if rank == 1 else "nothing")
    stage = bpipe.PipelineStage(module, rank, 4, "cpu")
    schedule = bpipe.Balanced(bpipe.GPipe(stage, M, loss_fn=mse), **BY_COUNT)
    x, y = batch_of("quiet", 2 * M)
    with pytest.raises(bpipe.errors.BPipeError) as caught:
        schedule.step(x, target=y)
    schedule.close()
    return "\n".join([caught.type.__qualname__, str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    "what, message",
    [
        ("input", "of stage 1 cannot be recomputed: its input was changed in place. Let the stage work on a clone of its input"),
        ("buffer", "of stage 1 cannot be recomputed: its forward writes the tensor often, which earlier ones did not"),
        ("parameter", "of stage 1 cannot be recomputed: its forward writes the parameter bias"),
        ("gradient", "of stage 1 cannot be recomputed: it runs a backward, or torch.autograd.grad, inside its forward"),
        ("transform", "uses a transform of torch.func that refuses saved-tensor hooks"),
    ],
)
def test_what_cannot_run_twice_is_refused_on_all_ranks(what, message):
    told = run_ranks(fails, 4, what)
    assert all(message in text for text in told), told
    assert told[1].startswith("StageError") and "1F" in told[1]


class Inner(torch.autograd.Function):
    """Computes a gradient in its forward, as functions that are defined by an equation do."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            return torch.autograd.grad(inner.sin().sum(), inner)[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class WithBackward(nn.Module):
    """A stage whose forward runs a backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        leaf = x.detach().requires_grad_()
        if self.how == "a penalty on the gradient":
            return y + torch.autograd.grad(self.linear(leaf).square().sum(), leaf, create_graph=True)[0]
        if self.how == "a backward":
            self.linear(leaf).square().sum().backward(inputs=[leaf])
            return y + leaf.grad
        if self.how == "a search by gradients":
            for _ in range(2):
                leaf = (leaf - 0.1 * torch.autograd.grad(leaf.square().sum(), leaf)[0]).detach().requires_grad_()
            return y + leaf.detach()
        return y + Inner.apply(x) if self.how == "a function" else y


def mse_with_backward(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    leaf = output.detach().requires_grad_()
    mse(leaf, target).backward()
    return mse(output, target) + (output * leaf.grad).sum()


@pytest.mark.parametrize("how", ["a penalty on the gradient", "a backward", "a search by gradients", "a function", "the loss"])
def test_a_backward_in_a_forward_cannot_be_recomputed_and_the_way_out_works(how):
    """What the message advises, to evict instead, trains as a single process."""
    loss_fn, found = mse_with_backward if how == "the loss" else mse, []
    for by in ("recompute", "evict", None):
        torch.manual_seed(0)
        modules, loopback = [WithBackward(how) for _ in range(4)], bpipe.Loopback(4)
        schedules = [
            bpipe.GPipe(bpipe.PipelineStage(module, i, 4, "cpu", loopback.rank(i)), M, loss_fn) for i, module in enumerate(modules)
        ]
        if by is not None:
            schedules = [bpipe.Balanced(one, budget=None, by=by) for one in schedules]
        x = torch.linspace(-1, 1, 2 * M * WIDTH).view(2 * M, WIDTH)
        if by == "recompute":
            told = r"of stage \d cannot be recomputed: it runs a backward.* Evict instead \(by='evict'\)"
            with pytest.raises(bpipe.errors.StageError, match=told):
                loopback.step(schedules, x, target=x)
            continue
        loopback.step(schedules, x, target=x)
        found.append([one.grad for module in modules for one in module.parameters()])
    assert all(map(torch.equal, *found))


class Raises(nn.Module):
    calls = 0  # not restored

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        if self.calls > M:
            raise ValueError("enough")
        return self.linear(x)


def test_an_error_in_the_second_forward_says_where():
    modules = [Raises() if stage == 2 else nn.Linear(WIDTH, WIDTH) for stage in range(4)]
    loopback, schedules = pipeline(Over(bpipe.GPipe, BY_COUNT), modules, M, mse)
    x, y = batch_of("quiet", 2 * M)
    before, Raises.calls = torch.get_rng_state(), 0
    with pytest.raises(ValueError, match="enough") as caught:
        loopback.step(schedules, x, target=y)
    assert any("2R" in note for note in caught.value.__notes__)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"by": "recomputation"}, "by='recomputation': choose 'evict', 'recompute' or 'evict_or_recompute'"),
        (
            {"by": "recompute", "options": bpipe.Options(parts=2)},
            "by='recompute' evicts nothing and does not use parts: leave them out",
        ),
        ({"by": "recompute", "to": Destinations(host="only"), "costs": Costs()}, "does not use to, costs: leave them out"),
    ],
)
def test_arguments_that_cannot_work(options, message):
    stage = bpipe.PipelineStage(nn.Linear(2, 2), 0, 4, "cpu", bpipe.Loopback(4).rank(0))
    with pytest.raises(ConfigurationError, match=message):
        bpipe.Balanced(bpipe.OneFOneB(stage, M, loss_fn=mse), **options)


def test_a_budget_that_cannot_be_met_is_refused():
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": 9, "by": "recompute"}), modules_of("quiet", 4), M, mse)
    x, y = batch_of("quiet", 2 * M)
    said = r"^9 bytes are too few for 1f1b .*: recomputing as much as possible is not enough.* budget="
    with pytest.raises(BudgetError, match=said):
        loopback.step(schedules, x, target=y)


def test_ranks_that_choose_differently_are_refused():
    modules = modules_of("quiet", 2)
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, LOWEST), modules, M, mse)
    other = bpipe.OneFOneB(bpipe.PipelineStage(modules[1], 1, 2, "cpu", loopback.rank(1)), M, loss_fn=mse)
    x, y = batch_of("quiet", 2 * M)
    with pytest.raises(bpipe.errors.AgreementError):
        loopback.step([schedules[0], bpipe.Balanced(other, budget="lowest")], x, target=y)


# Data parallelism inside a stage.


class AllTwice(bpipe.GPipe):
    """Every microbatch of every stage runs forward twice."""

    def _make_plan(self, *args: Any) -> Plan:
        plan = computations_only(super()._make_plan(*args))
        again = ((step._replace(op=Op.R), step) if step.op is Op.B else (step,) for lane in plan.actions for step in lane)
        steps = [step for some in again for step in some]
        lanes = [tuple(step for step in steps if plan.stage_ranks[step.stage] == rank) for rank in range(plan.num_ranks)]
        return finish(replace(plan, actions=tuple(lanes)))


@pytest.mark.parametrize("kind", ["transformer", "conv", "nested"])
def test_all_microbatches_can_run_twice(kind):
    result = in_loopback(kind, 4, M, AllTwice, 2)
    assert_same(result, reference(kind, 2))
    assert all(stats["peak_slots"] == 1 for stats in result.stats)


def sharded(rank: int) -> list[Any]:
    """Gradients of two steps under FSDP2: within slots, with weights gathered by the plan, and with every microbatch twice."""
    found = []
    for schedule, num_stages in ((Over(bpipe.GPipe, BY_COUNT), 2), (Over(bpipe.BreadthFirst, BY_COUNT), 4), (AllTwice, 2)):
        replica = Sharded(rank, schedule, num_stages=num_stages)
        for step in range(2):
            replica.step(step)
        plan = replica.schedule.plan
        found.append((replica.gradients(), sum(len(plan.recomputed(one)) for one in range(plan.num_ranks))))
    return found


def test_under_fsdp():
    ranks = run_ranks(sharded, 4)
    for of_case, num_stages in zip(zip(*ranks), (2, 4, 2), strict=True):
        assert_gradients([gradients for gradients, _ in of_case], averaged(partial(modules_of, "quiet", num_stages), 4, range(2)))
        assert all(number > 0 for _, number in of_case)


def replicated(rank: int) -> list[list[torch.Tensor]]:
    """What two steps under DDP leave, without and with recomputation; stages read buffers that DDP makes equal."""
    found = []
    for schedule in (bpipe.GPipe, AllTwice, Over(bpipe.GPipe, BY_COUNT)):
        torch.manual_seed(0)
        replica = Replicated(rank, schedule, [Statistics() for _ in range(2)])
        for step in range(2):
            replica.step(step)
        found.append(left_by(list(replica.modules.values())))
    return found


def test_under_ddp():
    for plain, *others in run_ranks(replicated, 4):
        for other in others:
            assert len(plain) == len(other) > 0 and all(map(torch.equal, plain, other))


# Traces.


def test_a_trace_and_its_pictures_have_it(tmp_path):
    loopback, schedules = pipeline(Over(bpipe.GPipe, BY_COUNT), modules_of("quiet", 4), M, mse)
    x, y = batch_of("quiet", 2 * M)
    with bpipe.trace(schedules, tmp_path):
        for _ in range(2):
            loopback.step(schedules, x, target=y)
    timeline = bpipe.load_trace(tmp_path)[-1]
    plan = timeline.plan
    assert plan == schedules[0].plan
    for rank in range(4):
        ran = {span.action[:3] for span in timeline.computations(rank)}
        assert {(Op.R, *key) for key in plan.recomputed(rank)} <= ran
    costs = calibrated([timeline], plan)
    assert costs.seconds(Op.R, 0, 0) == costs.seconds(Op.F, 0, 0) > 0
    simulated = simulate(plan, costs)
    for shown in (timeline, simulated):
        assert any(step.span.action.op is Op.R for step in critical_path(shown))
        for name in ("drawn.html", "drawn.svg"):
            draw(shown, tmp_path / name)
            assert "recompute" in (tmp_path / name).read_text()
    assert " R3 B3 " in str(plan)
