"""The timeline of a run: a measured step beside the one that the plan predicts from what its computations took."""

from __future__ import annotations

from pathlib import Path

import bpipe
from bpipe.estimate.calibrate import calibrated
from bpipe.schedules import simulate
from bpipe.simulator.measured import typical

__all__ = ["draw_timeline"]


def draw_timeline(folder: Path) -> None:
    """Draw the traced step of median length as timeline.png and timeline.html, and say how well it was predicted. For one rank."""
    measured = typical(bpipe.load_trace(folder / "trace"))
    predicted = simulate(measured.plan, calibrated([measured], measured.plan))
    for name in ("timeline.png", "timeline.html"):
        bpipe.draw(measured, folder / name, other=predicted, title="A balanced step, measured and predicted")
    ratio = predicted.makespan_s / measured.makespan_s
    print(f"timeline    {folder / 'timeline.html'}: the step predicted from its computations takes {ratio:.2f} of the measured one")
    print(f"trace       {folder / 'trace'}, to look at with `bpipe trace`; its files open at ui.perfetto.dev")
