"""Check trace files by the rules of Google's "Trace Event Format", and by what Perfetto's importer needs to lose nothing.

The document says which phases there are and what each needs, that the slices of a thread pytree, and that a flow's ends bind to
slices. Perfetto drops a slice that partly overlaps another one of its thread, and binds a flow's end to the slice that began last
on its thread, even at that very time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

Event = Mapping[str, Any]
Check = Callable[[object], bool]


def violations(trace: object) -> list[str]:
    """Return a line for each thing that is wrong with a trace, so none for a good one.

    Args:
        trace: the parsed file, in the format's object form.
    """
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["a trace is an object with a list traceEvents"]
    found = [*_of_the_object(trace), *_of_each_event(trace["traceEvents"])]
    return found or [wrong for rule in _RULES for wrong in rule(trace["traceEvents"])]  # which need events that are sound


def _of_the_object(trace: Event) -> Iterator[str]:
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        yield f"displayTimeUnit is 'ms' or 'ns', not {trace['displayTimeUnit']!r}"
    if not isinstance(trace.get("otherData", {}), dict):
        yield "otherData is an object"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _is_time(value: object) -> bool:
    return _is_number(value) and 0 <= value < 2**53 / 1000  # type: ignore[operator] # nanoseconds that a double holds exactly


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_series(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_number, value.values()))


_PLACE: dict[str, Check] = {"name": _is_text, "pid": _is_whole, "tid": _is_whole}

# What each phase needs, by its letter.
_NEEDED: dict[str, dict[str, Check]] = {
    "X": {**_PLACE, "ts": _is_time, "dur": _is_time, "args": _is_object},
    "s": {**_PLACE, "ts": _is_time, "id": _is_whole, "cat": _is_text},
    "f": {**_PLACE, "ts": _is_time, "id": _is_whole, "cat": _is_text, "bp": lambda value: value == "e"},
    "C": {**_PLACE, "ts": _is_time, "args": _is_series},
    "M": {**_PLACE, "args": _is_object},
}

# What a metadata event says, by its name.
_METADATA: dict[str, tuple[str, Check]] = {
    "process_name": ("name", _is_text),
    "process_sort_index": ("sort_index", _is_whole),
    "thread_name": ("name", _is_text),
    "thread_sort_index": ("sort_index", _is_whole),
}


def _of_each_event(events: Sequence[Any]) -> Iterator[str]:
    for number, event in enumerate(events):
        yield from (f"event {number}: {wrong}" for wrong in _wrong_with(event))


def _wrong_with(event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or event.get("ph") not in _NEEDED:
        yield f"expected an object whose 'ph' is one of {', '.join(_NEEDED)}, got {str(event)[:80]}"
        return
    for key, check in _NEEDED[event["ph"]].items():
        if key not in event:
            yield f"a {event['ph']!r} event has no {key!r}"
        elif not check(event[key]):
            yield f"{key!r} of a {event['ph']!r} event cannot be {str(event[key])[:40]!r}"
    if event["ph"] == "M" and _is_object(event.get("args")):
        key, check = _METADATA.get(str(event.get("name")), ("", _is_text))
        if not key or not check(event["args"].get(key)):
            yield f"no metadata that readers know: {event.get('name')!r} {event['args']}"


def _ns(us: float) -> int:
    return round(us * 1000)


def _end_ns(event: Event) -> int:
    return _ns(event["ts"]) + _ns(event["dur"])


def _in_time(events: Iterable[Event], phases: str) -> dict[tuple[int, int], list[Event]]:
    """Return the events of each thread in the order in which Perfetto takes them."""
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted((event for event in events if event["ph"] in phases), key=lambda e: (_ns(e["ts"]), e["ph"] != "X")):
        threads[event["pid"], event["tid"]].append(event)
    return threads


def _slices_nest(events: Sequence[Event]) -> Iterator[str]:
    for (pid, tid), slices in _in_time(events, "X").items():
        open_until: list[Event] = []
        for event in slices:
            while open_until and _end_ns(open_until[-1]) <= _ns(event["ts"]):
                open_until.pop()
            if open_until and _end_ns(event) > _end_ns(open_until[-1]):
                yield f"process {pid}, thread {tid}: {event['name']} overlaps {open_until[-1]['name']} partly, at {event['ts']} us"
            open_until.append(event)


def _flows_have_two_ends(events: Sequence[Event]) -> Iterator[str]:
    flows: dict[tuple[str, str, int], dict[str, list[Event]]] = defaultdict(lambda: {"s": [], "f": []})
    for event in events:
        if event["ph"] in "sf":
            flows[event["cat"], event["name"], event["id"]][event["ph"]].append(event)
    seen: dict[int, str] = {}
    for (_, name, identity), ends in flows.items():
        if identity in seen:
            yield f"flow {identity} is both {seen[identity]} and {name}"
        seen[identity] = name
        if len(ends["s"]) != 1 or len(ends["f"]) != 1:
            yield f"flow {identity} ({name}) starts {len(ends['s'])} times and finishes {len(ends['f'])} times, expected once each"
        elif _ns(ends["s"][0]["ts"]) >= _ns(ends["f"][0]["ts"]):
            yield f"flow {identity} ({name}) does not finish after it starts"


def _flows_bind(events: Sequence[Event]) -> Iterator[str]:
    for (pid, tid), thread in _in_time(events, "Xsf").items():
        latest: Event | None = None
        for event in thread:
            if event["ph"] == "X":
                latest = event
            elif latest is None or _end_ns(latest) <= _ns(event["ts"]):
                yield f"process {pid}, thread {tid}: flow {event['id']} has no slice to bind to at {event['ts']} us"


def _lanes_are_named(events: Sequence[Event]) -> Iterator[str]:
    named: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            named[event["name"]].append((event["pid"], event["tid"]) if event["name"].startswith("thread") else (event["pid"],))
    for name, places in named.items():
        if len(places) != len(set(places)):
            yield f"{name} is given twice for one place"
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] in "XsfC"}
    for pid in sorted({pid for pid, _ in used} - {place[0] for place in named["process_name"]}):
        yield f"process {pid} has no name"
    for place in sorted(used - set(named["thread_name"])):
        yield f"process {place[0]}, thread {place[1]} has no name"


_RULES: tuple[Callable[[Sequence[Event]], Iterator[str]], ...] = (
    _slices_nest,
    _flows_have_two_ends,
    _flows_bind,
    _lanes_are_named,
)
