"""Two figures of each rank, what its device holds at most of all and of activations: whoever says them says the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.schedules import Destinations
from bpipe.simulator.simulation import simulate
from bpipe.tools.cli import main
from bpipe.tools.page import as_data
from bpipe.tools.scene import compose
from tests.models import mse

P, M, WIDTH, HEAD = 4, 8, 16, 600
KEYS = ("device_peak_bytes", "peak_bytes")
Figures = list[tuple[int, int]]  # of each rank


def stages(num_stages: int = P) -> list[nn.Module]:
    """Blocks, and a head that outweighs them on the last."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(num_stages)]
    return [*blocks[:-1], nn.Sequential(blocks[-1], nn.Linear(WIDTH, HEAD), nn.LogSoftmax(-1))]


MAKERS: dict[str, Callable[..., bpipe.Schedule]] = {
    "plain": bpipe.OneFOneB,
    "by count": bpipe.BalancedOneFOneB,
    "by bytes": lambda *args, **kwargs: bpipe.Balanced(
        bpipe.OneFOneB(*args, **kwargs), budget="lowest", options=bpipe.Options(parts=4)
    ),
}


@dataclass
class Told:
    """What one run says of itself."""

    stats: Figures
    path: Path
    timeline: Any


def run(make: Callable[..., bpipe.Schedule], path: Path, per_rank: int = 1, placed: Callable[[int], int] = lambda s: s) -> Told:
    """Trace the third step, from which on shapes and sizes are known."""
    loopback, modules = bpipe.Loopback(P), stages(P * per_rank)
    num_stages = len(modules)
    of_rank: list[list[bpipe.PipelineStage]] = [[] for _ in range(P)]
    for index, module in enumerate(modules):
        rank = placed(index)
        of_rank[rank].append(bpipe.PipelineStage(module, index, num_stages, "cpu", loopback.rank(rank)))
    schedules = [make(some if per_rank > 1 else some[0], M, loss_fn=mse) for some in of_rank]
    x, y = torch.randn(2 * M, WIDTH), torch.randn(2 * M, HEAD)
    for _ in range(2):
        loopback.step(schedules, x, target=y)
    with bpipe.trace(schedules, path) as t:
        loopback.step(schedules, x, target=y)
    (timeline,) = t.timelines
    return Told([figures(schedule.stats) for schedule in schedules], path, timeline)


def figures(numbers: Any) -> tuple[int, int]:
    return tuple(int(numbers[key]) for key in KEYS)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    folder = tmp_path_factory.mktemp("traces")
    return {name: run(make, folder / name.replace(" ", "-")) for name, make in MAKERS.items()}


def of_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_all_who_say_it_say_the_same(told: dict[str, Told], capsys: pytest.CaptureFixture[str]) -> None:
    compared = of_json(capsys, "compare", *(str(one.path) for one in told.values()))
    for one, beside in zip(told.values(), compared):
        (traced,) = of_json(capsys, "trace", str(one.path))
        assert [figures(rank) for rank in traced["ranks"]] == [figures(rank) for rank in beside["ranks"]] == one.stats
        for timeline in (one.timeline, *bpipe.load_trace(one.path)):
            assert [(timeline.device_peak_bytes(rank), timeline.peak_bytes(rank)) for rank in range(P)] == one.stats
            scene = compose([timeline])
            assert [(row.device_peak, row.peak) for row in scene.panels[0].rows] == one.stats
            for row, (device, activations) in zip(as_data(scene)["panels"][0]["rows"], one.stats):  # type: ignore[index]
                assert (max(row["memory"][2::3]), max(row["memory"][1::3])) == (device, activations)
                assert row["stays"] + activations <= device


def test_the_fullest_device_decides(told: dict[str, Told], capsys: pytest.CaptureFixture[str]) -> None:
    """By count the rank with the head takes remote activations as well, so that the fullest device is fuller than plain."""
    fullest = {name: max(device for device, _ in one.stats) for name, one in told.items()}
    assert fullest["by bytes"] <= fullest["plain"] < fullest["by count"]
    assert all(one.timeline.fullest_rank == P - 1 for one in told.values())
    main(["compare", *(str(one.path) for one in told.values())])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("fullest device, the least first:"))
    assert sorted(told, key=lambda name: line.index(f"{told[name].path}:")) == sorted(fullest, key=fullest.__getitem__)


@pytest.fixture
def report() -> Iterator[Any]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import report

    yield report
    del sys.path[0]


def test_the_example_s_table_says_it_too(told: dict[str, Told], report: Any) -> None:
    """And which rank is the fullest, and that balancing by count made it fuller."""

    def summaries(name: str) -> list[dict[str, float]]:
        return [{**dict.fromkeys(report.REDUCED, 0.0), **dict(zip(KEYS, of_rank))} for of_rank in told[name].stats]

    ranks = [{"plain": plain, "balanced": by_count} for plain, by_count in zip(summaries("plain"), summaries("by count"))]
    for rank in ranks:
        shown = report.cells(rank["plain"], rank["balanced"])
        expected = [f"{rank[name][key] / report.MIB:.1f}" for name in ("plain", "balanced") for key in KEYS]
        assert [shown[index] for index in (0, 2, 3, 5)] == expected
    assert "balanced rank 3" in report.told_of_fullest(ranks) and "more than plain" in report.told_of_fullest(ranks)
    by_bytes = [{"plain": plain, "balanced": lower} for plain, lower in zip(summaries("plain"), summaries("by bytes"))]
    assert "more than plain" not in report.told_of_fullest(by_bytes)


SCHEDULES: dict[str, tuple[Callable[..., bpipe.Schedule], int, Callable[[int], int]]] = {
    "gpipe": (bpipe.GPipe, 1, lambda s: s),
    "recomputed": (lambda *a, **k: bpipe.Balanced(bpipe.OneFOneB(*a, **k), budget="lowest", by="recompute"), 1, lambda s: s),
    "to the host": (
        lambda *a, **k: bpipe.Balanced(bpipe.GPipe(*a, **k), budget="lowest", to=Destinations(host="only")),
        1,
        lambda s: s,
    ),
    "in halves": (bpipe.ZBH1, 1, lambda s: s),
    "looped": (bpipe.Interleaved1F1B, 2, lambda s: s % P),
    "in a V": (bpipe.ZBV, 2, lambda s: min(s, 2 * P - 1 - s)),
    "in a V, by bytes": (
        lambda *a, **k: bpipe.Balanced(bpipe.DualPipeV(*a, **k), budget="lowest"),
        2,
        lambda s: min(s, 2 * P - 1 - s),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_has_the_peaks_of_the_stats(name: str, tmp_path: Path) -> None:
    """And what is planned in bytes is simulated to the same."""
    one = run(SCHEDULES[name][0], tmp_path, *SCHEDULES[name][1:])
    assert [(one.timeline.device_peak_bytes(rank), one.timeline.peak_bytes(rank)) for rank in range(P)] == one.stats
    if one.timeline.plan.sizes is not None:
        simulated = simulate(one.timeline.plan, bpipe.schedules.Costs())
        assert [simulated.device_peak_bytes(rank) for rank in range(P)] == [device for device, _ in one.stats]
