"""Draw a run's memory: the peak of each rank under each schedule, and the plan's prediction.

Of plain beside balanced, a bar is the peak of all that the device holds. Its top is the peak of activations; below are weights,
gradients, buffers, optimizer states and messages between stages. Of other schedules, a bar is the peak of activations alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from files import whole
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

__all__ = ["draw_activations", "draw_memory", "fullest_of"]

MIB = 1024**2
BAR_WIDTH = 0.36

# Okabe and Ito's palette, apart for every kind of colour vision; light and hatched beside dark, so apart in grey too.
COLORS = {"plain": "#E69F00", "balanced": "#0072B2"}
HATCHES = {"plain": "///", "balanced": ""}
LOOKS = (("#E69F00", "///"), ("#0072B2", ""), ("#F0E442", "..."), ("#009E73", ""))  # of schedules in a row
BELOW = "#b0b0b0"  # static memory, the same under every schedule

Summaries = Sequence[dict[str, dict[str, float]]]  # of each rank, those of each schedule


def draw_memory(path: Path, ranks: Summaries) -> None:
    """Write the picture as a PNG."""
    figure = Figure(figsize=(max(6.4, 1.4 * len(ranks)), 4.6), layout="constrained")
    axes = figure.subplots()
    for offset, name in ((-BAR_WIDTH / 2, "plain"), (BAR_WIDTH / 2, "balanced")):
        draw_bars(axes, name, offset, [rank[name] for rank in ranks])
    axes.set_xticks(range(len(ranks)), [f"rank {index}" for index in range(len(ranks))])
    axes.set_ylabel("the most a device holds, MiB")
    axes.set_title(headline(ranks), fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])
    prediction, *bars = axes.get_legend_handles_labels()[0]
    stays = Patch(facecolor=BELOW, edgecolor="black", linewidth=0.6, label="what else the device holds")
    axes.legend(handles=[*bars, stays, prediction], loc="upper right", ncols=2, frameon=False)
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=160)


def draw_bars(axes: Axes, name: str, offset: float, summaries: Sequence[dict[str, float]]) -> None:
    """Draw one schedule's measured peaks as bars with both values, activations above the rest, and the prediction as a diamond."""
    places = [index + offset for index in range(len(summaries))]
    device, activations, predicted = (
        [summary[key] / MIB for summary in summaries] for key in ("device_peak_bytes", "peak_bytes", "predicted_device_peak_bytes")
    )
    below = [total - top for total, top in zip(device, activations, strict=True)]
    axes.bar(places, below, BAR_WIDTH, color=BELOW, edgecolor="black", linewidth=0.6)
    look = {"color": COLORS[name], "hatch": HATCHES[name], "edgecolor": "black", "linewidth": 0.6}
    bars = axes.bar(places, activations, BAR_WIDTH, bottom=below, label=f"activations, {name} 1F1B", **look)
    axes.bar_label(bars, [f"{total:.0f}" for total in device], padding=6, fontsize=9, weight="bold")
    inside = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.bar_label(bars, [f"{top:.0f}" for top in activations], label_type="center", fontsize=8, bbox=inside)
    label = "predicted" if name == "plain" else None
    axes.plot(places, predicted, "D", color="white", markeredgecolor="black", markersize=5, label=label)


def headline(ranks: Summaries) -> str:
    """Say what balancing did to the rank whose device holds the most."""
    fullest = {name: fullest_of(ranks, name) for name in ("plain", "balanced")}
    told = (f"{ranks[rank][name]['device_peak_bytes'] / MIB:.0f} MiB {name} (rank {rank})" for name, rank in fullest.items())
    return f"The fullest device: {', '.join(told)}"


def fullest_of(ranks: Summaries, name: str) -> int:
    """The rank whose device holds the most under a schedule."""
    return max(range(len(ranks)), key=lambda rank: ranks[rank][name]["device_peak_bytes"])


def draw_activations(path: Path, ranks: Summaries, title: str) -> None:
    """Write a PNG of the most activations of each rank under each schedule, and of what its plan predicts."""
    figure = Figure(figsize=(max(6.4, 2.0 * len(ranks)), 4.6), layout="constrained")
    axes = figure.subplots()
    names = list(ranks[0])
    width = 0.84 / len(names)
    for place, (name, (color, hatch)) in enumerate(zip(names, LOOKS, strict=True)):
        places = [rank + (place - (len(names) - 1) / 2) * width for rank in range(len(ranks))]
        measured, predicted = ([rank[name][key] / MIB for rank in ranks] for key in ("peak_bytes", "predicted_peak_bytes"))
        bars = axes.bar(places, measured, width, color=color, hatch=hatch, edgecolor="black", linewidth=0.6, label=name)
        axes.bar_label(bars, [f"{peak:.0f}" for peak in measured], padding=5, fontsize=8)
        axes.plot(places, predicted, "D", color="white", markeredgecolor="black", markersize=4, label="predicted by the plan")
    axes.set_xticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_ylabel("the most activations a rank holds, MiB")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    axes.legend(handles=[*axes.containers, axes.get_lines()[0]], loc="upper right", ncols=3, frameon=False)
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=160)
