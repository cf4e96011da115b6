"""A rank is killed at any moment, also while memory is being shared: the others raise, and nothing is left on the host.

`BPIPE_TEST_KILLS=200 make test-all ARGS=tests/faults/test_killed_at_random.py` kills as often as that.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import CommError
from tests.ranks import run_ranks

RANKS, MICROBATCHES, WIDTH = 4, 6, 300  # 2 x 300 x 300 floats between stages: a message through shared memory
LONGEST_S = 1.5  # until the kill
TIMEOUT_S = 5.0  # the others wait as long for a rank that was killed before it came to the meeting
KILLS = int(os.environ.get("BPIPE_TEST_KILLS", "12"))


def training(rank: int, victim: int, after_s: float) -> float:
    """One rank: the seconds from the kill until it raises."""
    killed_at = time.monotonic() + after_s
    if rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = torch.randn(2 * MICROBATCHES, WIDTH, WIDTH)
    schedule = bpipe.BalancedOneFOneB(
        bpipe.PipelineStage(module, rank, RANKS, "cpu"),
        MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        options=bpipe.Options(timeout_s=TIMEOUT_S),
    )
    try:
        while True:
            schedule.step(x, target=x, return_outputs=False)
    except CommError:
        return time.monotonic() - killed_at
    finally:
        schedule.close()


def is_ours(process: int) -> bool:
    """Whether a process descends from this one: others on the host may run bpipe at the same time, as other tests do."""
    while process > 1 and process != os.getpid():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process > 1


def shared() -> set[str]:
    """Memory of bpipe that any process of this test has open, and what has its name in the folder of shared memory."""
    found = {name for name in os.listdir("/dev/shm") if "bpipe" in name}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
            if "memfd:bpipe" in target and is_ours(int(link.parts[2])):
                found.add(f"{link}: {target}")
        except OSError:  # its process has ended, or is another user's
            continue
    return found


@pytest.mark.parametrize("number", [0, pytest.param(KILLS, id="many", marks=pytest.mark.timeout(3600))])
def test_nothing_is_left(number: int, one_thread: None) -> None:
    random, before = Random(number), shared()
    for _ in range(number or 1):
        killed(random)
        assert shared() <= before


def test_the_others_raise_in_time(one_thread: None) -> None:
    assert max(killed(Random(0))) < TIMEOUT_S + 2


def killed(random: Random) -> list[float]:
    """The seconds from a kill until each of the other ranks raises."""
    victim, after_s = random.randrange(RANKS), random.uniform(0, LONGEST_S)
    outcomes = run_ranks(training, RANKS, victim, after_s, expect_errors=True)
    assert "died without a word" in str(outcomes.pop(victim))
    assert all(isinstance(seconds, float) for seconds in outcomes), (victim, after_s, outcomes)
    return outcomes
