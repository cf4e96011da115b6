"""Few hardware queues, and little room for NCCL's kernels: nothing stands still, and the bits are the CPU's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.on_device.test_equality import DELAYED, MOST_DELAY_US, assert_same, on_cpu
from tests.accelerator.on_device.test_own_process import in_own_process
from tests.accelerator.work import as_rank, in_loopback, lends
from tests.ranks import RankError, run_ranks

STUCK_S = 12.0  # for what takes two
TRIES = 6  # to stand still: a busy host may post each transfer only after the one before has ended
ANY = 64  # transfers in flight: more than there are

CASES = [  # schedule, ranks, hardware queues, NCCL's kernels at a time (0: any number)
    *[("balanced_1f1b", 4, queues, kernels) for queues, kernels in ((8, 0), (2, 0), (1, 0), (8, 1), (1, 2))],
    *[(name, 4, 1, 1) for name in ("1f1b", "bytes", "parts", "host", "interleaved", "zb_h1", "bitpipe_zb")],
    *[(name, 4, 8, 1) for name in ("zbv", "recompute", "chimera")],
    ("balanced_1f1b", 2, 8, 1),
]


def on_device(
    rank: int,
    name: str,
    num_ranks: int,
    queues: int,
    kernels: int,
    *,
    nccl: bool,
    in_turn: bool = True,
    at_once: int = 0,
    gives_up: bool = False,
    seed: int = 0,
) -> Any:
    """One rank: what it computed, and what the checker reported."""
    from tests.accelerator import nccl as transports

    simulator.set_connections(queues)
    transports.install(nccl=nccl, most_kernels=kernels, lends=lends(name))
    simulator.configure(True, MOST_DELAY_US, DELAYED, num_ranks * seed + rank)
    if gives_up:  # to show what stands still
        timer = threading.Timer(STUCK_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
    if not in_turn:  # as before there was an order of issue
        from bpipe.comm.transport.c10d import C10dTransport

        C10dTransport.waits_on_device = property(lambda self: False, lambda self, _: None)  # type: ignore[assignment]
    how = {"transfers_at_once": at_once or kernels} if at_once or kernels else {}
    return as_rank(rank, name, KIND, num_ranks=num_ranks, **how), reports()


@pytest.mark.parametrize(("name", "num_ranks", "queues", "kernels"), CASES)
def test_over_nccl(name: str, num_ranks: int, queues: int, kernels: int, one_thread: None) -> None:
    found = run_ranks(partial(on_device, nccl=True), num_ranks, name, num_ranks, queues, kernels)
    for (results, reported), expected in zip(found, run_ranks(on_cpu, num_ranks, name, num_ranks)):
        assert_same(results, expected)
        assert not reported


def test_over_nccl_the_order_of_issue_is_what_it_takes() -> None:
    as_before = partial(on_device, nccl=True, in_turn=False, at_once=ANY)  # which is safe in the order of issue alone
    run_ranks(as_before, 4, "balanced_1f1b", 4, 0, 0)
    assert stands_still(as_before, queues=1, kernels=0)


def test_over_nccl_more_in_flight_than_have_room_stand_still() -> None:
    assert stands_still(partial(on_device, nccl=True, at_once=ANY), queues=8, kernels=1)


def stands_still(ranks: Callable[..., Any], queues: int, kernels: int) -> bool:
    """Whether it does with one of a few seeds of the device's delays."""
    for seed in range(TRIES):
        try:
            run_ranks(partial(ranks, gives_up=True, seed=seed), 4, "balanced_1f1b", 4, queues, kernels)
        except RankError as error:
            if "died without a word" not in str(error):
                raise
            return True
    return False


@pytest.mark.parametrize("name", ["balanced_1f1b", "parts"])
def test_over_gloo(name: str, one_thread: None) -> None:
    found = run_ranks(partial(on_device, nccl=False), 4, name, 4, 1, 0)
    for (results, reported), expected in zip(found, run_ranks(on_cpu, 4, name, 4)):
        assert_same(results, expected)
        assert not reported


def in_loopback_with_one_queue() -> tuple[bool, list[str]]:
    torch.set_num_threads(1)
    simulator.set_connections(1)
    found, expected = (in_loopback("balanced_1f1b", device) for device in (KIND, "cpu"))
    return all(map(torch.equal, found, expected)), reports()


def test_in_the_loopback() -> None:
    assert in_own_process(in_loopback_with_one_queue) == (True, [])
