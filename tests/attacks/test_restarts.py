"""`torchrun --max-restarts=2` over one store, with a rank killed in each phase of two attempts: the third one is exact."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.attacks.job import PHASES

TIMEOUT_S = 150
CASES = [("making", 2), *(pytest.param(phase, 3, marks=pytest.mark.exhaustive) for phase in PHASES)]


@pytest.mark.parametrize("phase, size", CASES)
def test_the_attempt_after_a_kill_is_exact(phase: str, size: int) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(size), "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "tests.attacks.job", phase),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as agent:
        try:
            printed, _ = agent.communicate(timeout=TIMEOUT_S)
        finally:
            agent.terminate()  # which ends the ranks, too
    assert agent.returncode == 0, printed
    done = {(int(attempt), int(rank)) for attempt, rank in re.findall(r"attempt (\d), rank (\d): exact", printed)}
    assert {(2, rank) for rank in range(size)} <= done, printed
    assert "disagree" not in printed
