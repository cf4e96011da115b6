"""Streams: exact where exactness is defined, one sample a rank, and ticks as long as the slowest stage."""

from __future__ import annotations

import os
import runpy
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import bpipe
from bpipe.errors import ConfigurationError, PipelineBrokenError
from tests.ranks import run_ranks
from tests.relaxed.streams import WORDS, Embed, Last, Middle, Tick, alone
from tests.sleepers import Sleeper

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = Path(bpipe.__file__).parents[1] / "examples/stream.py"


def layers(p: int, width: int = 16) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(p)]


def stream_of(module: nn.Module, rank: int, p: int, **options: Any) -> bpipe.Stream:
    return bpipe.Stream(bpipe.PipelineStage(module, rank, p, "cpu"), **options)


def gradients(module: nn.Module) -> list[Tensor]:
    return [one.grad for one in module.parameters() if one.grad is not None]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


def streaming_ties(rank: int) -> list[str]:
    """What is said with an optimizer inside and without, whether somebody sums or not."""
    torch.manual_seed(0)
    part, said = bpipe.split_model(Tied(), [["a"], ["b"]])[rank], []
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for options in ({"optimizer": optimizer}, {}):
        try:
            stream_of(part, rank, 2, loss_fn=F.mse_loss, **options)
        except ConfigurationError as error:
            said.append(str(error))
    tied = bpipe.TiedWeights({"a.weight": (part.a if rank == 0 else part.b).weight})  # type: ignore[union-attr]
    tied.broadcast()
    try:
        stream_of(part, rank, 2, loss_fn=F.mse_loss, optimizer=optimizer)
    except ConfigurationError as error:
        said.append(str(error))
    stream_of(part, rank, 2, loss_fn=F.mse_loss).close()
    return said


def test_an_optimizer_inside_a_stream_steps_before_anybody_could_sum() -> None:
    for said in run_ranks(streaming_ties, 2):
        assert ["an optimizer that steps by itself" in one for one in said] == [True, False, True] and "TiedWeights" in said[1]


# Gradients.


def pushing_the_same(rank: int, p: int) -> tuple[list[int], list[list[Tensor]]]:
    """The ticks that gave this rank gradients, and these."""
    module = layers(p)[rank]
    stream = stream_of(module, rank, p, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    x, y = torch.randn(2, 3, 16)
    ticks, found = [], []
    for tick in range(2 * p + 2):
        module.zero_grad()
        stream.push(x, target=y)
        if gradients(module):
            ticks.append(tick)
            found.append(gradients(module))
    stream.close()
    return ticks, found


@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_constant_input_gives_backpropagation(p: int) -> None:
    """To the bit, from tick 2(p-1) on in all stages: in stage s from tick 2(p-1)-s on, and before that it gets no gradient."""
    stages = layers(p)
    x, y = torch.randn(2, 3, 16)
    F.mse_loss(nn.Sequential(*stages)(x), y).backward()
    for s, (ticks, found) in enumerate(run_ranks(pushing_the_same, p, p)):
        assert ticks == list(range(2 * (p - 1) - s, 2 * p + 2))
        assert all(torch.equal(one, theirs) for tick in found for one, theirs in zip(tick, gradients(stages[s]), strict=True))


P_PAUSED = 3
PAUSED = {  # the ticks in which all learn; a message or a graph of the tick before is missing in another way in each of them
    "every second tick": lambda tick: tick % 2 == 0,
    "every second tick, from the second on": lambda tick: tick % 2 == 1,
    "every third tick": lambda tick: tick % 3 == 1,
    "two of three": lambda tick: tick % 3 > 0,
    "all but a long pause": lambda tick: not 7 <= tick < 7 + 3 * P_PAUSED,
    "after a long pause at the start": lambda tick: tick > 2 * P_PAUSED,
    "seldom": lambda tick: tick % (P_PAUSED + 2) == 0,
    "in bursts": lambda tick: tick % 7 in (0, 1, 4),
}


def learning_now_and_then(rank: int, pattern: str) -> tuple[list[int], list[list[Tensor]]]:
    """The ticks in which this rank learned, and its gradients in these."""
    module = layers(P_PAUSED)[rank]
    stream = stream_of(module, rank, P_PAUSED, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    x, y = torch.randn(2, 3, 16)
    ticks, found = [], []
    for tick in range(30):
        module.zero_grad()
        stream.push(x, target=y, learn=PAUSED[pattern](tick))
        if gradients(module):
            ticks.append(tick)
            found.append(gradients(module))
    stream.close()
    return ticks, found


@pytest.mark.parametrize("pattern", PAUSED)
def test_all_stages_learn_between_pauses(pattern: str) -> None:
    """Each stage learns in each tick that learns, once gradients have come to it; with a constant input as in backpropagation."""
    stages = layers(P_PAUSED)
    x, y = torch.randn(2, 3, 16)
    F.mse_loss(nn.Sequential(*stages)(x), y).backward()
    learns = [tick for tick in range(30) if PAUSED[pattern](tick)]
    for s, (ticks, found) in enumerate(run_ranks(learning_now_and_then, P_PAUSED, pattern)):
        assert ticks and ticks == learns[learns.index(ticks[0]) :], s
        assert learns.index(ticks[0]) <= 2 * P_PAUSED
        assert all(torch.equal(one, theirs) for tick in found for one, theirs in zip(tick, gradients(stages[s]), strict=True))


DRIFTS = 0.1, 0.01, 0.001


def drifting(rank: int, p: int) -> list[list[list[Tensor]]]:
    """The gradients of this rank in some ticks, for each drift."""
    module = layers(p)[rank]
    stream = stream_of(module, rank, p, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    found = []
    for drift in DRIFTS:
        ticks = []
        for x, y in drifted(drift):
            stream.push(x, target=y)
            ticks.append(gradients(module))
        found.append(ticks[-4:])
        stream.drain()
    return found


def drifted(drift: float) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    x, towards, y = torch.randn(3, 4, 16, generator=numbers)
    return [(x + tick * drift * towards, y) for tick in range(12)]


def test_the_error_falls_with_the_drift_of_the_input() -> None:
    stages, errors = layers(4), []
    for drift, ticks in zip(DRIFTS, run_ranks(drifting, 4, 4)[0]):
        error = []
        for (x, y), found in zip(drifted(drift)[-4:], ticks):
            nn.Sequential(*stages).zero_grad()
            F.mse_loss(nn.Sequential(*stages)(x), y).backward()
            exact = torch.cat([one.flatten() for one in gradients(stages[0])])
            error.append(float((torch.cat([one.flatten() for one in found]) - exact).norm() / exact.norm()))
        errors.append(statistics.mean(error))
    for error, most in zip(errors, (0.1, 0.012, 0.0012)):
        assert 0 < error < most, errors
    assert errors[0] > 6 * errors[1] and errors[1] > 9 * errors[2], errors  # 7 and 10 times, says the page


def program(seed: int) -> list[Tick]:
    """Streams of some samples each, of other sizes after each drain; the stages learn in most ticks."""
    numbers = torch.Generator().manual_seed(seed)

    def some(most: int) -> int:
        return int(torch.randint(most, (), generator=numbers))

    ticks = []
    for least in (1, 2, 5, 6):
        size = 2 + some(4)
        for _ in range(least + some(least)):
            words = torch.randint(WORDS, (size,), generator=numbers)
            words = (words % 4) * 2 + 1 if not some(3) else words  # all odd
            ticks.append(Tick(words, torch.randn(size, 2, generator=numbers), some(4) > 0))
        ticks += [Tick(None, learn=some(4) > 0)] * 2
    return ticks


def parts() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(3)
    stages = [Embed(), Middle(), Last()]
    return stages, [torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9) for stage in stages]


def learning(rank: int, seed: int) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
    """All outputs, the state in the end, and the losses of pushes."""
    stages, optimizers = parts()
    stream = stream_of(stages[rank], rank, 3, loss_fn=F.mse_loss, optimizer=optimizers[rank])
    outputs, losses, drained = [], [], 0
    for tick in program(seed):
        if tick.words is not None:
            words, target = tick.words.clone(), tick.target.clone()
            outputs.append(stream.push(words, target=target, learn=tick.learn))
            words.zero_(), target.zero_()  # their memory is the caller's
            losses.append(stream.loss)
            drained = 0
        elif (drained := drained + 1) == 1:
            late = stream.drain(learn=tick.learn)
            outputs += [None] * (2 - len(late)) + late
    stream.close()
    return outputs, list(stages[rank].state_dict().values()), losses


@pytest.mark.parametrize("kind", ["list", "tuple", "by name", "one of another kind"])
def test_several_optimizers_learn_as_one(kind: str) -> None:
    found = []
    for several in (False, True):
        torch.manual_seed(3)
        module = nn.Linear(4, 4)
        halves = [torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in module.parameters()]
        given: Any = {"list": halves, "tuple": tuple(halves), "by name": dict(zip("ab", halves))}.get(kind, [Both(halves)])
        optimizer = given if several else torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        stage = bpipe.PipelineStage(module, 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))
        stream = bpipe.Stream(stage, F.mse_loss, optimizer)
        for step in range(3):
            stream.push(torch.full((2, 4), float(step)), target=torch.ones(2, 4))
        stream.close()
        found.append([one.detach().clone() for one in module.parameters()])
    assert all(map(torch.equal, *found))


class Both:
    """An object with step() and zero_grad() that is no torch.optim.Optimizer."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()


@pytest.mark.parametrize("seed", range(9))
def test_learning_is_what_the_definition_says(seed: int) -> None:
    """Weights, buffers, outputs and losses to the bit, with integers, unused and detached outputs, and changes in place."""
    stages, optimizers = parts()
    found = list(alone(stages, optimizers, F.mse_loss, program(seed)))
    results = run_ranks(learning, 3, seed)
    for stage, (_, state, _) in zip(stages, results):
        assert all(torch.equal(one, theirs) for one, theirs in zip(stage.state_dict().values(), state, strict=True))
    outputs, _, losses = results[2]
    assert [one is None for one in outputs] == [one is None for one, _ in found]
    assert all(torch.equal(one, theirs) for one, (theirs, _) in zip(outputs, found) if one is not None)
    pushed = [loss for tick, (_, loss) in zip(program(seed), found) if tick.words is not None]
    assert losses == pushed and any(loss is not None for loss in losses)
    assert not any(one is not None for one in (*results[0][0], *results[1][0]))


class Biases(nn.Module):
    """Autograd gives both parameters the same memory as their first gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one.unsqueeze(0) + self.other.unsqueeze(0)


def adding(rank: int) -> list[list[float]]:
    module, x = Biases(), torch.ones(1, 4)
    stream = stream_of(module, rank, 2, loss_fn=lambda output, target: (output * target).sum())
    for _ in range(6):
        stream.push(x, target=x)
    stream.close()
    return [one.tolist() for one in gradients(module)]


def test_gradients_that_add_up_do_not_share_memory() -> None:
    assert run_ranks(adding, 2) == [[[4.0] * 4] * 2, [[5.0] * 4] * 2]


class Turns(nn.Linear):
    """In every other forward, the gradient of its input has other strides."""

    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return super().forward(x) if self.num_forwards % 2 else super().forward(x.t().contiguous()).t()


def turning() -> tuple[list[nn.Linear], Tensor, Tensor]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), Turns(4, 4)], *torch.randn(2, 4, 4)


def pushing_to_turns(rank: int) -> list[Tensor]:
    stages, x, y = turning()
    stream = stream_of(stages[rank], rank, 2, loss_fn=F.mse_loss)
    found = []
    for _ in range(6):
        stages[rank].zero_grad()
        stream.push(x, target=y)
        found += [one.clone() for one in gradients(stages[rank])[:1]]
    stream.close()
    return found


def test_gradients_of_other_strides() -> None:
    stages, x, y = turning()
    found, exact = run_ranks(pushing_to_turns, 2)[0], []
    for _ in found:
        stages[0].zero_grad()
        F.mse_loss(nn.Sequential(*stages)(x), y).backward()
        exact += gradients(stages[0])[:1]
    assert len(found) == 4 and all(torch.allclose(one, other) for one, other in zip(found, exact, strict=True))
    assert not torch.allclose(exact[0], exact[1])


# Inference.


def inferring(rank: int, p: int, rows: int) -> tuple[list[Any], int, bool]:
    """The outputs, how many samples had been pushed before the last rank's first one, and whether there was a graph."""
    module = layers(p, 512)[rank].append(nn.Dropout(0.5)).eval()
    seen: list[bool] = []
    module.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    stream = stream_of(module, rank, p)
    xs = samples(rows)
    outputs = [stream.push(x) for x in xs]
    if rank == 0:
        time.sleep(0.3)  # the others are through with their part, and wait for this rank to close
    late = stream.drain()
    outputs += late
    stream.push(xs[0])
    stream.close()  # with a sample inside
    return outputs, stream.num_ticks, any(seen)


def samples(rows: int) -> list[Tensor]:
    return list(torch.randn(6, rows, 512, generator=torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("rows", [2, 300])  # of small messages, and of those that go through shared memory
def test_inference_is_that_of_one_process(rows: int) -> None:
    p = 3
    *others, last = run_ranks(inferring, p, p, rows)
    model = nn.Sequential(*layers(p, 512))
    with torch.no_grad():
        assert all(torch.equal(output, model(x)) for output, x in zip(last[0][p - 1 :], samples(rows), strict=True))
    assert last[0][: p - 1] == [None] * (p - 1) and last[1:] == (6 + p - 1 + 1, False)
    assert all(one == ([None] * 6, 9, False) for one in others)


def pausing(rank: int) -> list[list[Tensor]]:
    """The weights behind some ticks with a pause in learning, within inference mode and without."""
    found = []
    for mode in (torch.inference_mode, nullcontext):
        module = layers(2)[rank]
        whole = nn.Sequential(nn.ReLU(inplace=True), module)  # changes its input
        stream = stream_of(whole, rank, 2, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
        for tick, x in enumerate(torch.randn(9, 3, 16)):
            is_pause = tick in (3, 4)
            with mode() if is_pause else nullcontext():
                stream.push(x.clone(), target=x.clone(), learn=not is_pause)
        stream.close()
        found.append([one.detach() for one in module.parameters()])
    return found


def test_a_pause_in_inference_mode() -> None:
    """What is received there is used by the ticks that learn again."""
    for stage, (within, without) in zip(layers(2), run_ranks(pausing, 2), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(within, without, strict=True))
        assert not torch.equal(within[0], next(stage.parameters()))


def unshared(rank: int) -> list[Tensor]:
    """The gradients of a stage whose messages are large, and go over gloo, as between hosts."""
    os.environ["BPIPE_SHARED_MEMORY"] = "0"
    module = layers(2, 512)[rank]
    stream = stream_of(module, rank, 2, loss_fn=F.mse_loss)
    for x in [samples(300)[0]] * 4:
        module.zero_grad()
        stream.push(x, target=x)
    stream.close()
    return gradients(module)


def test_large_messages_between_hosts() -> None:
    stages, (x, *_) = layers(2, 512), samples(300)
    F.mse_loss(nn.Sequential(*stages)(x), x).backward()
    for stage, found in zip(stages, run_ranks(unshared, 2), strict=True):
        assert all(torch.equal(one, theirs) for one, theirs in zip(gradients(stage), found, strict=True))


def being_ahead(rank: int) -> int:
    """How many ticks the first rank is through with before the other one begins its second one, which is when no more come."""
    stream, (x, *_), store = stream_of(layers(2, 512)[rank], rank, 2), samples(300), dist.distributed_c10d._get_default_store()
    stream.push(x)
    num_early = -1
    while rank and num_early != (num_early := store.add("through", 0)):
        time.sleep(0.6)
    for _ in range(10):
        stream.push(x)
        store.add("through", rank == 0)
    stream.close()
    return num_early


def test_messages_do_not_pile_up() -> None:
    """A rank that gets no messages waits until the next one has room for its own."""
    assert run_ranks(being_ahead, 2)[1] <= 2


# Memory and time.

SAVED = 1000  # bytes


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.saved_tensors[0][0], None


class Saving(nn.Module):
    """Saves some bytes for its backward, and counts those that are still there at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.alive: list[int] = []
        self._saved: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        saved = torch.zeros(SAVED, dtype=torch.uint8)
        self._saved.append(StorageWeakRef(saved.untyped_storage()))
        result: Tensor = _Saving.apply(x * self.scale, saved)
        self.alive.append(sum(not one.expired() for one in self._saved) * SAVED)
        return result


def saving(rank: int) -> list[int]:
    module = Saving()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stream = stream_of(module, rank, 3, loss_fn=F.mse_loss, optimizer=optimizer)
    for _ in range(8):
        stream.push(torch.ones(2), target=torch.ones(2))
    stream.close()
    return module.alive


def test_a_rank_saves_one_sample() -> None:
    """In ticks with and without a gradient; 1F1B has 3 on its first rank, where a sample waits for its own gradient."""
    assert run_ranks(saving, 3) == [[SAVED] * (8 - rank) for rank in range(3)]


FORWARD_S = 0.02, 0.05, 0.03, 0.04


def sleeping(rank: int) -> tuple[list[float], list[float]]:
    """The seconds of ticks that learn, and of those that do not."""
    module = Sleeper(FORWARD_S[rank], 1000)
    stream = stream_of(module, rank, 4, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    x, seconds = torch.ones(1, 8), ([], [])
    for taken, learns, num in ((seconds[0], True, 15), (seconds[1], False, 20)):
        for _ in range(num):
            start = time.perf_counter()
            stream.push(x, target=x, learn=learns)
            taken.append(time.perf_counter() - start)
        stream.drain(learn=learns)
    stream.close()
    return seconds[0][7:], seconds[1][7:]


def test_a_tick_takes_as_long_as_the_slowest_stage() -> None:
    """A backward takes two forwards' time. Noise only adds to a tick, so the best of some runs counts."""
    learned, pushed = 3 * max(FORWARD_S), max(FORWARD_S)
    for _ in range(4):
        medians = [[statistics.median(one) for one in seconds] for seconds in run_ranks(sleeping, 4)]
        slowest = medians[FORWARD_S.index(max(FORWARD_S))]  # a faster one may be on its way to catch up
        assert slowest[0] >= 0.97 * learned and slowest[1] >= 0.97 * pushed, medians
        if all(one[0] <= 1.05 * learned and one[1] <= 1.05 * pushed for one in medians):
            return
    raise AssertionError(medians)


# What a stream does not take.


def test_what_a_stream_does_not_take() -> None:
    module = nn.Linear(2, 2)
    loopback = bpipe.Loopback(2)
    stage = bpipe.PipelineStage(module, 0, 1, "cpu")
    for given, options, words in (
        (bpipe.PipelineStage(module, 0, 2, "cpu", group=loopback.rank(0)), {}, "start a process for each"),
        (bpipe.PipelineStage(module, 0, 2, "cpu"), {}, "torch.distributed is not initialised"),
        (bpipe.PipelineStage(module, 0, 3, "cpu", skips={"a": (0, 2)}), {}, "with skips"),
        (bpipe.PipelineStage(module, 0, 2, "cpu", directions=2), {}, "with two directions"),
        (bpipe.PipelineStage(module, 0, 1, "cpu", dw_builder=lambda: lambda: None), {}, "with a dw_builder"),
        (module, {}, "needs a PipelineStage"),
        (stage, {"loss_fn": 3}, "loss_fn=3"),
        (stage, {"loss_fn": F.mse_loss, "optimizer": 3}, "optimizer=3"),
        (stage, {"optimizer": torch.optim.SGD(module.parameters())}, "would never step"),
        (stage, {"options": bpipe.Options(parts=2)}, "Stream does not use parts"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            bpipe.Stream(given, **options)


def test_a_call_inside_another() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    stream = bpipe.Stream(bpipe.PipelineStage(module, 0, 1, "cpu"), F.mse_loss)
    handle = module.register_forward_hook(lambda *_: stream.push(x, target=x))
    with pytest.raises(PipelineBrokenError, match=r"push\(\) or drain\(\) was called inside another tick"):
        stream.push(x, target=x)
    handle.remove()
    stream.close()


def test_a_stream_of_one_stage() -> None:
    """Without processes: a plain loop, whose errors and misuse have names."""
    module, x = nn.Linear(2, 2), torch.randn(3, 2)
    stream = bpipe.Stream(bpipe.PipelineStage(module, 0, 1, "cpu"), F.mse_loss)
    assert torch.equal(stream.push(x, target=x), module(x).detach()) and stream.drain() == []
    found = [one.clone() for one in gradients(module)]
    stream.push(x, target=x)
    assert all(torch.equal(one, 2 * once) for one, once in zip(gradients(module), found)) and stream.num_ticks == 2
    with pytest.raises(ConfigurationError, match="no target on the last stage"):
        stream.push(x)
    with pytest.raises(PipelineBrokenError, match=r"tick 2 \(ConfigurationError: .*close\(\) this stream and build a new one"):
        stream.push(x, target=x)
    stream.close()
    with pytest.raises(PipelineBrokenError, match="this pipeline broke"):
        stream.drain()


def last_loss(rates: list[float], *, is_one_process: bool, is_single: bool) -> float:
    """The mean of the last losses of the example's stages, with independent samples."""
    torch.manual_seed(0)
    module = runpy.run_path(str(EXAMPLE))
    stages = [module["Block"]() for _ in rates]
    axes, speeds = torch.randn(2, module["BATCH"], module["WIDTH"]), (1 + torch.rand(module["BATCH"])) / 100
    optimizers = [torch.optim.SGD(stage.parameters(), lr=rate) for stage, rate in zip(stages, rates)]
    numbers = torch.Generator().manual_seed(1)
    ticks = []
    for _ in range(module["NUM_TICKS"]):
        when, which = (int(torch.randint(most, (), generator=numbers)) for most in (100_000, module["BATCH"]))
        x, y = module["sample"](when, axes, speeds)
        ticks.append(Tick(*(one[which : which + 1] if is_single else one for one in (x, y))))
    if is_one_process:
        model, losses = nn.Sequential(*stages), list[float]()
        for tick in ticks:
            model.zero_grad()
            loss = F.mse_loss(model(tick.words), tick.target)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
    else:
        in_tuples = [nn.Sequential(stage, InTuple()) for stage in stages[:-1]]
        losses = [float(loss) for _, loss in alone([*in_tuples, stages[-1]], optimizers, F.mse_loss, ticks) if loss is not None]
    return sum(losses[-100:]) / 100


class InTuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


def test_independent_samples_teach_the_last_stage_only() -> None:
    stream, frozen = (last_loss(rates, is_one_process=False, is_single=False) for rates in ([0.1] * 4, [0.0, 0.0, 0.0, 0.1]))
    assert stream > 0.9 * frozen  # what the others learn is of no use
    assert stream > 8 * last_loss([0.1] * 4, is_one_process=True, is_single=False)
    diverged = last_loss([0.1] * 4, is_one_process=False, is_single=True)
    assert diverged > 10 and last_loss([0.1] * 4, is_one_process=True, is_single=True) < 0.1
