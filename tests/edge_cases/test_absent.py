"""Gradients that some microbatches do not have: skipped stages, inputs left unused, outputs cut off. As in a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

import bpipe
from bpipe.comm.transport.in_process import LoopbackTransport
from bpipe.engine import evictions
from bpipe.errors import StageError
from bpipe.memory.saved import known
from bpipe.schedules import Purpose
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M, pipeline
from tests.models import Result, assert_same, held_by, joined, state_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 3, 8
LAST = NUM_STAGES - 1
SOME = ("1f1b", "bytes", "zb_h1", "zbv", "dualpipe_v")  # whole and split backwards, one and two stages on a rank
T = torch.Tensor


def batch(step: int, rows: int = ROWS) -> Batch:
    """Inputs, and a key for each microbatch, from which follows what it skips: `step * 1000`, and something random."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, M, rows, WIDTH, generator=generator)
    return Batch((x, 1000 * step + torch.randint(1000, (M,), generator=generator)), y)


FIRST_KEY = int(batch(0).args[1][0])


def draw(key: T, salt: int) -> float:
    """A random number in [0, 1) of a microbatch, the same in a pipeline as in one process."""
    return (int(key[0]) * 7919 + salt * 104729) * 2654435761 % 2**32 / 2**32


def step_of(key: T) -> int:
    return int(key[0]) // 1000


class Stage(nn.Module):
    """A stage with a block; what it does is a function of the stage and of what it gets. The last one returns its first output."""

    def __init__(self, index: int, body: Callable[..., Any]) -> None:
        super().__init__()
        self.index, self.body = index, body
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.zero = nn.Parameter(torch.zeros(1))

    def block(self, x: T) -> T:
        return x + torch.tanh(self.one(x))

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)


def layer_drop(stage: Stage, x: T, key: T) -> Any:
    if stage.index == LAST:
        return stage.one(x)
    return (x if draw(key, stage.index) < 0.5 else stage.block(x)), key


def layer_drop_in_the_middle(stage: Stage, x: T, key: T) -> Any:
    """Stage 0, too, but it learns the layouts from its first step without a drop."""
    if stage.index == LAST:
        return stage.one(x)
    is_dropped = draw(key, stage.index) < 0.3 if stage.index else step_of(key) > 0 and draw(key, 0) < 0.7
    return (x if is_dropped else stage.block(x)), key


def skip_of_odd_microbatches(stage: Stage, x: T, *rest: T) -> Any:
    """A long skip connection that only some use, and whose last user is not the last stage in others."""
    key = rest[-1]
    if stage.index == 0:
        return stage.block(x), stage.other(x), key
    skip = rest[0]
    if stage.index == 2 and draw(key, 2) < 0.3:
        return stage.block(x + skip), skip.detach().requires_grad_(), key
    if stage.index < LAST:
        return stage.block(x), skip, key
    return stage.block(x) + (stage.other(skip) if int(key[0]) % 2 else 0)


def branch_dead_in_one_step(dead: int) -> Callable[..., Any]:
    def body(stage: Stage, x: T, *rest: T) -> Any:
        key = rest[-1]
        more = stage.other(rest[0] if stage.index else x)
        if stage.index == LAST:
            return stage.block(x) if step_of(key) == dead else stage.block(x) * more
        return stage.block(x), more, key

    return body


def branch_of_infinite_slope(stage: Stage, x: T, *rest: T) -> Any:
    """Used in the first step, and never again: an invented gradient of zeros would become NaN."""
    key = rest[-1]
    slope = stage.zero.sqrt() if stage.index == 0 else rest[0]
    if stage.index == LAST:
        return stage.block(x) + 100 + slope if step_of(key) == 0 else stage.block(x)  # slopes of one sign: inf, and no NaN
    return stage.block(x), slope, key


def cut_off(stage: Stage, x: T, key: T) -> Any:
    """Outputs without a gradient: then no stage before has anything to do."""
    y = stage.block(x)
    if stage.index == LAST:
        return y
    return (y.detach() if draw(key, stage.index) < 0.3 else y), key


def without_grad(stage: Stage, x: T, key: T) -> Any:
    with torch.set_grad_enabled(torch.is_grad_enabled() and (stage.index == LAST or draw(key, stage.index) < 0.6)):
        y = stage.block(x)
    return y if stage.index == LAST else (y, key)


def read_without_grad(stage: Stage, x: T, key: T) -> Any:
    """An input of which nothing but a number is used."""
    if draw(key, stage.index) < 0.4:
        with torch.no_grad():
            scale = x.abs().mean()
        x = scale * stage.other.weight[:1].expand_as(x)
    y = stage.block(x)
    return y if stage.index == LAST else (y, key)


def early_exit(stage: Stage, x: T, *rest: T) -> Any:
    """From stage 1 on a microbatch may be finished: what comes after does not count."""
    key, done = rest[-1], (rest[0] if stage.index > 1 else x)
    leaves_at = 1 + int(3 * draw(key, 9))
    y = stage.block(x)
    if stage.index == LAST:
        return done if leaves_at < LAST else y
    if stage.index == 0:
        return y, key
    return y, (stage.other(y) if stage.index == leaves_at else done), key


def loss_of_parameters_alone(stage: Stage, x: T, key: T) -> Any:
    if stage.index == LAST and draw(key, 5) < 0.5:
        return stage.other.bias.expand_as(x)
    return stage.block(x) if stage.index == LAST else (stage.block(x), key)


def gradients_that_lie_otherwise(stage: Stage, x: T, key: T) -> Any:
    """The gradient of the input is transposed in memory in some microbatches."""
    if draw(key, stage.index) < 0.5:
        weights = stage.one.weight.expand(len(x), WIDTH, WIDTH)
        y = torch.bmm(weights, x.transpose(1, 2)).transpose(1, 2).contiguous()
    else:
        y = stage.one(x)
    return y if stage.index == LAST else (y, key)


def caches_beside(stage: Stage, x: T, *rest: T) -> Any:
    """Rotary caches travel with what is trained, and get no gradients whoever is skipped, but in the first microbatch."""
    cos, key = (torch.cos(x), rest[0]) if stage.index == 0 else rest
    assert not cos.requires_grad
    is_dropped = draw(key, stage.index) < 0.6 and stage.index < LAST and int(key[0]) != FIRST_KEY
    y = x if is_dropped else stage.block(x * cos)
    return y if stage.index == LAST else (y, cos, key)


def integers_and_unused(stage: Stage, x: T, *rest: T) -> Any:
    """An output that nobody uses beside one of whole numbers, and a dict of both."""
    key, y = rest[-1], stage.block(x)
    nest = {"whole": (y * 9).long(), "unused": [stage.other(x)]}
    if stage.index and draw(key, stage.index) < 0.4:
        y = y + rest[0]["unused"][0] + rest[0]["whole"]
    return y if stage.index == LAST else (y, nest, key)


def late_beside_others(stage: Stage, x: T, *rest: T) -> Any:
    """An output that needs a gradient from the second step on."""
    key, more = rest[-1], stage.other(x)
    if stage.index == LAST:
        return stage.block(x) + rest[0] * more
    assert stage.index == 0 or rest[0].requires_grad == (step_of(key) > 0 and torch.is_grad_enabled())
    return stage.block(x), (more.detach() if step_of(key) == 0 else more), key


def late_in_some_microbatches(stage: Stage, x: T, *rest: T) -> Any:
    """Two of them in a dict, which go through several stages, each now and then."""
    key = rest[-1]
    if stage.index == LAST:
        return stage.block(x) + rest[0]["a"] + rest[0]["b"]
    more = {name: stage.other(x) for name in "ab"} if stage.index == 0 else dict(rest[0])
    for salt, name in enumerate("ab"):
        if draw(key, 10 * stage.index + salt) < (0.8, 0.4, 0.1)[step_of(key)]:
            more[name] = more[name].detach()
    return stage.block(x), more, key


def needed_once(stage: Stage, x: T, *rest: T) -> Any:
    """In the second step alone, and used in half of its microbatches."""
    key = rest[-1]
    more = stage.other(rest[0] if stage.index else x)
    if stage.index == LAST:
        return stage.block(x) * more if draw(key, 7) < 0.5 else stage.block(x)
    return stage.block(x), (more if step_of(key) == 1 else more.detach()), key


def first_stage_without_grad(stage: Stage, x: T, key: T) -> Any:
    """It could be trained, and is not: what comes from it needs no gradient in the next one either."""
    assert x.requires_grad == (stage.index > 1 and torch.is_grad_enabled())
    with torch.set_grad_enabled(torch.is_grad_enabled() and stage.index > 0):
        y = stage.block(x)
    return y if stage.index == LAST else (y, key)


def middle_stage_without_grad(stage: Stage, x: T, *rest: T) -> Any:
    """Until the third step in most microbatches, beside an output of whole numbers."""
    key = rest[-1]
    is_off = stage.index == 1 and step_of(key) < 2 and draw(key, 6) < 0.7
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_off):
        y = stage.block(x)
    return y if stage.index == LAST else (y, (y * 9).long(), key)


def unfrozen_later(stage: Stage, x: T, key: T) -> Any:
    """A first stage that warms up: its inner layer is trained from the second step on."""
    y = stage.block(x.detach()) if stage.index else stage.one(x).detach() + (stage.zero if step_of(key) else 0)
    y = y + (x - x.detach())
    return y if stage.index == LAST else (y, key)


BODIES = [
    layer_drop,
    layer_drop_in_the_middle,
    skip_of_odd_microbatches,
    branch_dead_in_one_step(0),
    branch_dead_in_one_step(1),
    branch_of_infinite_slope,
    cut_off,
    without_grad,
    read_without_grad,
    early_exit,
    loss_of_parameters_alone,
    gradients_that_lie_otherwise,
    caches_beside,
    integers_and_unused,
    late_beside_others,
    late_in_some_microbatches,
    needed_once,
    first_stage_without_grad,
    middle_stage_without_grad,
    unfrozen_later,
]
EVERYWHERE = (layer_drop, skip_of_odd_microbatches, cut_off)


LATE = {late_beside_others, needed_once, first_stage_without_grad, middle_stage_without_grad, unfrozen_later}
A_FEW = ("1f1b", "bytes", "dualpipe_v")


def stages(body: Callable[..., Any]) -> list[nn.Module]:
    return [Stage(i, body) for i in range(NUM_STAGES)]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__qualname__.split(".")[0])
def test_gradients_are_those_of_a_single_process(body: Callable[..., Any]) -> None:
    names = tuple(SCHEDULES) if body in EVERYWHERE else A_FEW if body in LATE else SOME
    Case(lambda: stages(body), batch, F.mse_loss).check(names)


def test_a_gradient_is_needed_for_the_first_time_where_its_receive_is_posted_before() -> None:
    """With one microbatch there is nothing between its forward and its backward."""
    modules = stages(late_beside_others)
    loopback, schedules = pipeline(SCHEDULES["1f1b"], modules, F.mse_loss, m=1)
    for step in range(3):
        (x, key), y = (one[:1] for one in batch(step).args), batch(step).target[:1]
        loopback.step(schedules, x, key, target=y)
        gradients = [p.grad for module in modules for p in module.parameters()]
        for module in modules:
            module.zero_grad()
        value: Any = (x, key)
        for module in modules:
            value = module(*value)
        F.mse_loss(value, y).backward()
        for gradient, parameter in zip(gradients, (p for module in modules for p in module.parameters()), strict=True):
            assert (gradient is None) == (parameter.grad is None)
            assert gradient is None or torch.equal(gradient, parameter.grad)
        for module in modules:
            module.zero_grad()


# Over processes, with messages that travel in two ways.

ROWS_OF = {"small": 3, "large": 9000}  # of a microbatch: 96 bytes, and 281 KiB, which gloo carries


def dtensors(stage: Stage, x: T, *rest: T) -> Any:
    """A skip connection that is a DTensor where there are processes."""
    key, more = rest[-1], rest[0] if stage.index else stage.other(x)
    if stage.index and isinstance(more, DTensor):
        more = more.to_local()
    if stage.index == LAST:
        return stage.block(x) + (more if draw(key, 3) < 0.5 else 0)
    mesh = MESHES[-1]
    return stage.block(x), more if mesh is None else DTensor.from_local(more, mesh, [Replicate()]), key


MESHES: list[Any] = [None]
LARGE = [
    (branch_dead_in_one_step(0), bpipe.ZBH1),
    (gradients_that_lie_otherwise, bpipe.BalancedOneFOneB),
    (late_in_some_microbatches, bpipe.OneFOneB),
]
SMALL = [(layer_drop, bpipe.BalancedOneFOneB), (skip_of_odd_microbatches, bpipe.ZBH1), (dtensors, bpipe.OneFOneB)]
ACROSS = {"small": [*SMALL, *LARGE], "large": LARGE}


def as_ranks(rank: int, size: str) -> list[Result]:
    """Cases over gloo, one stage per rank, one schedule after the other."""
    MESHES.append(init_device_mesh("cpu", (1, NUM_STAGES), mesh_dim_names=("tp", "pp"))["tp"])
    return [as_rank(rank, body, ROWS_OF[size], schedule) for body, schedule in ACROSS[size]]


def as_rank(rank: int, body: Callable[..., Any], rows: int, schedule: Any) -> Result:
    torch.manual_seed(0)
    module, result = stages(body)[rank], Result(stages=[rank])
    placed = bpipe.PipelineStage(module, rank, NUM_STAGES, "cpu", get_mesh=lambda names, layout: MESHES[-1])
    pipeline = schedule(placed, M, loss_fn=F.mse_loss)
    for step in range(3):
        given = batch(step, rows)
        pipeline.step(*given.args, target=given.target, losses=result.losses, return_outputs=False)
    pipeline.close()
    result.gradients, result.buffers = [[part] for part in state_of(module)]
    return result


@pytest.mark.parametrize("size", ROWS_OF)
def test_gradients_are_those_of_a_single_process_over_gloo(size: str) -> None:
    for (body, _), parts in zip(ACROSS[size], zip(*run_ranks(as_ranks, NUM_STAGES, size)), strict=True):
        expected = Case(partial(stages, body), partial(batch, rows=ROWS_OF[size]), F.mse_loss).alone()
        whole = joined(parts)
        whole.outputs = expected.outputs = [torch.zeros(1)]
        assert_same(whole, expected)


# Beside other things that wait for gradients.


def forget_but_the_last(modules: Sequence[nn.Module], step: int) -> None:
    """FSDP adds up each step's gradients by themselves, in another order than a single process."""
    for module in modules if step < 2 else ():
        module.zero_grad()


def sharded(rank: int) -> list[Result]:
    """Two stages a rank under FSDP, over two replicas with the same data, whose averages are what each has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "pp"))
    results = []
    for body, schedule in SHARDED:
        torch.manual_seed(0)
        held = held_by(schedule, 2, NUM_STAGES)[rank % 2]
        whole = stages(body)
        modules = [fully_shard(whole[i], mesh=mesh["replicas"]) for i in held]
        placed = [bpipe.PipelineStage(module, i, NUM_STAGES, "cpu", mesh["pp"]) for i, module in zip(held, modules)]
        pipeline = schedule(placed, M, loss_fn=F.mse_loss)
        result = Result(stages=held)
        for step in range(3):
            given = batch(step)
            pipeline.step(*given.args, target=given.target, losses=result.losses, return_outputs=False)
            forget_but_the_last(modules, step)
        pipeline.close()
        for module in modules:
            result.gradients.append([p.grad if p.grad is None else p.grad.full_tensor() for p in module.parameters()])
            result.buffers.append([])
        results.append(result)
    return results


SHARDED = [(layer_drop, bpipe.Interleaved1F1B), (cut_off, bpipe.ZBV)]


def test_sharded_stages_are_reduced_once_whoever_has_nothing_to_do() -> None:
    ranks = run_ranks(sharded, 4)
    for i, (body, _) in enumerate(SHARDED):
        expected = Case(partial(stages, body), batch, F.mse_loss, after=forget_but_the_last).alone()
        for replica in (ranks[:2], ranks[2:]):
            whole = joined([results[i] for results in replica])
            whole.outputs = expected.outputs = [torch.zeros(1)]
            assert_same(whole, expected)


def test_hooks_do_not_fire_without_a_gradient() -> None:
    for name in SOME:
        modules = stages(cut_off)
        fired: list[list[T]] = [[] for _ in modules]
        for module, gradients in zip(modules, fired):
            module.one.bias.register_hook(gradients.append)
        loopback, schedules = pipeline(SCHEDULES[name], modules, F.mse_loss)
        for step in range(3):
            loopback.step(schedules, *batch(step).args, target=batch(step).target)
        keys = [batch(step).args[1][i : i + 1] for step in range(3) for i in range(M)]
        reached = [all(draw(key, later) >= 0.3 for later in range(i, LAST)) for i in range(NUM_STAGES) for key in keys]
        counts = [len(gradients) for gradients in fired]
        assert counts == [sum(reached[i * len(keys) : (i + 1) * len(keys)]) for i in range(NUM_STAGES)]
        assert 0 < counts[0] < counts[LAST] == len(keys)


def test_what_nobody_knows_to_be_trained_is_refused_where_it_begins_later() -> None:
    """A frozen stage adds a leaf that is no parameter, from the second step on: the next stage cannot know."""
    leaf = torch.ones(WIDTH, requires_grad=True)

    def body(stage: Stage, x: T, key: T) -> Any:
        y = stage.block(x)
        return y if stage.index == LAST else (y * leaf if stage.index == 0 and step_of(key) else y, key)

    modules = stages(body)
    modules[0].requires_grad_(False)
    loopback, schedules = pipeline(SCHEDULES["1f1b"], modules, F.mse_loss)
    loopback.step(schedules, *batch(0).args, target=batch(0).target)
    with pytest.raises(
        StageError, match=r"stage 0, microbatch 0: an output needs a gradient.*no trainable parameters.*as Parameters"
    ):
        loopback.step(schedules, *batch(1).args, target=batch(1).target)


def test_the_ledger_is_right_again_after_a_backward_with_nothing_to_do() -> None:
    """The microbatch that is measured shows nothing of what stays between the halves of a backward: the next one does."""

    def cut_off_first(stage: Stage, x: T, key: T) -> Any:
        y = stage.block(x)
        if stage.index == LAST:
            return y
        return (y.detach() if stage.index == 2 and int(key[0]) == 0 else y), key

    def after(first: int) -> list[dict[str, float]]:
        loopback, schedules = pipeline(SCHEDULES["zb_h2"], stages(cut_off_first), F.mse_loss)
        for step in range(2):
            (x, _), target = batch(step).args, batch(step).target
            keys = torch.ones(M, dtype=torch.long)
            keys[0] = first if step == 0 else 1
            loopback.step(schedules, x, keys, target=target)
        before = schedules[:2]  # stage 2 itself keeps less for an output that needs no gradient
        return [{name: value for name, value in one.stats.items() if name.endswith("bytes")} for one in before]

    usual, seen = after(1), after(0)
    assert seen == usual and usual[0]["peak_bytes"] == usual[0]["predicted_peak_bytes"] > 0


def test_a_stage_that_never_has_anything_to_do_is_not_followed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off_always(stage: Stage, x: T, key: T) -> Any:
        y = stage.block(x.detach() if stage.index == 2 else x)
        return y if stage.index == LAST else (y, key)

    followed: list[str] = []

    class Counted(evictions.Stash):
        def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
            followed.append(name)
            super().__init__(name, *args, **kwargs)

    monkeypatch.setattr(evictions, "Stash", Counted)
    loopback, schedules = pipeline(SCHEDULES["zb_h1"], stages(cut_off_always), F.mse_loss)
    for step in range(4):
        loopback.step(schedules, *batch(step).args, target=batch(step).target)
    assert 2 <= sum(name.endswith("stage 0") for name in followed) <= known.MOST_IDLE + NUM_STAGES


def messages_with_notes(body: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many forward messages a step sends, and how many of them may come with a note."""
    counts, send = [0, 0], LoopbackTransport.send

    def counting(self: Any, channel: Any, *args: Any, may_have_note: bool = False) -> Any:
        counts[0] += channel.purpose is Purpose.FORWARD
        counts[1] += channel.purpose is Purpose.FORWARD and may_have_note
        return send(self, channel, *args, may_have_note=may_have_note)

    monkeypatch.setattr(LoopbackTransport, "send", counting)
    loopback, schedules = pipeline(SCHEDULES["1f1b"], stages(body), F.mse_loss)
    loopback.step(schedules, *batch(0).args, target=batch(0).target)
    return counts


def mask_handed_on(stage: Stage, x: T, *rest: T) -> Any:
    mask = x if stage.index == 0 else rest[0]
    y = stage.block(x) * mask
    return y if stage.index == LAST else (y, mask)


def view_handed_on(stage: Stage, x: T, *rest: T) -> Any:
    mask = rest[0][..., :1] if stage.index else x.detach()
    y = stage.block(x) * mask
    return y if stage.index == LAST else (y, mask)


def mask_by_arithmetic(stage: Stage, x: T, *rest: T) -> Any:
    mask = 1 - x.detach() if stage.index == 0 else rest[0]
    y = stage.block(x) * mask
    return y if stage.index == LAST else (y, mask)


@pytest.mark.parametrize(("body", "share"), [(mask_handed_on, 0), (view_handed_on, 0), (mask_by_arithmetic, 1)])
def test_what_is_handed_on_needs_no_notes(body: Callable[..., Any], share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, with_note = messages_with_notes(body, monkeypatch)
    assert count == M * LAST and with_note == share * count


def test_what_was_handed_on_and_needs_a_gradient_later_is_refused() -> None:
    def body(stage: Stage, x: T, key: T) -> Any:
        if stage.index == 0:
            return stage.block(x), (x * stage.one.weight[0] if step_of(key) else x)
        y = stage.block(x) + key
        return y if stage.index == LAST else (y, key)

    loopback, schedules = pipeline(SCHEDULES["1f1b"], stages(body), F.mse_loss)
    loopback.step(schedules, *batch(0).args, target=batch(0).target)
    with pytest.raises(
        StageError, match=r"stage 0, microbatch 0: an output needs a gradient.*return a clone of a tensor that is passed through"
    ):
        loopback.step(schedules, *batch(1).args, target=batch(1).target)
