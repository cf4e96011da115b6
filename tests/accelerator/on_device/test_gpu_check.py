"""The checks of `make gpu` on the simulated device: they pass, and with a broken bpipe they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_check import __main__ as gpu
from benchmarks.gpu_check import equality, memory, nccl, ranks
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.contenders import FIRST, PLAIN, SLOTS
from benchmarks.gpu_check.model import Size
from benchmarks.gpu_check.ranks import size_of
from benchmarks.gpu_check.runner import run_all
from benchmarks.gpu_check.verdict import Outcome, Verdict
from bpipe.memory.saved.bundle import Bundle
from bpipe.session.stats import Stats
from tests.accelerator.device import reports, simulator
from tests.ranks import run_ranks

DEVICE = torch.device("cuda", 0)
SIZE = Size(num_microbatches=4, width=32, tokens=8, sequences=2, dtype="float32", seconds=0.0)
ROOT = Path(__file__).parents[3]
IN_A_PROCESS = "import tests.accelerator.device, sys; from benchmarks.gpu_check.one_check import main; main(sys.argv[1:])"


@pytest.fixture(autouse=True)
def fresh(one_thread: None) -> Iterator[None]:
    simulator.configure(True, 50, 0.02, 0)
    simulator.synchronize_device(-1)
    simulator.clear_reports()
    yield
    simulator.clear_reports()


def outcomes(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.outcome.value for verdict in verdicts]


def test_gradients_are_equal() -> None:
    verdicts = equality.check(SIZE, DEVICE)
    assert outcomes(verdicts) == ["passed", "passed"] and not reports()
    assert verdicts[0].numbers["tensors"] == 12 * SIZE.num_ranks + SIZE.num_microbatches


def test_gradients_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is not what has left."""
    scatter = Bundle.scatter

    def spoiling(self: Bundle, messages: Sequence[torch.Tensor]) -> None:
        for message in messages:
            message[: message.numel() // 2].zero_()
        scatter(self, messages)

    monkeypatch.setattr(Bundle, "scatter", spoiling)
    balanced, plain = equality.check(SIZE, DEVICE, [PLAIN, SLOTS])
    assert outcomes([balanced, plain]) == ["failed", "passed"]
    assert balanced.reason.startswith(f"{SLOTS}: ") and " tensors differ, by up to " in balanced.reason


def test_memory_is_the_allocator_s() -> None:
    verdicts = memory.check(SIZE, DEVICE)
    assert outcomes(verdicts) == ["passed", "passed"], [verdict.reason for verdict in verdicts]
    said = [verdicts[0].numbers[f"said_bytes, {name}"] for name in ("GPipe", "evicted to the host", "recomputed")]
    assert said[0] > said[1] > said[2] and verdicts[1].numbers["evicted_bytes"] > 0
    assert not reports()


@pytest.mark.parametrize("factor, says", [(0.8, "over the"), (1.2, "peak was only")])
def test_wrong_bytes_are_found(factor: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Stats.of

    def wrong(self: Stats, *args: Any) -> dict[str, float]:
        return {name: factor * value if "device_peak" in name else value for name, value in right(self, *args).items()}

    monkeypatch.setattr(Stats, "of", wrong)
    seen = memory.of_one_rank(SIZE, DEVICE, memory.moments_of(SIZE, DEVICE), None)
    (problem,) = seen.problems("GPipe")
    assert says in problem


def test_evictions_that_free_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    empty = Bundle.empty

    def keeping(self: Bundle) -> None:
        kept.append(torch.empty(self.num_bytes, dtype=torch.uint8, device=DEVICE))
        empty(self)

    monkeypatch.setattr(Bundle, "empty", keeping)
    verdict = memory.freeing(SIZE, DEVICE)
    assert verdict.outcome is Outcome.FAILED and "gave back only" in verdict.reason


def on_two(rank: int, port: int) -> tuple[ranks.OfRank, list[str]]:
    """One rank as `make gpu` starts it, on a device of its own and over simulated NCCL: what it and the checker found."""
    from tests.accelerator import nccl as transports

    transports.install(nccl=True)
    simulator.configure(True, 100, 0.05, rank)
    init = dist.init_process_group
    dist.init_process_group = lambda backends, **how: init(backends.split(",")[0].split(":")[1], **how)  # NCCL is not in this torch
    ranks.FEWEST_ROUNDS = 2
    return nccl._rank(rank, size_of(SIZE, 2), port), reports()


def test_two_ranks_over_nccl() -> None:
    """But for the times, which are not a GPU's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found, reported = zip(*run_ranks(on_two, 2, store.port))
    assert reported == ([], [])
    verdicts = nccl.judge(found, size_of(SIZE, 2), nccl.link_bytes_per_s(2, 2**16))
    assert outcomes(verdicts[:2]) == ["passed", "passed"], [verdict.reason for verdict in verdicts[:2]]
    assert [verdict.check.partition(":")[0] for verdict in verdicts] == ["equality", "memory", "exposed transfer time", "step time"]
    assert verdicts[2].numbers["share of a step that waits for evictions"] >= 0.0 and found[0].moved[FIRST]


def test_the_command_writes_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check is a process, which has the simulated device too."""
    launch = (sys.executable, "-c", IN_A_PROCESS)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu, "run_all", lambda limits_s, size, say: partial(run_all, launch=launch)(limits_s, asdict(SIZE), say))
    assert main(["--only", "environment", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "bpipe-gpu.md" in out and "environment: at most 40 s" in err and "passed: environment" in err
    lines = (tmp_path / "bpipe-gpu.md").read_text().splitlines()
    assert "2 x simulated: 1 passed, 0 failed, 0 not applicable" in lines[0]
    assert lines[4].startswith("| environment | passed | GPUs: 2 x simulated<br>")
    (check,) = json.loads((tmp_path / "bpipe-gpu.json").read_text())["checks"]
    assert check["name"] == check["verdicts"][0]["check"] == "environment"
    assert str(ROOT) not in "\n".join(lines)
