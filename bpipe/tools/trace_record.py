"""Write timelines as records, in trace files and between ranks, and read them back, checked against the plans that they are of.

A trace file has each time twice: as an event, which Perfetto draws, and as a number here, from which the timeline is read again.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.comm.wire.codec import encode, read_record
from bpipe.errors import BPipeError, ConfigurationError, printable
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import StageSizes
from bpipe.simulator.timeline import Lane, Timeline
from bpipe.tools.measured import Measured, computed, merged
from bpipe.verifier.proof import verify

__all__ = ["load_trace"]

FORMAT = "bpipe-trace 4"
MOST_S = 2**32  # seconds

Seconds = tuple[float | None, ...]  # None where a time is not known


class Origin(NamedTuple):
    """The run that a trace comes from."""

    run: str = ""  # a token that is the same on all ranks of a run and in no other run; empty for what was not measured together
    is_complete: bool = True  # False if an error ended it, so that other ranks may have got further


class LaneRecord(NamedTuple):
    """A `Lane`; of a rank that was not recorded it is empty."""

    begin_s: Seconds
    end_s: Seconds
    activation_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    static_bytes: int
    remote_buffer_bytes: int
    filled_s: tuple[float, ...]

    @classmethod
    def of(cls, lane: Lane) -> LaneRecord:
        begin_s, end_s = (tuple(None if isnan(second) else second for second in times) for times in (lane.begin_s, lane.end_s))
        held = tuple(lane.activation_bytes), tuple(lane.message_bytes)
        return cls(begin_s, end_s, *held, lane.static_bytes, lane.remote_buffer_bytes, tuple(lane.filled_s))

    def read(self, num_actions: int, where: str, *, may_be_unknown: bool = False) -> Lane:
        """Return the lane, which has times of all of so many actions or of none."""
        times, held = [*map(len, self[:2])], [*map(len, self[2:4])]
        if times not in ([0, 0], [num_actions] * 2) or held not in ([0, 0], times) or len(self.filled_s) % 2:
            raise ConfigurationError(f"a damaged trace: times or bytes of {where} are missing, or there are too many")
        unknown = [(begin is None, end is None) for begin, end in zip(self.begin_s, self.end_s) if begin is None or end is None]
        if unknown and not (may_be_unknown and all(map(all, unknown))):
            raise ConfigurationError(f"a damaged trace: a time of {where} is not known")
        numbers = (number or 0 for times in (self.begin_s, self.end_s, self.filled_s) for number in times)
        if not all(-MOST_S < number < MOST_S for number in numbers):
            raise ConfigurationError(f"a damaged trace: a time of {where} is more than {MOST_S} s")
        begin_s, end_s = (array("d", [nan if second is None else second for second in times]) for times in self[:2])
        return Lane(
            begin_s=begin_s,
            end_s=end_s,
            activation_bytes=array("q", self.activation_bytes),
            message_bytes=array("q", self.message_bytes),
            static_bytes=self.static_bytes,
            remote_buffer_bytes=self.remote_buffer_bytes,
            filled_s=array("d", self.filled_s),
        )


class Measurement(NamedTuple):
    """What a `Measured` has beside a `Timeline`."""

    began_s: float
    device: tuple[LaneRecord, ...]
    clock_error_s: tuple[float, ...]
    stage_sizes: Mapping[int, tuple[StageSizes, ...]]


class TimelineRecord(NamedTuple):
    """A timeline of one of a trace's plans, which its number names."""

    plan: int
    source: str
    step: int | None
    actions: tuple[LaneRecord, ...]
    served: tuple[LaneRecord, ...]
    measurement: Measurement | None

    @classmethod
    def of(cls, timeline: Timeline, plan: int) -> TimelineRecord:
        measurement = None
        if isinstance(timeline, Measured):
            device = _records(timeline.device)
            measurement = Measurement(timeline.began_s, device, timeline.clock_error_s, timeline.stage_sizes)
        lanes = _records(timeline.actions), _records(timeline.served)
        return cls(plan, timeline.source, timeline.step, *lanes, measurement)

    def read(self, plans: Sequence[Plan]) -> Timeline:
        if not 0 <= self.plan < len(plans):
            raise ConfigurationError(f"a damaged trace: there is no plan {self.plan} among {len(plans)}")
        if self.source not in ("simulated", "measured"):
            raise ConfigurationError(f"a damaged trace: it is {self.source[:60]!r}, neither simulated nor measured")
        plan = plans[self.plan]
        ranks = range(plan.num_ranks)
        by_rank = [self.actions, self.served, *(() if self.measurement is None else self.measurement[1:3])]
        if any(len(each) != plan.num_ranks for each in by_rank):
            raise ConfigurationError(
                f"a damaged trace: a timeline of a plan of {plan.num_ranks} ranks describes another number of ranks"
            )
        known: dict[str, Any] = {
            "plan": plan,
            "actions": tuple(self.actions[rank].read(len(plan.actions[rank]), f"rank {rank}") for rank in ranks),
            "served": tuple(
                self.served[rank].read(len(plan.served[rank]), f"what rank {rank} serves", may_be_unknown=True) for rank in ranks
            ),
            "source": self.source,
            "step": self.step,
        }
        if self.measurement is None:
            return Timeline(**known)
        began_s, device, clock_error_s, stage_sizes = self.measurement
        if not set(stage_sizes) <= set(range(plan.num_stages)) or not {plan.slices}.issuperset(map(len, stage_sizes.values())):
            raise ConfigurationError("a damaged trace: its sizes are of other stages or slices than its plan's")
        counts = (len(computed(plan, rank)) if device[rank].begin_s else 0 for rank in ranks)
        lanes = tuple(lane.read(count, f"the device of rank {rank}") for rank, lane, count in zip(ranks, device, counts))
        return Measured(**known, began_s=began_s, device=lanes, clock_error_s=clock_error_s, stage_sizes=stage_sizes)


def _records(lanes: Sequence[Lane]) -> tuple[LaneRecord, ...]:
    return tuple(map(LaneRecord.of, lanes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """The contents of a trace file."""

    name: str  # the file's name, for errors
    origin: Origin
    timelines: list[Timeline]  # in chronological order


def packed(timelines: Sequence[Timeline], origin: Origin) -> Iterator[str]:
    """Yield the text of a record: an object in JSON, with the lines of each plan, and an array for each timeline."""
    plans = list({id(timeline.plan): timeline.plan for timeline in timelines}.values())
    numbers = {id(plan): number for number, plan in enumerate(plans)}
    about = {"format": FORMAT, **origin._asdict(), "plans": [plan.to_text().splitlines() for plan in plans]}
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
    plans = [Plan.from_text("\n".join(lines)) for lines in record["plans"]]
    for plan in plans:
        verify(plan)
    timelines = [read_record(TimelineRecord, fields[1:]).read(plans) for fields in record["timelines"]]
    origin = read_record(Origin, [record["run"], record["is_complete"]])
    return TraceFile(name=name, origin=origin, timelines=timelines)
