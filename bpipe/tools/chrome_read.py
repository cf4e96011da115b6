"""Read trace files back: a file as the timelines it was written from, the files of a run's ranks as one trace."""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

from bpipe.errors import BPipeError, ConfigurationError
from bpipe.plan.plan import Plan
from bpipe.simulator.timeline import Lane, Timeline
from bpipe.tools.measured import Measured, computed, merged

__all__ = ["load_trace"]

FORMAT = "bpipe-trace 3"
EARLIER = "bpipe-trace 1"
DEVICE = "device"

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """The contents of a trace file.

    Args:
        name: the file's name, for errors.
        run: the same in all files of a run.
        is_complete: False if an error ended the trace.
        timelines: in chronological order.
    """

    name: str
    run: str
    is_complete: bool
    timelines: list[Timeline]


def load_trace(path: str | os.PathLike[str]) -> list[Timeline]:
    """Read a trace file, or a folder of the files `rank-N.json` that a run's ranks wrote, as one trace.

    After an error in the run, the steps that all ranks had completed are read.

    Raises:
        ConfigurationError: a file is not a trace that bpipe wrote, or a damaged one; or the files of a folder do not belong
            together, or one is missing.
        OSError: there is nothing to read.
    """
    path = Path(path)
    if not path.is_dir():
        return parse(path.read_bytes(), str(path)).timelines
    files = sorted(path.glob("rank-*.json"))
    if not files:
        raise ConfigurationError(f"{path} has no files rank-0.json, rank-1.json ...: give the folder that bpipe.trace wrote to")
    return list(joined([parse(file.read_bytes(), str(file)) for file in files]))


def joined(files: Sequence[TraceFile]) -> list[Measured]:
    """Join the files of all ranks of a run into one trace.

    Raises:
        ConfigurationError: they do not belong together, or one is missing.
    """
    first = files[0]
    for file in files:
        if file.run != first.run or not file.run:
            raise ConfigurationError(f"{file.name} is not of the same run as {first.name}: keep the files of one run")
    counts = [len(file.timelines) for file in files]
    if min(counts) != max(counts) and all(file.is_complete for file in files):
        fewest, most = (files[counts.index(count)].name for count in (min(counts), max(counts)))
        raise ConfigurationError(f"{fewest} has {min(counts)} steps and {most} has {max(counts)}: a file is not the whole trace")
    columns = [[part for part in file.timelines if isinstance(part, Measured)] for file in files]
    return [merged(parts) for parts in zip(*columns)]


def parse(data: bytes | str, name: str) -> TraceFile:
    """Parse a trace file's text.

    Raises:
        ConfigurationError: it is not a trace that bpipe wrote, or a damaged one.
    """
    try:
        return _read(json.loads(data), name)
    except BPipeError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{name} is not a trace, because it is not JSON: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigurationError(f"{name} is a damaged trace: {type(error).__name__}, {error}") from error


def _read(trace: Any, name: str) -> TraceFile:
    about = trace.get("otherData") if isinstance(trace, dict) else None
    if isinstance(about, dict) and about.get("format") == EARLIER:
        raise ConfigurationError(
            f"a trace of an earlier bpipe, {EARLIER!r}: its bytes include static memory in some plans and not in others, "
            "so that they cannot be compared: trace the steps again"
        )
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ConfigurationError(f"not a trace that this version of bpipe wrote: otherData.format is not {FORMAT!r}")
    plans = [_Places(Plan.from_text(text)) for text in about["plans"]]
    drafts = [_Draft(header, _item(plans, header["plan"], "plan")) for header in about["timelines"]]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            _item(drafts, event["args"]["timeline"], "timeline").enter(event)
    return TraceFile(
        name=name,
        run=str(about["run"]),
        is_complete=bool(about["is_complete"]),
        timelines=[draft.finish() for draft in drafts],
    )


def _item(items: Sequence[Any], index: int, what: str) -> Any:
    if not 0 <= index < len(items):
        raise ConfigurationError(f"a damaged trace: there is no {what} {index} among {len(items)}")
    return items[index]


class _Places:
    """The places of each action of a plan, by its text: its rank's compute lane (0) or served lane (1), and its index there.

    An action that concerns a whole stage may be in several places.
    """

    def __init__(self, plan: Plan) -> None:
        if len(plan.served) != plan.num_ranks:
            raise ConfigurationError(f"a damaged plan: {plan.num_ranks} compute lanes and {len(plan.served)} served lanes")
        self.plan = plan
        self.of_rank: list[dict[str, list[tuple[int, int]]]] = [defaultdict(list) for _ in plan.actions]
        for places, *lanes in zip(self.of_rank, plan.actions, plan.served):
            for kind, lane in enumerate(lanes):
                for index, action in enumerate(lane):
                    places[str(action)].append((kind, index))
        self.of_computations = [{str(a): i for i, a in enumerate(computed(plan, rank))} for rank in range(plan.num_ranks)]


class _Filling:
    """A lane that is being read."""

    def __init__(self, length: int) -> None:
        self.begin_s, self.end_s = array("d", [nan]) * length, array("d", [nan]) * length
        self.held_bytes: dict[int, tuple[int, int]] = {}  # of activations, and of messages

    def is_free(self, index: int) -> bool:
        return isnan(self.begin_s[index])

    def enter(self, index: int, begin_ns: int, end_ns: int) -> None:
        if not self.is_free(index):
            raise ConfigurationError("a damaged trace: the action is there twice")
        self.begin_s[index], self.end_s[index] = begin_ns / 1e9, end_ns / 1e9

    def finish(self, static_bytes: int = 0, remote_buffer_bytes: int = 0) -> Lane:
        if self.held_bytes and len(self.held_bytes) != len(self.begin_s):
            raise ConfigurationError("a damaged trace: only some actions say how many bytes were held")
        held = [self.held_bytes[index] for index in sorted(self.held_bytes)]
        return Lane(
            begin_s=self.begin_s,
            end_s=self.end_s,
            activation_bytes=array("q", [activations for activations, _ in held]),
            message_bytes=array("q", [messages for _, messages in held]),
            static_bytes=static_bytes,
            remote_buffer_bytes=remote_buffer_bytes,
        )


class _Draft:
    """A timeline that is being read."""

    def __init__(self, header: Event, places: _Places) -> None:
        plan = self._plan = places.plan
        self._header, self._places = header, places
        self._lanes = {
            rank: (_Filling(len(plan.actions[rank])), _Filling(len(plan.served[rank])))
            for rank in range(plan.num_ranks)
            if rank in header["ranks"]
        }
        self._device = {rank: _Filling(len(places.of_computations[rank])) for rank in self._lanes}
        self._has_device: set[int] = set()

    def enter(self, event: Event) -> None:
        """Enter a slice's times and bytes."""
        args, rank = event["args"], event["pid"] - 1
        if rank not in self._lanes:
            raise ConfigurationError(f"a damaged trace: times of rank {rank}, which is not among {self._header['ranks']}")
        is_device = event["cat"] == DEVICE
        if args["action"] not in (self._places.of_computations[rank] if is_device else self._places.of_rank[rank]):
            raise ConfigurationError(f"{args['action']} is not an action of rank {rank} in the plan {self._plan.name}")
        begin_ns = round(event["ts"] * 1000) - self._header["start_ns"]
        end_ns = begin_ns + (args["ns"] if "ns" in args else round(event["dur"] * 1000))
        if is_device:
            self._has_device.add(rank)
            self._device[rank].enter(self._places.of_computations[rank][args["action"]], begin_ns, end_ns)
            return
        places = self._places.of_rank[rank][args["action"]]
        kind, index = next((place for place in places if self._lanes[rank][place[0]].is_free(place[1])), places[-1])
        lane = self._lanes[rank][kind]
        lane.enter(index, begin_ns, end_ns)
        if "activation_bytes" in args:
            lane.held_bytes[index] = args["activation_bytes"], args["message_bytes"]

    def finish(self) -> Timeline:
        header = self._header
        for rank, lanes in self._lanes.items():
            self._check_filled(rank, lanes)
        empty = _Filling(0), _Filling(0)
        idle = list(zip(map(int, header["static_bytes"]), map(int, header["remote_buffer_bytes"])))
        both = [(self._lanes.get(rank, empty), _item(idle, rank, "rank")) for rank in range(self._plan.num_ranks)]
        known: dict[str, Any] = {
            "plan": self._plan,
            "actions": tuple(lanes[0].finish(*of_rank) for lanes, of_rank in both),
            "served": tuple(lanes[1].finish() for lanes, _ in both),
            "source": str(header["source"]),
            "step": header["step"],
        }
        if header["clock_error_s"] is None:
            return Timeline(**known)
        device = tuple(
            (self._device[rank] if rank in self._has_device else _Filling(0)).finish() for rank in range(self._plan.num_ranks)
        )
        errors = tuple(map(float, header["clock_error_s"]))
        return Measured(**known, began_s=header["start_ns"] / 1e9, device=device, clock_error_s=errors)

    def _check_filled(self, rank: int, lanes: tuple[_Filling, _Filling]) -> None:
        missing = [str(action) for action, begin_s in zip(self._plan.actions[rank], lanes[0].begin_s) if isnan(begin_s)]
        served = list(zip(self._plan.served[rank], lanes[1].begin_s))
        serving = {action.peer for action, begin_s in served if not isnan(begin_s)}  # for others, there was nothing to do
        missing += [str(action) for action, begin_s in served if isnan(begin_s) and action.peer in serving]
        if missing:
            raise ConfigurationError(f"a damaged trace: no times of {', '.join(missing[:4])} on rank {rank}")
        if rank in self._has_device and any(map(isnan, self._device[rank].begin_s)):
            raise ConfigurationError(f"a damaged trace: the device's times of rank {rank} are not complete")
