"""Pieces of a fill job in traces and pictures, in a lane of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import bpipe
from bpipe.fill import Pieces
from tests.ranks import run_ranks
from tests.sleepers import Sleeper

P, M = 2, 4


def naps() -> Iterator[None]:
    while True:
        time.sleep(0.001)
        yield


def traced(rank: int, folder: str) -> tuple[list[float], bool]:
    """How many pieces the trace of each step has and the schedule says, of this rank."""
    stage = bpipe.PipelineStage(Sleeper(0.01, 1000), rank, P, "cpu")
    schedule = bpipe.OneFOneB(stage, M, loss_fn=nn.functional.mse_loss)
    schedule.fill = Pieces(naps)
    x, said = torch.ones(M, 8), []
    with bpipe.trace(schedule, folder) as trace:
        for _ in range(6):
            schedule.step(x, target=x)
            said.append(schedule.stats["fill_pieces"])
        gathered = trace.gather()
    lane = [timeline.actions[rank] for timeline in gathered]
    bpipe.draw(gathered[-1], Path(folder) / f"{rank}.svg")
    bpipe.draw(gathered[-1], Path(folder) / f"{rank}.html")
    found = sum(len(one.filled_s) / 2 for one in lane)
    is_ordered = all(list(one.filled_s) == sorted(one.filled_s) for one in lane)
    return [found, sum(said)], is_ordered


def test_pieces_are_in_traces_and_pictures(tmp_path: Path) -> None:
    for (found, said), is_ordered in run_ranks(traced, P, str(tmp_path)):
        assert found == said > 0 and is_ordered
    timelines = bpipe.load_trace(tmp_path)
    for rank in range(P):
        spans = list(timelines[-1].fills(rank))
        assert spans and all(span.seconds > 0.0009 for span in spans)
        assert any(wait.begin_s <= spans[-1].begin_s <= wait.end_s for wait in timelines[-1].waits(rank))
        events = json.loads((tmp_path / f"rank-{rank}.json").read_text())["traceEvents"]
        assert any(one.get("cat") == "fill job" for one in events)
        assert "fill job" in (tmp_path / f"{rank}.svg").read_text() and '"fill"' in (tmp_path / f"{rank}.html").read_text()
