"""Read trace files back: a file as the timelines it was written from, the files of a run's ranks as one trace."""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any

from bpipe.errors import BPipeError, ConfigurationError, printable
from bpipe.plan.plan import Plan
from bpipe.plan.text import read_stage
from bpipe.simulator.timeline import Lane, Timeline
from bpipe.tools.measured import Measured, computed, merged
from bpipe.verifier.proof import verify

__all__ = ["load_trace"]

FORMAT = "bpipe-trace 3"
EARLIER = "bpipe-trace 1"
DEVICE = "device"
FILL_JOB = "fill job"

MOST_NUMBER = 2**62  # of nanoseconds or bytes
MOST_SHOWN = 60  # characters of what is damaged, in an error
MOST_ABSENT = 500  # actions without times for each one that has some: they take memory, and no text
UNKNOWN = nan, nan
MOST_TOLD = 4  # actions or ranks, in an error

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """The contents of a trace file."""

    name: str  # the file's name, for errors
    run: str  # the same in all files of a run
    is_complete: bool  # False if an error ended the trace
    timelines: list[Timeline]  # in chronological order


def load_trace(path: str | os.PathLike[str]) -> list[Timeline]:
    """Read a trace file, or a folder of the files `rank-N.json` that a run's ranks wrote, as one trace.

    After an error in the run, the steps that all ranks had completed are read.

    Raises:
        ConfigurationError: a file is not a trace that bpipe wrote, or a damaged one; or the files of a folder do not belong
            together, or one is missing.
        OSError: there is nothing to read.

    Example:
        >>> import tempfile
        >>> from bpipe.schedules import Costs, build, simulate
        >>> from bpipe.tools.chrome import save_trace
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_trace([simulate(build("1f1b", 2, 4), Costs(forward_s=0.1))], f"{folder}/step.json")
        ...     (step,) = load_trace(f"{folder}/step.json")
        >>> round(step.makespan_s, 3)
        1.5
    """
    path = Path(path)
    if not path.is_dir():
        return parse(path.read_bytes(), str(path)).timelines
    files = sorted(path.glob("rank-*.json"))
    if not files:
        raise ConfigurationError(f"{path} has no files rank-0.json, rank-1.json ...: give the folder that bpipe.trace wrote to")
    return list(joined([parse(file.read_bytes(), str(file)) for file in files]))


def joined(files: Sequence[TraceFile]) -> list[Measured]:
    """Join the files of all ranks of a run into one trace."""
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
    """Parse a trace file's text."""
    try:
        return _read(json.loads(data), name)
    except BPipeError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{name} is not a trace, because it is not JSON: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigurationError(f"{name} is a damaged trace: {type(error).__name__}, {printable(str(error))[:200]}") from error


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
        name=name, run=str(about["run"]), is_complete=bool(about["is_complete"]), timelines=[draft.finish() for draft in drafts]
    )


def _item(items: Sequence[Any], index: int, what: str) -> Any:
    if not 0 <= index < len(items):
        raise ConfigurationError(f"a damaged trace: there is no {what} {index} among {len(items)}")
    return items[index]


class _Places:
    """Where each action of a plan stands, by its text: in its rank's compute lane or, counted on, in its served lane.

    An action that concerns a whole stage may be in several places.
    """

    def __init__(self, plan: Plan) -> None:
        verify(plan)
        self.plan = plan
        self.lanes = [(*own, *served) for own, served in zip(plan.actions, plan.served)]
        self.of_rank: list[dict[str, list[int]]] = [defaultdict(list) for _ in self.lanes]
        for places, lane in zip(self.of_rank, self.lanes):
            for index, action in enumerate(lane):
                places[plan.show(action)].append(index)
        self.of_computations = [{plan.show(a): i for i, a in enumerate(computed(plan, rank))} for rank in range(plan.num_ranks)]


class _Filling:
    """The slices of a lane that have been read, by their places: no more than a file has, however many actions its plans have."""

    def __init__(self) -> None:
        self.times_s: dict[int, tuple[float, float]] = {}
        self.held_bytes: dict[int, tuple[int, int]] = {}  # of activations, and of messages
        self.filled_s: list[tuple[float, float]] = []  # when pieces of a fill job ran

    def enter(self, index: int, begin_ns: int, end_ns: int) -> None:
        if index in self.times_s:
            raise ConfigurationError("a damaged trace: the action is there twice")
        self.times_s[index] = begin_ns / 1e9, end_ns / 1e9

    def finish(self, part: range, static_bytes: int = 0, remote_buffer_bytes: int = 0, *, is_own: bool = False) -> Lane:
        """Return a part of the lane, in which the times of what a rank did not do are unknown."""
        held = [self.held_bytes[index] for index in part if index in self.held_bytes]
        if held and len(held) != len(part):
            raise ConfigurationError("a damaged trace: only some actions say how many bytes were held")
        return Lane(
            begin_s=array("d", [self.times_s.get(index, UNKNOWN)[0] for index in part]),
            end_s=array("d", [self.times_s.get(index, UNKNOWN)[1] for index in part]),
            activation_bytes=array("q", [activations for activations, _ in held]),
            message_bytes=array("q", [messages for _, messages in held]),
            static_bytes=static_bytes,
            remote_buffer_bytes=remote_buffer_bytes,
            filled_s=array("d", [second for piece in sorted(self.filled_s) for second in piece] if is_own else []),
        )


class _Draft:
    """A timeline that is being read."""

    def __init__(self, header: Event, places: _Places) -> None:
        num_ranks = places.plan.num_ranks
        self._places, self._plan = places, places.plan
        self._start_ns = _integer(header["start_ns"])
        self._step = None if header["step"] is None else _integer(header["step"])
        self._source = str(header["source"])
        if self._source not in ("simulated", "measured"):
            raise ConfigurationError(f"a damaged trace: it is {self._source[:MOST_SHOWN]!r}, neither simulated nor measured")
        self._idle = list(zip(map(_integer, header["static_bytes"]), map(_integer, header["remote_buffer_bytes"]), strict=True))
        errors_s = header["clock_error_s"]
        self._errors_s = None if errors_s is None else tuple(float(_number(error)) for error in errors_s)
        texts = header.get("stage_sizes", {})  # which files of earlier versions lack
        self._sizes = {int(stage): tuple(read_stage(text.split()) for text in of_stage) for stage, of_stage in texts.items()}
        alike = {places.plan.slices}.issuperset(map(len, self._sizes.values()))
        if not alike or not self._sizes.keys() <= set(range(places.plan.num_stages)):
            raise ConfigurationError("a damaged trace: its sizes are of other stages or slices than its plan's")
        if not len(self._idle) == num_ranks == len(self._idle if self._errors_s is None else self._errors_s):
            raise ConfigurationError(
                f"a damaged trace: a timeline of a plan of {num_ranks} ranks describes another number of ranks"
            )
        self._lanes = {rank: _Filling() for rank in sorted(map(_integer, header["ranks"])) if 0 <= rank < num_ranks}
        self._device = {rank: _Filling() for rank in self._lanes}
        self._num_entered: dict[tuple[int, str], int] = defaultdict(int)  # of actions that are in several places

    def enter(self, event: Event) -> None:
        """Enter a slice's times and bytes."""
        args, rank = event["args"], event["pid"] - 1
        if rank not in self._lanes:
            raise ConfigurationError(f"a damaged trace: times of rank {rank}, which is not among {list(self._lanes)[:MOST_TOLD]}")
        text, is_device = args["action"], event["cat"] == DEVICE
        begin_ns = round(_number(event["ts"]) * 1000) - self._start_ns
        end_ns = begin_ns + (_integer(args["ns"]) if "ns" in args else round(_number(event["dur"]) * 1000))
        if event["cat"] == FILL_JOB:
            self._lanes[rank].filled_s.append((begin_ns / 1e9, end_ns / 1e9))
            return
        if text not in (self._places.of_computations[rank] if is_device else self._places.of_rank[rank]):
            raise ConfigurationError(
                f"{printable(str(text))[:MOST_SHOWN]} is not an action of rank {rank} in the plan {self._plan.name}"
            )
        if is_device:
            self._device[rank].enter(self._places.of_computations[rank][text], begin_ns, end_ns)
            return
        index = self._place(rank, text)
        self._lanes[rank].enter(index, begin_ns, end_ns)
        if "activation_bytes" in args:
            self._lanes[rank].held_bytes[index] = _integer(args["activation_bytes"]), _integer(args["message_bytes"])

    def _place(self, rank: int, text: str) -> int:
        """Return the place of an action: the next one, of an action that is in several."""
        places = self._places.of_rank[rank][text]
        if len(places) == 1:
            return places[0]
        entered = self._num_entered[rank, text] = self._num_entered[rank, text] + 1
        return places[min(entered, len(places)) - 1]

    def finish(self) -> Timeline:
        self._check_filled()
        empty = cache(partial(_Filling().finish, range(0)))  # ranks without times share their lanes
        actions, served, device = [], [], []
        for rank, (idle, all_actions) in enumerate(zip(self._idle, self._places.lanes)):
            num_own, lane = len(self._plan.actions[rank]), self._lanes.get(rank)
            actions.append(empty(*idle) if lane is None else lane.finish(range(num_own), *idle, is_own=True))
            served.append(empty() if lane is None else lane.finish(range(num_own, len(all_actions))))
            times = self._device[rank].times_s if rank in self._device else ()
            device.append(self._device[rank].finish(range(len(times))) if times else empty())
        known: dict[str, Any] = {
            "plan": self._plan,
            "actions": tuple(actions),
            "served": tuple(served),
            "source": self._source,
            "step": self._step,
        }
        if self._errors_s is None:
            return Timeline(**known)
        known |= {"device": tuple(device), "clock_error_s": self._errors_s, "stage_sizes": self._sizes}
        return Measured(**known, began_s=self._start_ns / 1e9)

    def _check_filled(self) -> None:
        for rank, lane in self._lanes.items():
            actions, on_device = self._places.lanes[rank], self._device[rank].times_s
            num_own = len(self._plan.actions[rank])
            serving = {actions[index].peer for index in lane.times_s if index >= num_own}  # for others, there was nothing to do
            absent = [] if len(lane.times_s) == len(actions) else [i for i in range(len(actions)) if i not in lane.times_s]
            missing = (str(actions[i]) for i in absent if i < num_own or actions[i].peer in serving)
            if told := ", ".join(islice(missing, MOST_TOLD)):
                raise ConfigurationError(f"a damaged trace: no times of {told} on rank {rank}")
            if len(absent) > MOST_ABSENT * len(lane.times_s):
                raise ConfigurationError(f"a damaged trace: {len(absent)} actions of rank {rank} have no times")
            if on_device and len(on_device) < len(self._places.of_computations[rank]):
                raise ConfigurationError(f"a damaged trace: the device's times of rank {rank} are not complete")


def _number(value: Any) -> float:
    """Check a number before anything is computed with it: multiplied, a text or a list would fill the memory."""
    if type(value) not in (int, float) or not -MOST_NUMBER < value < MOST_NUMBER:
        raise ConfigurationError(f"a damaged trace: {value!r:.{MOST_SHOWN}} is not a number of a trace")
    return value  # type: ignore[no-any-return]


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ConfigurationError(f"a damaged trace: {value!r:.{MOST_SHOWN}} is not a whole number")
    return int(_number(value))
