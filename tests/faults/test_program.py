"""An error that nobody catches ends every process of a program: with a traceback, and not by a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def test_an_error_that_nobody_catches_ends_all_processes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.faults.program"]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(store.port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        shown = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1], shown
    assert "RankFailedError: rank 1 failed in step 1, stage 1, microbatch 2, action 1F2: ValueError: boom" in shown[0]
    assert "ValueError: boom" in shown[1] and "bpipe: rank 1, stage 1, microbatch 2, action 1F2, step 1" in shown[1]
