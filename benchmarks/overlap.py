"""How much of the copies of evictions runs beside kernels, as torch.profiler sees a step on a GPU."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch.profiler import profile

from benchmarks.alternate import Step

MOVES = re.compile(r"bpipe rank \d+ \d+(EVICT|LOAD|ACCEPT|RETURN)")  # what torch.profiler sees of actions that start a copy


class Span(NamedTuple):
    """From when to when, in microseconds of a trace."""

    begin: float
    end: float


def trace_of(step: Step) -> list[dict[str, Any]]:
    """The events of a step, as torch.profiler writes them for Chrome."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells when it starts and stops
    with profile(acc_events=True) as seen:
        step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def copies_and_kernels(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    """The copies that evictions and loads have started, and all kernels, which run on other streams than a copy at that time."""
    of: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        of.setdefault(event.get("cat", ""), []).append(event)
    moves = sorted(_span(event) for event in of.get("user_annotation", ()) if MOVES.match(event["name"]))
    launched = {_correlation(event): event["ts"] for event in of.get("cuda_runtime", ())}
    copies = [_span(event) for event in of.get("gpu_memcpy", ()) if _is_within(launched.get(_correlation(event)), moves)]
    return copies, [_span(event) for event in of.get("kernel", ())]


def _span(event: Mapping[str, Any]) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"])


def _correlation(event: Mapping[str, Any]) -> int | None:
    """What a copy and the call that started it have in common."""
    return event.get("args", {}).get("correlation")


def _is_within(moment: float | None, spans: Sequence[Span]) -> bool:
    """Whether a moment lies in one of some sorted spans that do not meet."""
    if moment is None:
        return False
    index = bisect_right(spans, Span(moment, float("inf"))) - 1
    return index >= 0 and moment <= spans[index].end


def overlapped(copies: Sequence[Span], kernels: Iterable[Span]) -> float | None:
    """The share of the copies' time in which a kernel ran; None without a copy."""
    busy: list[Span] = []
    for begin, end in sorted(kernels):
        if busy and begin <= busy[-1].end:
            busy[-1] = Span(busy[-1].begin, max(end, busy[-1].end))
        else:
            busy.append(Span(begin, end))
    until = list(accumulate((end - begin for begin, end in busy), initial=0.0))

    def busy_before(moment: float) -> float:
        index = bisect_right(busy, Span(moment, float("inf")))
        return until[index] - (max(0.0, busy[index - 1].end - moment) if index else 0.0)

    total = sum(end - begin for begin, end in copies)
    return sum(busy_before(end) - busy_before(begin) for begin, end in copies) / total if total else None
