"""Evictors that copy into the memory of another rank's device by themselves: the bits and bytes of the other way, and no races."""

from __future__ import annotations

import os
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.comm.health.activity import Activity
from bpipe.device.handles import OpenedMemory
from bpipe.engine.remembered import Memory
from bpipe.errors import CommError, RankFailedError, RankLostError, TransferError
from bpipe.memory.device_buffers import ALIGNED, DevicePeerMemory, LentBuffers
from bpipe.plan.reserved import Reserved
from bpipe.schedules import Purpose
from tests.accelerator.device import KIND, MODULE, reports, simulator, unordered
from tests.accelerator.work import RULES, StruckError, batch_of, linked, modules_of, results_of
from tests.over import Over
from tests.patience import PATIENCE_S, too_late
from tests.ranks import run_ranks

MICROBATCHES, STEPS = 8, 3
BOTH = "both"  # devices, in turn
FIRST, SECOND = (0, 1, 0), (0, 2, 0)
BYTES = ("peak_bytes", "predicted_peak_bytes", "evicted_bytes", "remote_buffer_bytes", "device_peak_bytes")

pytestmark = [pytest.mark.skipif(KIND != "cuda", reason="only CUDA has such handles"), pytest.mark.usefixtures("one_thread")]


def begun(rank: int, nccl: bool, variables: dict[str, str]) -> list[str]:
    """Prepare a rank; return what bpipe is going to warn of."""
    from bpipe.comm.transport import c10d
    from tests.accelerator import nccl as transports

    os.environ.update(variables)
    said: list[str] = []
    transports.install(nccl=nccl)
    simulator.configure(True, 1000, 0.2, rank)
    c10d.LOG.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign, assignment]
    return said


def travels(schedule: Any) -> dict[str, int]:
    """How a rank's evictions travel: what it lends and borrows, whom it serves, and the connections for them beside headers."""
    transport, memory = schedule.session.context.transport, schedule.session.context.memory
    connected = transport._gloo if transport._communicators is None else transport._communicators._made
    return {
        "lent": sum(isinstance(one, LentBuffers) for one in memory.remote_buffers.values()),
        "borrowed": sum(isinstance(one, DevicePeerMemory) for one in memory.stores.values()),
        "served": len(memory.served()),
        "connected": sum(one.purpose in (Purpose.EVICT, Purpose.RETURN) for one in connected),
    }


def schedule_of(rule: Any, rank: int, module: nn.Module, num_ranks: int, device: str) -> Any:
    stage = bpipe.PipelineStage(module.to(device), rank, num_ranks, device)
    return rule(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=60))


def trained(rank: int, name: str, device: str, num_ranks: int, nccl: bool, variables: dict[str, str]) -> tuple[Any, ...]:
    """One rank: its gradients and buffers, its bytes by step, how its evictions travel, what is said, what the checker reports."""
    said = begun(rank, nccl, variables) if device != "cpu" else []
    if device == BOTH:
        device = f"{KIND}:{rank % 2}"
        MODULE.set_device(rank % 2)
    module = modules_of(num_ranks)[rank].to(device)
    schedule = schedule_of(RULES[name], rank, module, num_ranks, device)
    seen = []
    for step in range(STEPS):
        x = batch_of(step, MICROBATCHES).to(device) * 1
        if device != "cpu":
            MODULE.synchronize()
            MODULE.reset_peak_memory_stats()
        schedule.step(x, target=x, return_outputs=False)
        seen.append({name: schedule.stats[name] for name in BYTES})
    found, how = results_of([module]), travels(schedule)
    how["allocated"] = 0 if device == "cpu" else MODULE.max_memory_allocated()
    schedule.close()
    return found, seen, how, said, reports()


@pytest.mark.parametrize(
    ("name", "num_ranks", "nccl"),
    [(name, num_ranks, nccl) for name, num_ranks in (("bytes", 4), ("parts", 4)) for nccl in (True, False)],
)
def test_a_step_is_the_same(name: str, num_ranks: int, nccl: bool) -> None:
    expected = run_ranks(trained, num_ranks, name, "cpu", num_ranks, nccl, {})
    without = run_ranks(trained, num_ranks, name, KIND, num_ranks, nccl, {"BPIPE_SHARED_MEMORY": "0"})
    ranks = run_ranks(trained, num_ranks, name, KIND, num_ranks, nccl, {})
    for (found, seen, how, said, reported), (_, as_seen, otherwise, _, _), (same, *_) in zip(ranks, without, expected):
        assert len(found) == len(same) and all(map(torch.equal, found, same))
        assert not reported and not said
        assert seen == as_seen
        assert all(one["peak_bytes"] == one["predicted_peak_bytes"] for one in seen)

        assert how["allocated"] <= otherwise["allocated"] + 8 * ALIGNED
        assert (how["served"], how["connected"]) == (0, 0)
        assert (how["lent"], how["borrowed"]) == (otherwise["served"], bool(otherwise["connected"]) and not otherwise["served"])
    assert sum(how["lent"] for _, _, how, _, _ in ranks) > 0


def test_from_one_device_to_another() -> None:
    expected = run_ranks(trained, 4, "bytes", "cpu", 4, True, {})
    for rank, (found, _, how, _, reported) in enumerate(run_ranks(trained, 4, "bytes", BOTH, 4, True, {})):
        assert all(map(torch.equal, found, expected[rank][0])) and not reported
        assert how["borrowed"] == (rank == 0) and how["lent"] == (rank == 3)


WHY_NOT = {
    "SIMULATED_HANDLES": "cuIpcGetMemHandle says CUDA_ERROR_INVALID_VALUE",
    "SIMULATED_PEERS": "cuIpcOpenMemHandle_v2 says CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
}


@pytest.mark.parametrize("variable", WHY_NOT)
def test_what_cannot_be_lent_travels_as_before(variable: str) -> None:
    expected = run_ranks(trained, 4, "bytes", "cpu", 4, True, {})
    for rank, (found, _, how, said, reported) in enumerate(run_ranks(trained, 4, "bytes", KIND, 4, True, {variable: "0"})):
        assert all(map(torch.equal, found, expected[rank][0])) and not reported
        assert (how["lent"], how["borrowed"]) == (0, 0)
        assert [WHY_NOT[variable] in text for text in said] == [True] * (rank in (0, 3))
        assert how["connected"] == 2 * (rank in (0, 3)) and how["served"] == (rank == 3)


def tampered(rank: int, where: str) -> tuple[list[str], dict[str, int], list[str]]:
    """One rank, beside one whose reads, or writes, go astray."""
    from bpipe.memory import reach

    said = begun(rank, True, {})
    honest = reach._read_and_answered

    if where == "writes":
        reach.OpenedMemory = Astray  # type: ignore[misc, assignment]
    else:
        reach._read_and_answered = lambda handle, device, refused: honest(handle, device, refused)[::-1]
    schedule = schedule_of(RULES["bytes"], rank, modules_of(4)[rank], 4, KIND)
    for step in range(2):
        x = batch_of(step, MICROBATCHES).to(KIND)
        schedule.step(x, target=x, return_outputs=False)
    how = travels(schedule)
    schedule.close()
    return said, how, reports()


class Astray(OpenedMemory):
    """Memory that is a copy of the other process's."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        super().__init__(handle, device)
        self.memory = self.memory.clone()


@pytest.mark.parametrize(
    ("where", "why"), [("reads", "reads other bytes than there are"), ("writes", "does not see what the other one writes")]
)
def test_memory_that_is_not_the_same_is_not_used(where: str, why: str) -> None:
    for rank, (said, how, reported) in enumerate(run_ranks(tampered, 4, where)):
        assert [why in text for text in said] == [True] * (rank in (0, 3))
        assert (how["lent"], how["borrowed"]) == (0, 0) and not reported


IN_ORDER = Over(bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(measure="in_order")})


def of_slots_and_of_bytes(rank: int, device: str) -> tuple[Any, ...]:
    """One rank, whose first plan counts slots, and whose later ones count bytes, of two shapes in turn: how evictions travel."""
    if device != "cpu":
        begun(rank, True, {})
    module = modules_of(4)[rank].to(device)
    schedule, ways = schedule_of(IN_ORDER, rank, module, 4, device), []
    for step in range(6):
        x = batch_of(step, MICROBATCHES).to(device)[:, : 4 * (1 + step // 2 % 2)] * 1
        schedule.step(x, target=x, return_outputs=False)
        ways.append(travels(schedule))
    found = results_of([module])
    schedule.close()
    return found, ways, reports()


def test_plans_that_replace_each_other() -> None:
    expected = run_ranks(of_slots_and_of_bytes, 4, "cpu")
    for rank, (found, ways, reported) in enumerate(run_ranks(of_slots_and_of_bytes, 4, KIND)):
        assert all(map(torch.equal, found, expected[rank][0])) and not reported
        if rank in (0, 3):
            assert [way["lent"] + way["borrowed"] for way in ways] == [0, *[1] * 5]
            assert [way["connected"] for way in ways] == [2] * 6


WIDE = (1, 1, 1, 2, 2, 1)  # how long the sequences of each step are


def counting_slots(rank: int, device: str, num_ranks: int, nccl: bool, variables: dict[str, str]) -> tuple[Any, ...]:
    """One rank whose plan counts slots, with stages in another order: its results, bytes and ways by step, and reports."""
    said = begun(rank, nccl, variables) if device != "cpu" else []
    index = (rank + 1) % num_ranks
    module = modules_of(num_ranks)[index].to(device)
    schedule = schedule_of(RULES["balanced_1f1b"], index, module, num_ranks, device)
    buffers, on_host, ways = [], [], []
    for step, wide in enumerate(WIDE):
        x = batch_of(step, MICROBATCHES).to(device)[:, : 4 * wide] * 1
        schedule.step(x, target=x, return_outputs=False)
        schedule.eval(x)
        buffers.append(schedule.stats["remote_buffer_bytes"])
        on_host.append(schedule.stats["host_peak_bytes"])
        ways.append(travels(schedule))
    found = results_of([module])
    schedule.close()
    return found, buffers, on_host, ways, said, reports()


@pytest.mark.parametrize(("num_ranks", "nccl"), [(4, True), (4, False), (6, True)])
def test_a_plan_of_slots_lends_what_the_steps_before_have_taken(num_ranks: int, nccl: bool) -> None:
    expected = run_ranks(counting_slots, num_ranks, "cpu", num_ranks, nccl, {})
    without = run_ranks(counting_slots, num_ranks, KIND, num_ranks, nccl, {"BPIPE_SHARED_MEMORY": "0"})
    ranks = run_ranks(counting_slots, num_ranks, KIND, num_ranks, nccl, {})
    evictors = acceptors = 0
    for (found, buffers, on_host, ways, said, reported), (_, served, _, as_ever, *_), (same, *_) in zip(ranks, without, expected):
        assert all(map(torch.equal, found, same)) and not reported and not said
        serves, evicts = as_ever[0]["served"], bool(as_ever[0]["connected"]) and not as_ever[0]["served"]
        assert [(way["lent"], way["borrowed"], way["served"]) for way in ways] == [(0, 0, serves), *[(serves, evicts, 0)] * 5]
        assert [way["connected"] for way in ways] == [2 * (serves or evicts)] * 6
        # Before the step whose sequences are longer nothing is known of them, and they stay on the host.
        assert buffers == [served[0], *[served[1]] * 3, *[served[5]] * 2]
        assert [size > 0 for size in on_host] == [False, False, False, evicts, False, False]
        evictors, acceptors = evictors + evicts, acceptors + serves
    assert evictors == acceptors > 0


def reserving(rank: int, name: str) -> list[int]:
    """How often one rank reserves its buffers, by step."""
    begun(rank, True, {})
    numbers, reserve = [0], Memory.reserve

    def counted(self: Memory, *what: Any) -> None:
        numbers[-1] += 1
        reserve(self, *what)

    Memory.reserve = counted  # type: ignore[method-assign]
    schedule = schedule_of(RULES[name], rank, modules_of(4)[rank], 4, KIND)
    for step in range(4):
        x = batch_of(step, MICROBATCHES).to(KIND)
        schedule.step(x, target=x, return_outputs=False)
        numbers.append(0)
    schedule.close()
    return numbers[:-1]


@pytest.mark.parametrize(("name", "often"), [("balanced_1f1b", [1, 1, 0, 0]), ("bytes", [2, 0, 0, 0])])
def test_buffers_are_made_anew_only_for_what_has_grown(name: str, often: list[int]) -> None:
    assert run_ranks(reserving, 4, name) == [often] * 4


class SometimesMore(nn.Module):
    """Saves more than the measured microbatches once it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.saves_more = inner, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return x.tanh().sin().cos() if self.saves_more else x.tanh()


def larger_than_planned(rank: int, device: str) -> tuple[Any, ...]:
    """One rank: its results, how many of its evictions stayed on the host, and what the checker reports."""
    stayed: list[int] = []
    if device != "cpu":
        begun(rank, True, {})
        from bpipe.memory import device_buffers

        pinned = device_buffers.pinned
        device_buffers.pinned = lambda *how: (stayed.append(how[0]), pinned(*how))[1]  # type: ignore[func-returns-value]
    module = SometimesMore(modules_of(4)[rank]).to(device)
    schedule = schedule_of(RULES["bytes"], rank, module, 4, device)
    numbers = []
    for step in range(5):
        module.saves_more = step == 2
        x = batch_of(step, MICROBATCHES).to(device) * 1
        schedule.step(x, target=x, return_outputs=False)
        numbers.append(len(stayed))
    found = results_of([module])
    schedule.close()
    return found, numbers, reports()


def test_what_does_not_fit_stays_on_the_host() -> None:
    expected = run_ranks(larger_than_planned, 4, "cpu")
    for rank, (found, numbers, reported) in enumerate(run_ranks(larger_than_planned, 4, KIND)):
        assert all(map(torch.equal, found, expected[rank][0])) and not reported
        assert (
            numbers[:2] == [0, 0] and (numbers[2] > 0) == (rank == 0) and numbers[2:] == [numbers[2]] * 3
        )  # the host's memory is reused, and a new plan follows


def struck(rank: int, at: int, how: str) -> tuple[Any, ...]:
    """One rank, of which one ends or raises in its second step with memory lent: the error, its seconds, and what is left."""
    begun(rank, True, {})
    module = modules_of(4)[rank].to(KIND)
    schedule = schedule_of(RULES["bytes"], rank, module, 4, KIND)
    for step in range(2):
        x = batch_of(step, MICROBATCHES).to(KIND)
        schedule.step(x, target=x, return_outputs=False)
    lends = travels(schedule)["lent"]
    calls = count(1)

    def strike(*_: object) -> None:
        if next(calls) == 5:
            os._exit(9) if how == "ends" else raise_()

    if rank == at:
        module.register_forward_pre_hook(strike)
    began = time.monotonic()
    with pytest.raises((RankFailedError, RankLostError, StruckError)) as caught:
        schedule.step(x, target=x, return_outputs=False)
    seconds = time.monotonic() - began
    schedule.close()
    del x, caught
    module.zero_grad()
    until = time.monotonic() + PATIENCE_S
    while (left := [one.name for one in threading.enumerate() if one.name in ("bpipe-lent", "bpipe-borrowed")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.01)
    return lends, seconds, left, [one for one in unordered() if "reuse" in one or "race" in one]


def raise_() -> None:
    raise StruckError


@pytest.mark.parametrize("how", ["ends", "raises"])
@pytest.mark.parametrize("at", [0, 3], ids=["the evictor", "the acceptor"])
def test_nothing_is_left_of_a_step_that_failed(at: int, how: str) -> None:
    found = run_ranks(struck, 4, at, how, expect_errors=True)
    for rank, one in enumerate(found):
        if rank == at and how == "ends":
            assert "died without a word" in str(one)
            continue
        lends, seconds, left, reported = one
        assert seconds < PATIENCE_S, too_late("an error")
        assert lends == (rank == 3) and not left and not reported
    assert not [name for name in os.listdir("/dev/shm") if "bpipe" in name]


def traced(rank: int, folder: Path) -> None:
    begun(rank, True, {})
    schedule = schedule_of(RULES["bytes"], rank, modules_of(4)[rank], 4, KIND)
    x = batch_of(0, MICROBATCHES).to(KIND)
    schedule.step(x, target=x, return_outputs=False)
    with bpipe.trace(schedule, folder):
        schedule.step(x, target=x, return_outputs=False)
    schedule.close()


def test_a_trace_shows_the_evictor_s_times_in_the_acceptor_s_lane(tmp_path: Path) -> None:
    run_ranks(traced, 4, tmp_path / "trace")
    (timeline,) = bpipe.load_trace(tmp_path / "trace")
    assert len(list(timeline.served_spans(3))) == len(timeline.plan.served[3]) > 0


def given_back(rank: int, how: str) -> tuple[list[int], list[str]]:
    """Rank 0 lends memory to rank 1, which stores and loads after it was asked for it: the bytes that rank 0 has lent meanwhile."""
    simulator.configure(True, 500, 0.3, rank)
    link, activity, device = linked(rank), Activity(), torch.device(KIND, 0)
    reserved, lent_bytes = Reserved((1000, 3000), {FIRST: 0, SECOND: 1}), []
    if rank == 0:
        buffers = LentBuffers(reserved, device, activity)
        with buffers.offered() as lent:
            link.export_memory(lent)
        activity.step = 1
        if how == "asked for":
            buffers.recall()
        buffers.clear()
        for _ in range(2):
            link.send_text("on")
            link.receive_text()
            lent_bytes.append(buffers.num_bytes)
        link.send_text("on")
        buffers.wait()
        return [*lent_bytes, buffers.num_bytes], reports()
    peer = DevicePeerMemory(reserved, link.import_memory(1)[0], device, MODULE.Stream(), activity, "rank 0")
    for remote, size in ((FIRST, 1000), (SECOND, 2500)):
        link.receive_text()
        time.sleep(0.05)
        message, found = (torch.full((size,), value, dtype=torch.uint8, device=KIND) for value in (7, 0))
        peer.put(remote, [message]).wait()
        peer.get(remote, [found]).wait()
        assert torch.equal(found.cpu(), message.cpu())
        link.send_text("done")
    link.receive_text()
    if how == "asked for":
        activity.step = 1
    elif how == "given up":
        peer.clear()
    else:
        os._exit(0)
    for thread in [one for one in threading.enumerate() if one.name == "bpipe-borrowed"]:  # unless it has ended already
        thread.join()
    return [], reports()


@pytest.mark.parametrize("how", ["asked for", "given up", "ended"])
def test_memory_stays_until_it_is_given_back(how: str) -> None:
    acceptor, evictor = run_ranks(given_back, 2, how, expect_errors=how == "ended")
    assert acceptor == ([4000, 4000, 0], [])
    assert "died without a word" in str(evictor) if how == "ended" else evictor == ([], [])


def without_room(rank: int) -> bool:
    """Rank 0 lends less than rank 1 needs, whose host has no memory either."""
    link, activity, device = linked(rank), Activity(), torch.device(KIND, 0)
    if rank == 0:
        buffers = LentBuffers(Reserved((0,), {FIRST: 0}), device, activity)
        with buffers.offered() as lent:
            link.export_memory(lent)
        buffers.wait()
        return True
    from bpipe.memory import device_buffers

    device_buffers.available_bytes = lambda: 999
    peer = DevicePeerMemory(Reserved((0,), {FIRST: 0}), link.import_memory(1)[0], device, MODULE.Stream(), activity, "rank 0")
    peer.put(FIRST, [torch.zeros(999, dtype=torch.uint8, device=KIND)])
    with pytest.raises(CommError, match=r"microbatch 1 of stage 0: 1000 bytes .* has 999 left: .*BPIPE_SHARED_MEMORY=0"):
        peer.put(FIRST, [torch.zeros(1000, dtype=torch.uint8, device=KIND)])
    held = peer.host_bytes
    peer.clear()
    return held == 999


def test_a_host_without_memory_says_so() -> None:
    assert run_ranks(without_room, 2) == [True, True]


def is_open_in_a_child(descriptor: int) -> bool:
    child = os.fork()
    if not child:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    return bool(os.waitpid(child, 0)[1])


def leased(rank: int) -> bool:
    """Whether a rank's forked child, which may outlive it, has what tells the other rank that this one has ended."""
    link, activity, device = linked(rank), Activity(), torch.device(KIND, 0)
    reserved = Reserved((1000,), {FIRST: 0})
    if rank == 0:
        buffers = LentBuffers(reserved, device, activity)
        with buffers.offered() as lent:
            link.export_memory(lent)
        is_open = buffers._lease is None or is_open_in_a_child(buffers._lease.fileno())
        link.send_text("looked")
        buffers.wait()
        return is_open
    peer = DevicePeerMemory(reserved, link.import_memory(1)[0], device, MODULE.Stream(), activity, "rank 0")
    is_open = is_open_in_a_child(peer._borrowed.lease.fileno())
    link.receive_text()
    peer.clear()
    return is_open


def test_a_forked_child_has_no_part_of_what_is_lent() -> None:
    assert run_ranks(leased, 2) == [False, False]


def test_a_buffer_with_another_activation_is_not_loaded() -> None:
    assert all(run_ranks(overwritten, 2))


def overwritten(rank: int) -> bool:
    link, activity, device = linked(rank), Activity(), torch.device(KIND, 0)
    reserved = Reserved((1000,), {FIRST: 0, SECOND: 0})
    if rank == 0:
        buffers = LentBuffers(reserved, device, activity)
        with buffers.offered() as lent:
            link.export_memory(lent)
        buffers.wait()
        return True
    peer = DevicePeerMemory(reserved, link.import_memory(1)[0], device, MODULE.Stream(), activity, "rank 0")
    for remote in (FIRST, SECOND):
        peer.put(remote, [torch.zeros(1000, dtype=torch.uint8, device=KIND)])
    with pytest.raises(TransferError, match="the memory of rank 0 no longer has microbatch 1 of stage 0"):
        peer.get(FIRST, [torch.zeros(1000, dtype=torch.uint8, device=KIND)])
    peer.clear()
    return True
