"""Record when every action of a schedule's steps really ran, on all ranks and on one clock."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import nan
from pathlib import Path
from types import TracebackType

from bpipe.api.loopback import LoopbackGroup
from bpipe.api.schedule import Schedule
from bpipe.cleanup import noted_on
from bpipe.comm.health.clocks import Clocks, Offset, align
from bpipe.comm.health.collective import Collective
from bpipe.device import is_asynchronous
from bpipe.device.times import DeviceTimes
from bpipe.engine.recorder import RecordedStep, Recorder
from bpipe.errors import AgreementError, ConfigurationError
from bpipe.not_copied import NotCopied
from bpipe.plan.action import WAIT_OF
from bpipe.session.session import Session
from bpipe.simulator.measured import Measured, merged
from bpipe.simulator.timeline import Lane
from bpipe.tools.chrome import lines
from bpipe.tools.trace_record import Origin, joined, packed, parse
from bpipe.whole_file import write_whole

__all__ = ["Trace", "trace"]


def trace(schedule: Schedule | Sequence[Schedule], path: str | os.PathLike[str] | None = None) -> Trace:
    """Record the steps of a schedule, both `step` and `eval`, for as long as the result is entered.

    Entering is collective over the pipeline and blocks for some milliseconds while the ranks' clocks are compared (and a
    CUDA device is waited for). Nothing else communicates, and nothing waits for a device inside a step: leaving is not
    collective, not even after an error. A step that fails is not recorded; the ones before it are kept and written.

    `clock_error_s` of a timeline bounds how wrong a rank's clock was on entering. Clocks of different machines drift apart
    afterwards, which nothing bounds: trace some steps, not hours. Memory: 24 bytes per action and step, 16 for a remote
    activation's.

    Args:
        schedule: this rank's schedule, or all schedules of a `Loopback` in the order of its ranks.
        path: a folder, created if it is missing, that gets a file `rank-N.json` from each rank N of the plan: Chrome's trace
            format, which https://ui.perfetto.dev opens. `bpipe.load_trace` reads the folder as one trace; files of an earlier
            trace there are replaced, or removed where it had more ranks.

    Raises:
        ConfigurationError: on entering, the schedule is being traced already, or the path is a file.
        AgreementError: on entering, another rank cannot trace, traces another plan, or steps meanwhile.
        PipelineBrokenError: on entering, the schedule is closed, broken, or inside a step.

    Example:
        >>> import bpipe, torch
        >>> from torch import nn
        >>> loopback = bpipe.Loopback(2)
        >>> stages = [bpipe.PipelineStage(nn.Linear(4, 4), i, 2, "cpu", loopback.rank(i)) for i in range(2)]
        >>> schedules = [bpipe.OneFOneB(stage, 4, loss_fn=nn.functional.mse_loss) for stage in stages]
        >>> with trace(schedules) as t:
        ...     _ = loopback.step(schedules, torch.ones(8, 4), target=torch.ones(8, 4))
        >>> [str(span.action) for span in t.timelines[0].computations(rank=1)][:4]
        ['1F0', '1B0', '1F1', '1B1']
    """
    schedules = [schedule] if isinstance(schedule, Schedule) else list(schedule) if isinstance(schedule, (list, tuple)) else []
    return Trace(schedules, path)


class Trace(NotCopied):
    """The context manager that `trace` returns, to be entered once; afterwards it has what it recorded."""

    instead_of_a_copy = "it follows schedules of this process. Copy its timelines, or what gather() returns"

    def __init__(self, schedules: list[Schedule], path: str | os.PathLike[str] | None) -> None:
        _check_together(schedules)
        self._schedules = schedules
        self._path = None if path is None else Path(path)
        self._recorders: list[Recorder] = []
        self._sessions: list[Session] = []  # which stay the same if a schedule is balanced meanwhile
        self._clocks: Clocks | None = None
        self._is_complete = True

    def __repr__(self) -> str:
        state = "not entered" if self._clocks is None else f"{max((len(one.records) for one in self._recorders), default=0)} steps"
        return f"Trace(of {len(self._schedules)} schedules, {state}{'' if self._path is None else f', in {self._path}'})"

    def __enter__(self) -> Trace:
        if self._clocks is not None:
            raise ConfigurationError("a trace is entered once: call bpipe.trace(...) again")
        with ExitStack() as guards:
            for schedule in self._schedules:
                guards.enter_context(schedule.session.guard.entered())
            self._clocks = self._aligned(self._problem())
        devices = [schedule.session.context.transport.device for schedule in self._schedules]
        self._recorders = [Recorder(DeviceTimes(device) if is_asynchronous(device) else None) for device in devices]
        self._sessions = [schedule.session for schedule in self._schedules]
        for session, recorder in zip(self._sessions, self._recorders):
            session.observer = recorder
        return self

    def _problem(self) -> str:
        """Return why this rank cannot trace, or an empty text if it can."""
        if any(schedule.session.observer is not None for schedule in self._schedules):
            return "this schedule is being traced already: leave that trace first"
        if self._path is not None and self._path.exists() and not self._path.is_dir():
            return f"{self._path} is a file: give the folder that gets a file from each rank"
        return ""

    def _aligned(self, problem: str) -> Clocks:
        first = self._schedules[0].session
        if problem:
            with first.guard.failing_together():
                first.context.transport.refuse(problem)
            raise ConfigurationError(problem)
        ranks = tuple(schedule.session.context.plan_rank for schedule in self._schedules)
        if not isinstance(first.context.group, LoopbackGroup):
            with first.guard.failing_together(AgreementError):
                return align(first.context.transport.exchange, first.source.announced(is_training=True).fingerprint, *ranks)
        return Clocks(os.urandom(16), ranks, (Offset(0, 0),) * len(ranks), time.perf_counter_ns())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for session in self._sessions:
            session.observer = None
        self._is_complete = error is None
        with noted_on(error, "nor could the trace be written"):
            for recorder in self._recorders:
                if recorder.device_times is not None:
                    recorder.device_times.resolve(wait=error is None)  # what failed may leave the device waiting for ever
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.mkdir(parents=True, exist_ok=True)
        num_ranks = self._schedules[0].plan.num_ranks
        for session, part in zip(self._sessions, self._parts()):
            if (rank := session.context.plan_rank) == 0:
                _remove_others(self._path, num_ranks)
            write_whole(self._path / f"rank-{rank}.json", lines(part, self._origin()))

    def _origin(self) -> Origin:
        assert self._clocks is not None
        return Origin(run=self._clocks.token.hex(), is_complete=self._is_complete)

    def _parts(self) -> Iterator[list[Measured]]:
        """Yield the steps of each schedule here, with its own rank's times."""
        assert self._clocks is not None
        for session, recorder in zip(self._sessions, self._recorders):
            yield timelines_of(recorder.records, session.context.plan_rank, self._clocks)

    @property
    def timelines(self) -> list[Measured]:
        """The steps recorded so far, made again at each access.

        On a `Loopback` they have the times of all ranks. Over a process group they have those of this rank, and the lanes of the
        others are empty: `gather` returns the steps with all of them.
        """
        if self._clocks is None:
            return []
        first, *others = self._parts()
        return [merged(steps) for steps in zip(first, *others)] if others else first

    def gather(self) -> list[Measured]:
        """Return the steps recorded so far with the times of all ranks, on every rank. Collective over the pipeline; blocks.

        Raises:
            ConfigurationError: the trace was not entered, or the ranks recorded different steps.
            AgreementError: another rank does something else meanwhile.
            PipelineBrokenError: the schedule is closed, broken, or inside a step.
        """
        if self._clocks is None:
            raise ConfigurationError("this trace was never entered: write `with bpipe.trace(schedule) as t:`")
        first = self._schedules[0].session
        if isinstance(first.context.group, LoopbackGroup):
            return self.timelines
        with first.guard.entered(), first.guard.failing_together(AgreementError):
            (part,) = self._parts()
            files = first.context.transport.exchange(Collective.GATHER, "".join(packed(part, self._origin())).encode())
        return joined([parse(data, f"rank {rank}") for rank, data in enumerate(files)])


def _remove_others(folder: Path, num_ranks: int) -> None:
    """Remove what an earlier trace of more ranks left: `load_trace` would take the files for one trace."""
    ours = {f"rank-{rank}.json" for rank in range(num_ranks)}
    for file in folder.glob("rank-*.json"):
        if file.name not in ours:
            file.unlink(missing_ok=True)


def _check_together(schedules: Sequence[Schedule]) -> None:
    groups = [schedule.group for schedule in schedules]
    if not groups or (len(groups) > 1 and not isinstance(groups[0], LoopbackGroup)):
        raise ConfigurationError(f"{len(groups)} schedules: trace one at a time; only those of a Loopback go together, as a list")
    if isinstance(groups[0], LoopbackGroup):
        loopback = groups[0].loopback
        if groups != [loopback.rank(rank) for rank in range(loopback.num_ranks)]:
            raise ConfigurationError(
                f"a Loopback is traced as a whole: give a list of its {loopback.num_ranks} schedules, in the order of the ranks"
            )


def _seconds(times_ns: array[int], began_ns: int) -> array[float]:
    """Return times in seconds since the step began; nan for what did not happen, whose time is 0."""
    return array("d", [(ns - began_ns) / 1e9 if ns else nan for ns in times_ns])


def timelines_of(records: Iterable[RecordedStep], rank: int, clocks: Clocks) -> list[Measured]:
    """Return a rank's records as timelines on the clock that all ranks have."""
    by_rank = dict(zip(clocks.plan_ranks, clocks.offsets))
    errors = tuple(by_rank[one].error_ns / 1e9 for one in sorted(by_rank))
    return [_timeline_of(record, rank, clocks.zero_ns + by_rank[rank].offset_ns, errors) for record in records]


def _timeline_of(record: RecordedStep, rank: int, zero_ns: int, errors: tuple[float, ...]) -> Measured:
    """Return a record as a timeline on the trace's clock, whose zero is `zero_ns` on this rank's clock."""
    places = record.places
    plan, own = places.plan, slice(None, places.num_own)
    began_ns = min(filter(None, record.begin_ns))
    begin_s, end_s = (_seconds(times_ns, began_ns) for times_ns in (record.begin_ns, record.end_ns))
    for action, index in places.index.items():
        if action.is_post:  # a transfer is under way until it is known to be complete
            end_s[index] = end_s[places.index[action._replace(op=WAIT_OF[action.op])]]
    messages = array("q", [max(0, taken - live) for taken, live in zip(record.taken_bytes, record.live_bytes)])
    device_s = _seconds(record.device_ns, began_ns)
    served = slice(places.num_own, None)
    return Measured(
        plan=plan,
        actions=_only(
            rank,
            plan.num_ranks,
            Lane(
                begin_s=begin_s[own],
                end_s=end_s[own],
                activation_bytes=record.live_bytes,
                message_bytes=messages,
                static_bytes=record.static_bytes,
                remote_buffer_bytes=record.remote_buffer_bytes,
                filled_s=_seconds(record.filled_ns, began_ns),
            ),
        ),
        served=_only(rank, plan.num_ranks, Lane(begin_s=begin_s[served], end_s=end_s[served])),
        device=_only(rank, plan.num_ranks, Lane(begin_s=device_s[::2], end_s=device_s[1::2])),
        source="measured",
        step=record.step,
        began_s=(began_ns - zero_ns) / 1e9,
        clock_error_s=errors,
        stage_sizes=record.stage_sizes,
    )


def _only(rank: int, num_ranks: int, lane: Lane) -> tuple[Lane, ...]:
    return tuple(lane if other == rank else Lane(begin_s=array("d"), end_s=array("d")) for other in range(num_ranks))
