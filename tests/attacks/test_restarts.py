"""`torchrun --max-restarts` over one store, with a rank killed in a phase of an attempt or two: the next one is exact.

Large tensors travel through memory that ranks share, or over gloo, and the ranks have a secret then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.attacks.job import LENT, PHASES, victims_of

TIMEOUT_S = 150


def ranks_in(phase: str) -> int:
    """How many ranks it takes: three evict nothing."""
    return 4 if phase in LENT else 3


SHARED = {"BPIPE_SHARED_MEMORY": "1", "BPIPE_SECRET": ""}
GLOO = {"BPIPE_SHARED_MEMORY": "0", "BPIPE_SECRET": "open sesame"}
CASES = [
    pytest.param(phase, ranks_in(phase), by, id=f"{phase}-{'gloo' if by is GLOO else 'shared'}")
    for phase in PHASES  # each in one way, because both ways of all take ten minutes
    for by in [SHARED if phase in LENT else GLOO]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase, size, by", CASES)
def test_the_attempt_after_a_kill_is_exact(phase: str, size: int, by: dict[str, str]) -> None:
    last = len(victims_of(phase, size))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(size)),
        *("--max-restarts", str(last)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "tests.attacks.job", phase),
    ]
    environment = {**os.environ, **by, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as agent:
        try:
            printed, _ = agent.communicate(timeout=TIMEOUT_S)
        finally:
            agent.terminate()  # which ends the ranks, too
    assert agent.returncode == 0, printed
    done = {(int(attempt), int(rank)) for attempt, rank in re.findall(r"attempt (\d), rank (\d): exact", printed)}
    assert {(last, rank) for rank in range(size)} <= done, printed
    assert "disagree" not in printed
    assert {attempt for attempt, _ in done} == {last} or phase == "closing", printed  # the victims were really killed
