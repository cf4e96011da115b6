"""Training over replicas that come and go: the gradients of one process, whoever ends in mid-step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.errors import (
    BPipeError,
    CommError,
    ConfigurationError,
    PipelineBrokenError,
    RankFailedError,
    StageError,
    TransferTimeoutError,
)
from bpipe.relaxed import Routes
from bpipe.relaxed.attendance import Attendance
from bpipe.relaxed.compression import decode, encode
from bpipe.relaxed.paths import paths_of
from bpipe.relaxed.replica_sums import Replicas, givers_of
from bpipe.relaxed.throughputs import Throughputs
from tests.patience import PATIENCE_S, ended, until
from tests.relaxed.runs import KILLED, Block, M, alone, batch, loss_fn, run, train, wait_for_newcomers
from tests.schedules.shape_of_plan import shape_of

NUM_STEPS = 5


def end_once(store: Any, name: str) -> None:
    """End this process, but not the one that is started in its place."""
    if store.add(f"test/{name}", 1) == 1:
        os._exit(KILLED)


def one_ends(seat: int, store: Any) -> dict[str, Any]:
    """The second replica of stage 0 ends in a forward of step 1; after a step without it, the others wait until it is back."""

    def then(routes: Routes, where: str) -> None:
        if where == "forward" and seat == 2 and routes.num_steps == 1:
            end_once(store, "killed")
        if where == "between steps" and routes.num_steps == 3 and len(routes.seats) < 6:
            wait_for_newcomers(routes)

    return train(seat, store, NUM_STEPS, then)


def test_a_rank_ends_in_mid_step_and_comes_back() -> None:
    """The step's gradient is the undisturbed one, within the same call; who comes back goes on where the others are."""
    results = run(one_ends, 6, restarts=True)
    curve, gradients = alone(NUM_STEPS)
    back = results[2]["first"]
    assert 2 <= back < NUM_STEPS
    for seat, found in results.items():
        assert found["first"] == (back if seat == 2 else 0)
        assert all(abs(loss - curve[step]) < 1e-12 for step, loss in found["curve"].items())
        for mine, other, expected in zip(found["gradients"], results[seat % 2]["gradients"], gradients[seat % 2]):
            assert torch.equal(mine, other)  # of another replica
            assert torch.allclose(mine, expected, rtol=0, atol=1e-12)
    assert results[0]["attempts"] == {step: 1 + (step == 1) for step in range(NUM_STEPS)}
    assert results[0]["seats"] == {step: [0, 1, 3, 4, 5] if 1 <= step < back else [*range(6)] for step in range(NUM_STEPS)}


def gradient_of_the_lost_step(seat: int, store: Any) -> list[torch.Tensor]:
    """Two steps are added up, and a rank ends in the backward of the second one."""
    block = Block(seat % 2)
    stage = bpipe.PipelineStage(block, seat % 2, 2)
    routes = Routes(stage, M, loss_fn, replica=seat // 2, num_replicas=2, store=store, options=bpipe.Options(timeout_s=20))
    block.then = lambda where: os._exit(KILLED) if (seat, where, routes.num_steps) == (3, "backward", 1) else None
    for step in range(2):
        inputs, targets = batch(step)
        routes.step(inputs, target=targets)
    routes.close()
    return [parameter.grad for parameter in block.parameters()]


def test_gradients_of_earlier_steps_outlive_an_attempt() -> None:
    results = run(gradient_of_the_lost_step, 4)
    assert sorted(results) == [0, 1, 2]
    model = nn.Sequential(Block(0), Block(1))
    for step in range(2):
        inputs, targets = batch(step)
        loss_fn(model(inputs), targets).backward()
    for seat, gradients in results.items():
        for mine, parameter in zip(gradients, model[seat % 2].parameters()):
            assert torch.allclose(mine, parameter.grad, rtol=0, atol=1e-12)


def left_alone(seat: int, store: Any) -> str:
    """The only replica of stage 1 ends."""

    def then(routes: Routes, where: str) -> None:
        if seat == 1 and routes.num_steps == 1:
            os._exit(KILLED)

    with pytest.raises(PipelineBrokenError) as caught:
        train(seat, store, 3, then, num_replicas=1)
    return str(caught.value)


def test_the_last_replica_of_a_stage_ends() -> None:
    (text,) = run(left_alone, 2).values()
    assert text.startswith("stage 1 has lost its last replica, and its weights with it; what is left: replica 0 of stage 0. Load")


def raising(seat: int, store: Any) -> str:
    def then(routes: Routes, where: str) -> None:
        if (seat, where, routes.num_steps) == (3, "forward", 1):
            raise KeyError("mine")

    with pytest.raises((RankFailedError, KeyError)) as caught:
        train(seat, store, 3, then, num_replicas=2)
    return type(caught.value).__name__


def test_an_error_of_the_user_is_raised_on_all_ranks() -> None:
    """It would be raised again by whoever gets the microbatch."""
    assert run(raising, 4) == {0: "RankFailedError", 1: "RankFailedError", 2: "RankFailedError", 3: "KeyError"}


def leaving(seat: int, store: Any) -> list[list[int]]:
    found = train(seat, store, 1 if seat == 3 else 3, num_replicas=2)
    return list(found["seats"].values())


def test_who_leaves_is_done_without() -> None:
    assert run(leaving, 4)[0] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]


class Sleeping(nn.Linear):
    """A stage that takes its time, and whose parameters play no part at first."""

    def __init__(self, seconds: float) -> None:
        super().__init__(2, 2, dtype=torch.float64)
        self.seconds, self.is_used = seconds, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x) if self.is_used else super().forward(x).detach()


def at_two_speeds(seat: int, store: Any, seconds: float) -> dict[str, Any]:
    """The first replica of stage 0 is three times as slow as all others. Without seconds that is only told."""
    module, learn = Sleeping(seconds * (1 if seat else 3)), Throughputs.learn
    if not seconds:
        Throughputs.learn = lambda self, measured: learn(self, {seat: 1 if seat else 1 / 3 for seat in measured})  # type: ignore
    stage = bpipe.PipelineStage(module, seat % 2, 2)
    routes = Routes(stage, 16, loss_fn, replica=seat // 2, num_replicas=2, store=store, options=bpipe.Options(timeout_s=60))
    for step in range(7):
        module.zero_grad()
        module.is_used = seat % 2 == 1 or step == 6
        routes.step(torch.arange(32, dtype=torch.float64).view(16, 2), target=torch.ones(16, 2, dtype=torch.float64))
    assert routes.plan is not None
    paths = shape_of(routes.plan).paths
    routes.close()
    return {"paths": paths, "weights": module.state_dict(), "gradients": [one.grad for one in module.parameters()]}


def test_a_slow_replica_gets_less() -> None:
    paths = run(partial(at_two_speeds, seconds=0.01), 4)[0]["paths"]
    assert 2 <= sum(path[0] == 0 for path in paths) <= 6


def test_what_is_known_of_a_slow_replica_is_acted_upon() -> None:
    """Paths then cross replicas, and messages are learned anew; also later, where an output needs a gradient for the first time."""
    results = run(partial(at_two_speeds, seconds=0.0), 4)
    paths = results[0]["paths"]
    assert sum(path[0] == 0 for path in paths) == 4
    assert len(set(paths)) > 2
    model = nn.Sequential(Sleeping(0), Sleeping(0))
    for seat, block in enumerate(model):
        block.load_state_dict(results[seat]["weights"])
        block.is_used = True
    loss_fn(model(torch.arange(32, dtype=torch.float64).view(16, 2)), torch.ones(16, 2, dtype=torch.float64)).backward()
    for seat, found in results.items():
        for mine, parameter in zip(found["gradients"], model[seat % 2].parameters()):
            assert torch.allclose(mine, parameter.grad, rtol=1e-12, atol=1e-12)


def in_8_bits(seat: int, store: Any) -> tuple[list[float], list[torch.Tensor]]:
    block = Block(seat)
    stage = bpipe.PipelineStage(block, seat, 2)
    routes = Routes(stage, M, loss_fn, replica=0, num_replicas=1, store=store, options=bpipe.Options(timeout_s=20), compress=4)
    found = []
    for step in range(2):
        losses: list[torch.Tensor] = []
        inputs, targets = batch(step)
        block.zero_grad()
        routes.step(inputs, target=targets, losses=losses)
        found.append(sum(map(float, losses)) / M)
    routes.close()
    return found, [parameter.grad for parameter in block.parameters()]


class Rounded(torch.autograd.Function):
    """What a message in 8 bits makes of a tensor, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        decode(*encode(x, 4), 4, out := torch.empty_like(x))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Rounded.forward(ctx, gradient.contiguous())


def test_messages_in_8_bits_train_as_if_they_were_rounded() -> None:
    """Both ways, and nothing else is rounded."""
    results = run(in_8_bits, 2)
    blocks = [Block(0), Block(1)]
    for step in range(2):
        total = torch.zeros((), dtype=torch.float64)
        [block.zero_grad() for block in blocks]
        for x, y in zip(*(each.chunk(M) for each in batch(step))):
            loss = loss_fn(blocks[1](Rounded.apply(blocks[0](x))), y) / M
            loss.backward()
            total += loss.detach()
        assert all(abs(found[step] - float(total)) < 1e-12 for found, _ in results.values())
    for seat, (_, gradients) in results.items():
        for mine, parameter in zip(gradients, blocks[seat].parameters()):
            assert torch.allclose(mine, parameter.grad, rtol=0, atol=1e-12)


# Meetings, in threads of one process


def attendances(num_seats: int, timeout_s: float, store: Any = None) -> list[Attendance]:
    store = dist.HashStore() if store is None else store
    return [Attendance(store, seat, 2, num_seats, timeout_s) for seat in range(num_seats)]


def meet(them: list[Attendance], **how: Any) -> None:
    threads = [threading.Thread(target=one.meet, kwargs=how) for one in them]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_who_does_not_come_to_the_first_meeting_is_named() -> None:
    with pytest.raises(TransferTimeoutError, match="of stage 0 waits for replica 0 of stage 1, replica 1 of stage 0 in vain"):
        attendances(3, timeout_s=0.2)[0].meet()


def test_others_meet_without_who_is_late() -> None:
    them = attendances(4, timeout_s=PATIENCE_S)
    meet(them)
    assert [one.seats for one in them] == [[0, 1, 2, 3]] * 4
    meet(them[:3], lost={3})
    assert [(one.number, one.seats) for one in them[:3]] == [(2, [0, 1, 2])] * 3
    for one in them:
        one._timeout_s = 1.0
    begin = time.monotonic()
    meet(them[:2])  # nobody knows of the third
    assert [(one.number, one.seats) for one in them[:2]] == [(3, [0, 1])] * 2
    assert time.monotonic() - begin > 0.9
    with pytest.raises(TransferTimeoutError, match="for replica 0 of stage 0, replica 0 of stage 1 to begin their next step"):
        them[2].meet()  # who was left out takes part again when the others meet, and they do not


def test_newcomers_take_part_in_the_next_meeting() -> None:
    store = dist.HashStore()
    first = attendances(2, PATIENCE_S, store)
    meet(first)
    assert not first[0].has_newcomers()
    again = attendances(2, PATIENCE_S, store)[1]  # another process of the same seat
    joining = threading.Thread(target=again.meet)
    joining.start()
    until(first[0].has_newcomers, "a newcomer announces itself")
    first[0].meet(lost={1})
    ended(joining)
    assert first[0].seats == again.seats == [0, 1]
    assert first[0].number == again.number == 2
    assert not first[0].has_newcomers()
    assert not again.has_newcomers()


class LateReads:
    """A store whose answers take a while, as over a slow link."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> Any:
        time.sleep(0.2)
        return self._store.get(key)


def test_a_slow_answer_of_the_store_holds_nobody_up() -> None:
    """What one process reads is not deleted by another one meanwhile: a store waits for keys that are not there."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=3))
    first = attendances(3, PATIENCE_S, store)
    meet(first)
    again = attendances(3, PATIENCE_S, store)[2]
    first[1].store = LateReads(first[1].store)
    joining = threading.Thread(target=again.meet)
    joining.start()
    until(first[0].has_newcomers, "a newcomer announces itself")
    meet(first[:2], lost={2})
    ended(joining)
    assert [one.seats for one in (*first[:2], again)] == [[0, 1, 2]] * 3


def request_fails(seat: int, store: Any) -> dict[str, Any]:
    """One request of the last rank to the store fails, in step 1."""
    look = Attendance.has_newcomers

    def looks(self: Attendance) -> bool:
        if seat == 3 and store.add("test/looks", 1) == 2:
            raise CommError("the store does not answer")
        return look(self)

    Attendance.has_newcomers = looks  # type: ignore[method-assign]
    return train(seat, store, 3, num_replicas=2)


def test_a_request_to_the_store_that_fails_on_one_rank_ends_no_run() -> None:
    curve, _ = alone(3)
    for one in run(request_fails, 4).values():
        assert list(one["curve"].values()) == pytest.approx(curve, rel=1e-10)


def is_late_in_the_sum(seat: int, store: Any) -> list[list[int]]:
    """Who took part in each of three steps of a single stage; a replica adds gradients up when the other one has gone on."""
    add_up = Replicas.add_up

    def adds_up(self: Replicas, parameters: Any) -> None:
        if seat == 1 and store.add("test/sums", 1) == 2:
            until(lambda: store.check(["test/went on"]), "a replica that is late in the sum is not waited for")
        add_up(self, parameters)

    Replicas.add_up = adds_up  # type: ignore[method-assign]
    block, seen = Block(0), []
    routes = Routes(
        bpipe.PipelineStage(block, 0, 1),
        M,
        loss_fn,
        replica=seat,
        num_replicas=2,
        store=store,
        options=bpipe.Options(timeout_s=2.0),
    )
    for step in range(routes.join(), 3 - seat):
        inputs, targets = batch(step)
        routes.step(inputs, target=targets)
        seen.append(routes.seats)
        if seat == 0 and step == 1:
            store.set("test/went on", "")
        if seat == 1 and step == 0:
            with suppress(BPipeError):  # the other one goes on without this one
                routes.step(inputs, target=targets)
            break
    routes.close()
    return seen


def test_a_replica_that_is_late_in_the_sum_is_not_waited_for_without_limit() -> None:
    _, late, last = run(is_late_in_the_sum, 2)[0]
    assert late == last == [0]


def test_a_step_is_complete_on_all_ranks_or_on_none() -> None:
    """Who comes first decides, and later steps do not see it."""
    one, other = attendances(2, timeout_s=PATIENCE_S)
    meet([one, other])
    assert [one.settle(3, "found"), other.settle(3, "")] == ["found", "found"]
    assert [other.settle(4, ""), one.settle(4, "found")] == ["", ""]
    assert [other.settle(5, "more"), one.settle(5, "")] == ["more", "more"]
    assert [one.settle(6, "last"), one.settle(7, ""), other.settle(6, "")] == ["last", "", "last"], "it is not forgotten too early"


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"replica": 2}, "replica=2: with 2 replicas it is 0 to 1"),
        ({"in_flight": 0}, "in_flight=0: give a positive number"),
        ({"options": bpipe.Options(slots=3)}, "Routes does not use slots"),
        ({"n_microbatches": 0}, "n_microbatches=0"),
        ({"compress": 0}, "compress=0"),
        ({"stage": bpipe.PipelineStage(nn.Linear(2, 2), 0, 4, directions=2)}, "without group, directions and skips"),
        ({"stage": bpipe.PipelineStage(nn.Linear(2, 2), 0, 1, device="meta")}, "runs on CPU, over gloo, so far"),
    ],
)
def test_bad_input(how: dict[str, Any], match: str) -> None:
    given = {"stage": bpipe.PipelineStage(nn.Linear(2, 2), 0, 1), "n_microbatches": 4, "loss_fn": loss_fn, "replica": 0} | how
    with pytest.raises(ConfigurationError, match=match):
        Routes(**given, **{"num_replicas": 2, "store": dist.HashStore()})


def test_who_gives_its_state() -> None:
    assert givers_of([0, 1, 2, 3], {2, 3}, 2, 7) == {0: 2, 1: 3}
    assert givers_of([0, 1, 2, 3], {1}, 2, 0) == {0: 0, 1: 1}, "before the first step those of the first replicas do"
    with pytest.raises(PipelineBrokenError, match="no replica of stage 1 has its weights after step 7"):
        givers_of([0, 1, 2], {0, 2}, 2, 7)


def test_throughputs() -> None:
    speeds = Throughputs(2, 6)
    assert speeds.table([0, 1, 2, 3]) == [[1, 1], [1, 1], [0, 0]]
    speeds.learn({0: 2.0, 2: 4.0})
    assert speeds.table(range(6)) == [[2, 3], [4, 3], [3, 3]]
    speeds.learn({0: 4.0})
    assert speeds.known[0] == 2.6
    alike = paths_of(12, [[1, 1]] * 3)
    assert Throughputs(2, 6).better_paths(alike, range(6)) is None
    better = speeds.better_paths(alike, range(6))
    assert better is not None
    assert [sum(path[0] == seat for path in better) for seat in (0, 2, 4)] == [3, 5, 4]
    assert {path[0] for path in speeds.better_paths(alike, [0, 1, 3, 4]) or ()} == {0, 4}, "nothing is dealt to who is not there"


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(StageError, match="is sparse"):
        Replicas(bpipe.Loopback(1).rank(0), 0, [0, 1]).add_up(list(embedding.parameters()))


# Ten ends at random


def ten_end(seat: int, store: Any) -> dict[str, Any]:
    """Whoever is next on the list ends at its place, once all are there again."""
    random = Random(7)
    where = ["forward", "backward", "between steps"]
    places = [(random.randrange(6), random.choice(where), random.randrange(4)) for _ in range(10)]
    seen = dict.fromkeys(where, 0)
    store.add("test/began", 1)

    def then(routes: Routes, where: str) -> None:
        number = store.add("test/ended", 0)
        seen[where] += 1
        if where == "between steps" and len(routes.seats) < 6:
            wait_for_newcomers(routes, lambda: store.add("test/began", 0) >= 6 + store.add("test/ended", 0))
        if number < len(places) and len(routes.seats) == 6 and routes.num_steps >= 3 * number:
            victim, place, passed = places[number]
            if (seat, where) == (victim, place) and (where == "between steps" or seen[where] % 4 == passed):
                store.add("test/ended", 1)
                os._exit(KILLED)

    return {**train(seat, store, 100, then), "ended": store.add("test/ended", 0)}


def test_ten_end_at_random_and_come_back() -> None:
    results = run(ten_end, 6, restarts=True, timeout_s=200)
    curve, _ = alone(100)
    found = results[0]["curve"]
    assert results[0]["ended"] == 10
    assert len(found) + results[0]["first"] == 100
    merged: dict[int, float] = {}
    for one in results.values():
        merged |= one["curve"]
    assert max(abs(loss - curve[step]) for step, loss in merged.items()) < 1e-10


def test_a_torchrun_for_each_rank_starts_it_again() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    how = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "1", "--max-restarts", "1", "-m", "tests.relaxed.job")
    environment = {**os.environ, "PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *how]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [subprocess.Popen(command, env={**environment, "SEAT": str(seat)}, text=True, **output) for seat in range(4)]
    printed = []
    for one in ranks:
        with one:
            try:
                printed.append(one.communicate(timeout=250)[0])
            finally:
                one.terminate()
    assert [one.returncode for one in ranks] == [0] * 4, printed
    found = [re.search(r"restarted (\d) times, (\d) steps: exact", text) for text in printed]
    assert all(found) and [one[1] for one in found if one] == ["0", "0", "1", "0"], printed
    assert found[0] and found[2] and found[0][2] == "8" and int(found[2][2]) < 6
