"""Write timelines as records, in trace files and between ranks, and read them back, checked against the plans that they are of.

A trace file has each time twice: as an event, which Perfetto draws, and as a number here, from which the timeline is read again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.comm.wire.codec import encode, read_record
from bpipe.errors import BPipeError, ConfigurationError, printable
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import StageSizes
from bpipe.simulator.measured import Measured, computed, merged
from bpipe.simulator.timeline import Lane, Timeline
from bpipe.verifier.proof import verify

__all__ = ["load_trace"]

FORMAT = "bpipe-trace 4"
MOST_S = 2**32  # seconds


class Origin(NamedTuple):
    """The run that a trace comes from."""

    run: str = ""  # a token that is the same on all ranks of a run and in no other run; empty for what was not measured together
    is_complete: bool = True  # False if an error ended it, so that other ranks may have got further


class Measurement(NamedTuple):
    """What a `Measured` has beside a `Timeline`."""

    began_s: float
    device: tuple[Lane, ...]
    clock_error_s: tuple[float, ...]
    stage_sizes: Mapping[int, tuple[StageSizes, ...]]


class TimelineRecord(NamedTuple):
    """A timeline of one of a trace's plans, which its number names."""

    plan: int
    source: str
    step: int | None
    actions: tuple[Lane, ...]
    served: tuple[Lane, ...]
    measurement: Measurement | None

    @classmethod
    def of(cls, timeline: Timeline, plan: int) -> TimelineRecord:
        measurement = None
        if isinstance(timeline, Measured):
            measurement = Measurement(timeline.began_s, timeline.device, timeline.clock_error_s, timeline.stage_sizes)
        return cls(plan, timeline.source, timeline.step, timeline.actions, timeline.served, measurement)

    def read(self, plans: Sequence[Plan]) -> Timeline:
        if not 0 <= self.plan < len(plans):
            raise ConfigurationError(f"a damaged trace: there is no plan {self.plan} among {len(plans)}")
        if self.source not in ("simulated", "measured"):
            raise ConfigurationError(f"a damaged trace: it is {self.source[:60]!r}, neither simulated nor measured")
        plan = plans[self.plan]
        by_rank = [self.actions, self.served, *(() if self.measurement is None else self.measurement[1:3])]
        if any(len(each) != plan.num_ranks for each in by_rank):
            raise ConfigurationError(
                f"a damaged trace: a timeline of a plan of {plan.num_ranks} ranks describes another number of ranks"
            )
        for rank, (own, served) in enumerate(zip(self.actions, self.served)):
            _check(own, len(plan.actions[rank]), f"rank {rank}")
            _check(served, len(plan.served[rank]), f"what rank {rank} serves", may_be_unknown=True)
        known: dict[str, Any] = {**self._asdict(), "plan": plan}
        del known["measurement"]
        if self.measurement is None:
            return Timeline(**known)
        sizes = self.measurement.stage_sizes
        if not sizes.keys() <= set(range(plan.num_stages)) or not {plan.slices}.issuperset(map(len, sizes.values())):
            raise ConfigurationError("a damaged trace: its sizes are of other stages or slices than its plan's")
        for rank, lane in enumerate(self.measurement.device):
            _check(lane, len(computed(plan, rank)) if lane.begin_s else 0, f"the device of rank {rank}")
        return Measured(**known, **self.measurement._asdict())


def _check(lane: Lane, num_actions: int, where: str, *, may_be_unknown: bool = False) -> None:
    """Raise unless a lane has times of so many actions, or of none as that of a rank that was not recorded."""
    times, held = [*map(len, (lane.begin_s, lane.end_s))], [*map(len, (lane.activation_bytes, lane.message_bytes))]
    if times not in ([0, 0], [num_actions] * 2) or held not in ([0, 0], times) or len(lane.filled_s) % 2:
        raise ConfigurationError(f"a damaged trace: times or bytes of {where} are missing, or there are too many")
    unknown = [isnan(begin) and isnan(end) for begin, end in zip(lane.begin_s, lane.end_s) if isnan(begin + end)]
    if unknown and not (may_be_unknown and all(unknown)):
        raise ConfigurationError(f"a damaged trace: a time of {where} is not known")
    known = chain(lane.filled_s, (second for second in (*lane.begin_s, *lane.end_s) if not isnan(second)))
    if not all(abs(second) <= MOST_S for second in known):
        raise ConfigurationError(f"a damaged trace: a time of {where} is not one of at most {MOST_S} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """The contents of a trace file."""

    name: str  # the file's name, for errors
    origin: Origin
    timelines: list[Timeline]  # in chronological order


def packed(timelines: Sequence[Timeline], origin: Origin) -> Iterator[str]:
    """Yield the text of a record: an object in JSON, with the text of each plan and an array for each timeline."""
    plans = list({id(timeline.plan): timeline.plan for timeline in timelines}.values())
    numbers = {id(plan): number for number, plan in enumerate(plans)}
    about = {"format": FORMAT, **origin._asdict(), "plans": [plan.to_text() for plan in plans]}
    yield f'{json.dumps(about)[:-1]}, "timelines": ['
    for number, timeline in enumerate(timelines):
        yield f"{',' if number else ''}\n{encode(TimelineRecord.of(timeline, numbers[id(timeline.plan)])).decode()}"
    yield "\n]}"


def load_trace(path: str | os.PathLike[str]) -> list[Timeline]:
    """Read a trace file, or a folder of the files `rank-N.json` that a run's ranks wrote, as one trace.

    After an error in the run, the steps that all ranks had completed are read.

    Raises:
        ConfigurationError: a file is not a trace that this version of bpipe wrote, or a damaged one; or the files of a folder do
            not belong together, or one is missing.
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
        if file.origin.run != first.origin.run or not file.origin.run:
            raise ConfigurationError(f"{file.name} is not of the same run as {first.name}: keep the files of one run")
    counts = [len(file.timelines) for file in files]
    if min(counts) != max(counts) and all(file.origin.is_complete for file in files):
        fewest, most = (files[counts.index(count)].name for count in (min(counts), max(counts)))
        raise ConfigurationError(f"{fewest} has {min(counts)} steps and {most} has {max(counts)}: a file is not the whole trace")
    columns = [[part for part in file.timelines if isinstance(part, Measured)] for file in files]
    return [merged(parts) for parts in zip(*columns)]


def parse(data: bytes | str, name: str) -> TraceFile:
    """Read the text of a trace file, or of a record alone."""
    try:
        read = json.loads(data)
        return _read(read.get("record", read) if isinstance(read, dict) else None, name)
    except BPipeError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{name} is not a trace, because it is not JSON: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigurationError(f"{name} is a damaged trace: {type(error).__name__}, {printable(str(error))[:200]}") from error


def _read(record: Any, name: str) -> TraceFile:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigurationError(f"not a trace that this version of bpipe wrote, {FORMAT!r}: trace the steps again")
    plans = list(map(Plan.from_text, record["plans"]))
    for plan in plans:
        verify(plan)
    timelines = [read_record(TimelineRecord, fields[1:]).read(plans) for fields in record["timelines"]]
    origin = read_record(Origin, [record["run"], record["is_complete"]])
    return TraceFile(name=name, origin=origin, timelines=timelines)
