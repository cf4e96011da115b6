"""The picture of a run: each rank's peak activation memory, plain beside balanced, and what the plan predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from files import whole
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw_memory"]

MIB = 1024**2
BAR_WIDTH = 0.36

# Okabe and Ito's palette, apart for every kind of colour vision; light and hatched beside dark, so apart in grey too.
COLORS = {"plain": "#E69F00", "balanced": "#0072B2"}
HATCHES = {"plain": "///", "balanced": ""}


def draw_memory(path: Path, ranks: Sequence[dict[str, dict[str, float]]]) -> None:
    """Write the picture as a PNG."""
    figure = Figure(figsize=(max(6.4, 1.4 * len(ranks)), 4.2), layout="constrained")
    axes = figure.subplots()
    for offset, name in ((-BAR_WIDTH / 2, "plain"), (BAR_WIDTH / 2, "balanced")):
        draw_bars(axes, name, offset, [rank[name] for rank in ranks])
    axes.set_xticks(range(len(ranks)), [f"rank {index}" for index in range(len(ranks))])
    axes.set_ylabel("peak activation memory, MiB")
    axes.set_title(headline(ranks))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    prediction, *bars = axes.get_legend_handles_labels()[0]
    axes.legend(handles=[*bars, prediction], loc="upper right", ncols=3, frameon=False)
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=160)


def draw_bars(axes: Axes, name: str, offset: float, summaries: Sequence[dict[str, float]]) -> None:
    """Draw one schedule's measured peaks as bars with their value, and its predicted peaks as diamonds."""
    places = [index + offset for index in range(len(summaries))]
    measured = [summary["peak_bytes"] / MIB for summary in summaries]
    predicted = [summary["predicted_peak_bytes"] / MIB for summary in summaries]
    look = {"color": COLORS[name], "hatch": HATCHES[name], "edgecolor": "black", "linewidth": 0.6}
    bars = axes.bar(places, measured, BAR_WIDTH, label=f"{name} 1F1B", **look)
    axes.bar_label(bars, fmt="%.0f", padding=6, fontsize=9)
    label = "predicted" if name == "plain" else None
    axes.plot(places, predicted, "D", color="white", markeredgecolor="black", markersize=5, label=label)


def headline(ranks: Sequence[dict[str, dict[str, float]]]) -> str:
    """Say what balancing did to the rank that needs the most."""
    plain, balanced = (max(rank[name]["peak_bytes"] for rank in ranks) / MIB for name in ("plain", "balanced"))
    return f"The fullest rank holds {plain:.0f} MiB plain, {balanced:.0f} MiB balanced"
