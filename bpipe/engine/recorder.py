"""The record of a rank's steps: when each action began and ended on the host's clock, and the bytes held meanwhile."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping

from bpipe.device import Event
from bpipe.device.times import DeviceTimes
from bpipe.engine.run import Observer, Run
from bpipe.memory.ledger import Key
from bpipe.memory.peaks import taken
from bpipe.memory.saved.footprint import Footprint
from bpipe.plan.action import COMPUTE, SERVED
from bpipe.plan.sizes import StageSizes
from bpipe.schedules import Action, Plan

__all__: list[str] = []


class Places:
    """The positions of a rank's actions in a record: its compute lane's, then its acceptor lanes'.

    An action that concerns a whole stage may occur several times; `index` has the last of them.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.num_own, self.num_served = len(plan.actions[rank]), len(plan.served[rank])
        self.index = {action: i for i, action in enumerate((*plan.actions[rank], *plan.served[rank]))}


class RecordedStep:
    """The record of one step: 24 bytes per compute-lane action, 8 more shared by equal steps, 16 per acceptor action, no tensor.

    Args:
        places: where each action is in the arrays.
        step: the step's number.
    """

    __slots__ = (
        "begin_ns",
        "device_ns",
        "end_ns",
        "filled_ns",
        "live_bytes",
        "places",
        "remote_buffer_bytes",
        "stage_sizes",
        "static_bytes",
        "step",
        "taken_bytes",
    )

    def __init__(self, places: Places, step: int) -> None:
        self.places, self.step = places, step
        num_actions = places.num_own + places.num_served
        self.begin_ns = array("q", bytes(8 * num_actions))
        self.end_ns = array("q", bytes(8 * num_actions))
        self.live_bytes = array("q", bytes(8 * places.num_own))  # during the compute lane's actions: its own activations
        self.taken_bytes = array("q")  # the same with messages, which are not counted as they come: shared by equal steps
        self.static_bytes = 0  # bytes that stay: weights, gradients, buffers, optimizer states
        self.remote_buffer_bytes = 0  # reserved for remote activations, or saved by microbatches in common
        self.stage_sizes: dict[int, tuple[StageSizes, ...]] = {}  # what microbatches took on each stage here, by slice
        self.device_ns = array("q")  # begin and end of each computation, on CUDA
        self.filled_ns = array("q")  # begin and end of each piece of a fill job, those before the next step included


class Recorder(Observer):
    """Records the steps of one rank, with two clock readings per action.

    Args:
        device_times: of its CUDA device, or None.
    """

    def __init__(self, device_times: DeviceTimes | None) -> None:
        self.records: list[RecordedStep] = []  # complete ones
        self.device_times = device_times
        self._record: RecordedStep | None = None
        self._places: dict[int, Places] = {}  # by the identity of the plan, which they keep alive
        self._live_bytes = self._num_done = 0  # after the compute lane's last action; and how many actions it has run
        self._pair_begin: Event = None  # of a forward and a backward that run side by side; and how many of them have ended
        self._num_halves = 0
        self._scanned: tuple[Plan | None, Mapping[Key, Footprint], array[int]] = (None, {}, array("q"))

    def started(self, run: Run) -> None:
        places = self._places.get(id(run.plan))
        if places is None:
            places = self._places[id(run.plan)] = Places(run.plan, run.rank)
        self._record = RecordedStep(places, run.step)
        self._live_bytes = self._num_done = self._num_halves = 0
        self._pair_begin = None
        if self.device_times is not None:
            self.device_times.start()

    def before(self, run: Run, action: Action) -> None:
        if self.device_times is not None and action.op in COMPUTE:
            if not run.is_side_by_side:
                self.device_times.mark()
            elif self._pair_begin is None:
                self._pair_begin = self.device_times.moment()
        self._under_way.begin_ns[self._index(run, action)] = time.perf_counter_ns()

    def after(self, run: Run, action: Action) -> None:
        now = time.perf_counter_ns()
        record, index = self._under_way, self._index(run, action)
        record.end_ns[index] = now
        if action.op not in SERVED:
            self._num_done += 1
            # An action allocates memory at its start and frees it at its end: while it runs, the larger amount counts.
            live = run.evictions.ledger.live_bytes
            record.live_bytes[index] = max(self._live_bytes, live)
            self._live_bytes = live
            if self.device_times is not None and action.op in COMPUTE:
                self._mark_end(self.device_times, run)

    def _mark_end(self, times: DeviceTimes, run: Run) -> None:
        """Mark where a computation ends on the device; both of a pair begin with the first one and end with the last one."""
        if not run.is_side_by_side:
            times.mark()
            return
        self._num_halves += 1
        if self._num_halves == 2:
            times.mark_pair(self._pair_begin)
            self._pair_begin, self._num_halves = None, 0

    @property
    def _under_way(self) -> RecordedStep:
        assert self._record is not None, "a step has started"
        return self._record

    def _index(self, run: Run, action: Action) -> int:
        """Return an action's place: the compute lane runs in order, unless the run has a position; acceptor lanes run beside it.

        So do the two of a pair.
        """
        if action.op in SERVED or run.is_side_by_side:
            return self._under_way.places.index[action]
        return self._num_done if run.position is None else run.position

    def filled(self, begin_ns: int, end_ns: int) -> None:
        if self._record is not None:
            self._record.filled_ns.extend((begin_ns, end_ns))

    def finished(self, run: Run, stats: Mapping[str, float]) -> None:
        record = self._under_way
        record.taken_bytes = self._taken(run)
        record.remote_buffer_bytes = int(stats["remote_buffer_bytes"] + stats["held_bytes"])
        record.static_bytes = int(stats["static_bytes"] - stats["held_bytes"])  # the held bytes are activations
        record.stage_sizes = self._sizes(run)
        self.records.append(record)
        if self.device_times is not None:
            self.device_times.finish(record.device_ns)

    def _sizes(self, run: Run) -> dict[int, tuple[StageSizes, ...]]:
        """Return the sizes of a step's microbatches, which steps that are alike share."""
        sizes = run.evictions.settled() if run.plan.has_backward else {}
        return next((one.stage_sizes for one in self.records[-1:] if one.stage_sizes == sizes), sizes)

    def _taken(self, run: Run) -> array[int]:
        """Return the bytes that a rank's microbatches and messages took during each action; scanned again only if they changed."""
        plan, footprints, taken_bytes = self._scanned
        if plan is not run.plan or footprints != run.evictions.ledger.footprints:
            footprints = dict(run.evictions.ledger.footprints)
            taken_bytes = array("q", taken(run.plan, run.rank, footprints, run.exchanges.exchanged, with_messages=True))
            self._scanned = (run.plan, footprints, taken_bytes)
        return taken_bytes
