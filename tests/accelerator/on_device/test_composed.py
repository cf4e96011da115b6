"""FSDP2 and DDP inside stages, over simulated NCCL: the bits of the CPU, and nothing that the checker reports."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import mutations
from tests.accelerator.composed import REPLICAS, SCHEDULES, P, train
from tests.accelerator.device import reports, simulator
from tests.accelerator.mutations import IN_FSDP, Mutation
from tests.ranks import run_ranks

MOST_DELAY_US, DELAYED = 500, 0.1
CASES = [("fsdp", name) for name in SCHEDULES] + [("ddp", name) for name in ("1f1b", "slots")] + [("tp", "slots")]


def install(rank: int) -> None:
    from tests.accelerator import collectives, nccl

    collectives.install()
    nccl.install(nccl=True)
    simulator.configure(True, MOST_DELAY_US, DELAYED, rank)


def on_device(rank: int, cases: Sequence[tuple[str, str]]) -> list[Any]:
    """One rank's cases: what it computed, the bytes that it evicted, and what the checker reported."""
    install(rank)
    found = []
    for parallel, name in cases:
        found.append((*train(parallel, name, "cuda"), reports()))
        simulator.clear_reports()
    return found


def on_cpu(rank: int, cases: Sequence[tuple[str, str]]) -> list[Any]:
    return [train(parallel, name, "cpu") for parallel, name in cases]


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, str], Any]:
    """What the ranks found on the device and on CPU, by case; in one start of the processes each."""
    pairs = [run_ranks(where, P * REPLICAS, CASES) for where in (on_device, on_cpu)]
    return {case: [[of_rank[i] for of_rank in ranks] for ranks in pairs] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_equality(seen: dict[tuple[str, str], Any], case: tuple[str, str]) -> None:
    found, expected = seen[case]
    for (tensors, _, reported), (same, _) in zip(found, expected):
        assert not reported
        assert len(tensors) == len(same) and all(map(torch.equal, tensors, same))
    assert bool(sum(evicted for _, evicted, _ in found)) == (case[1] in ("slots", "bytes"))


def without_waiting(rank: int) -> list[str]:
    """FSDP2, where a wait for a collective does nothing."""
    install(rank)
    dist.Work.wait = lambda *_: True  # type: ignore[method-assign]
    with suppress(Exception):  # whatever comes of numbers that had not arrived, such as a negative length
        train("fsdp", "breadth_first", "cuda", steps=1)
    return reports()


def with_a_bad_hook(rank: int) -> list[str]:
    """DDP, with a hook that does not say when its collective is over."""
    install(rank)

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and knows none that are text
        dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with suppress(Exception):
        train("ddp", "1f1b", "cuda", steps=1, hook=hook)
    return reports()


def assert_found(reported: list[list[str]]) -> None:
    """Some rank's checker found a missing order; that a kernel failed is not enough."""
    assert any(report.startswith(("race:", "reuse:")) for of_rank in reported for report in of_rank), reported


@pytest.mark.parametrize("wrong", [without_waiting, with_a_bad_hook])
def test_what_is_not_waited_for_is_reported(wrong: Any) -> None:
    assert_found(run_ranks(wrong, P * REPLICAS))


def mutated(rank: int, mutation: Mutation) -> list[str]:
    mutations.apply(mutation)
    from tests.accelerator.composed import train

    install(rank)
    with suppress(Exception):
        train("fsdp", mutation.schedule, "cuda", steps=1)
    return reports()


@pytest.mark.parametrize("mutation", IN_FSDP, ids=lambda mutation: mutation.name)
def test_an_order_that_bpipe_adds_is_needed(mutation: Mutation) -> None:
    assert_found(run_ranks(mutated, P * REPLICAS, mutation))
