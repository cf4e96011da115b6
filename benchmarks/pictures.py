"""Pictures that studies share: ratios beside 1, and curves over a size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.intervals import Interval, error_bars


def beside_one(rows: Sequence[Mapping[str, Any]], name_of: Callable[[Mapping[str, Any]], str], titles: Mapping[str, str]) -> Figure:
    """Draw ratios with their intervals, beside 1: a line for each row, and axes for each key of a row, by its title."""
    figure = Figure(figsize=(9, 0.26 * len(rows) + 1.2), layout="constrained")
    all_axes = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    places = [-index for index in range(len(rows))]
    for axes, (key, title) in zip(all_axes, titles.items()):
        known = [(place, Interval.of(row, key)) for place, row in zip(places, rows) if row[key] is not None]
        found = [one for _, one in known]
        style = {"fmt": "o", "markersize": 4, "ecolor": "tab:gray"}
        axes.errorbar([one.median for one in found], [place for place, _ in known], xerr=error_bars(found), **style)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    all_axes[0].set_yticks(places, list(map(name_of, rows)), fontsize=8)
    return figure


def curves(rows: Sequence[Mapping[str, Any]], over: str, groups: Mapping[str, Mapping[str, str]]) -> Figure:
    """Draw curves over a size: axes for each group, by their label, with a curve for each key of a row, by its name."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (label, names) in zip(figure.subplots(1, len(groups), sharex=True), groups.items()):
        for (key, name), marker in zip(names.items(), "os^"):
            axes.semilogx([row[over] for row in rows], [row[key] for row in rows], marker=marker, label=name)
        axes.set(xlabel=over, ylabel=label, ylim=(0, None))
        axes.legend(frameon=False)
    return figure


def points(
    rows: Sequence[Mapping[str, Any]],
    panel_of: Callable[[Mapping[str, Any]], str],
    kind_of: Callable[[Mapping[str, Any]], str],
    x: tuple[str, str],
    y: tuple[str, str],
) -> Figure:
    """Draw a key of the rows over another one, each with its label: axes for each panel, a colour for each kind."""
    panels, kinds = (list(dict.fromkeys(map(of, rows))) for of in (panel_of, kind_of))
    figure = Figure(figsize=(5.2 * len(panels), 5), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, panels):
        for row in (row for row in rows if panel_of(row) == panel):
            ends, kind = error_bars([Interval.of(row, y[0])]), kind_of(row)
            style = {"fmt": "o", "alpha": 0.7, "color": f"C{kinds.index(kind)}", "label": kind}
            axes.errorbar(row[x[0]], row[y[0]], yerr=ends, **style)
        axes.set(title=panel, xlabel=x[1], ylabel=y[1])
        axes.grid(alpha=0.3)
    shown = {label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=4, fontsize=9)
    return figure
