"""The record of a rank's steps: when each action began and ended on the host's clock, and the bytes live."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping

from bpipe.runtime.device_times import DeviceTimes
from bpipe.runtime.observe import Observer
from bpipe.runtime.run import Run
from bpipe.schedules import Action, Plan
from bpipe.schedules.action import COMPUTE, SERVED

__all__: list[str] = []


class Places:
    """Where a rank's actions are in a record: its compute lane's, then its served lane's.

    What concerns a whole stage may be there several times, and `index` has the last of them.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.num_own, self.num_served = len(plan.actions[rank]), len(plan.served[rank])
        self.index = {action: i for i, action in enumerate((*plan.actions[rank], *plan.served[rank]))}
        self.static_bytes = 0 if plan.sizes is None else plan.sizes.static[rank]


class Record:
    """One step: 24 bytes an action of the compute lane and 16 of the served one, and no tensor.

    Args:
        places: where each action is in the arrays.
        step: the step's number.
    """

    __slots__ = ("always_bytes", "begin_ns", "device_ns", "end_ns", "live_bytes", "places", "step")

    def __init__(self, places: Places, step: int) -> None:
        self.places, self.step = places, step
        num_actions = places.num_own + places.num_served
        self.begin_ns = array("q", bytes(8 * num_actions))
        self.end_ns = array("q", bytes(8 * num_actions))
        self.live_bytes = array("q", bytes(8 * places.num_own))  # of the compute lane's, without `always_bytes`
        self.always_bytes = 0  # held, reserved for guests, and static if the plan says how many
        self.device_ns = array("q")  # begin and end of each computation, on CUDA


class Recorder(Observer):
    """Records the steps of one rank, with two readings of the clock an action.

    Args:
        device_times: of its CUDA device, or None.
    """

    def __init__(self, device_times: DeviceTimes | None) -> None:
        self.records: list[Record] = []  # complete ones
        self.device_times = device_times
        self._places: dict[int, Places] = {}  # by the identity of the plan, which they keep
        self._live_bytes = self._num_done = 0  # after the compute lane's last action; and how many of them were done

    def started(self, run: Run) -> None:
        places = self._places.get(id(run.plan))
        if places is None:
            places = self._places[id(run.plan)] = Places(run.plan, run.rank)
        self._record = Record(places, run.step)
        self._live_bytes = self._num_done = 0
        if self.device_times is not None:
            self.device_times.start()

    def before(self, run: Run, action: Action) -> None:
        if self.device_times is not None and action.op in COMPUTE:
            self.device_times.mark()
        self._record.begin_ns[self._index(action)] = time.perf_counter_ns()

    def after(self, run: Run, action: Action) -> None:
        now = time.perf_counter_ns()
        record, index = self._record, self._index(action)
        record.end_ns[index] = now
        if action.op not in SERVED:
            self._num_done += 1
            # An action that takes memory takes it first, one that gives it back does so last: while it runs, the greater counts.
            live = run.evictions.ledger.live_bytes
            record.live_bytes[index] = max(self._live_bytes, live)
            self._live_bytes = live
            if self.device_times is not None and action.op in COMPUTE:
                self.device_times.mark()

    def _index(self, action: Action) -> int:
        """The compute lane runs in its order; the chains of the served one run beside it, in threads of their own."""
        return self._record.places.index[action] if action.op in SERVED else self._num_done

    def finished(self, run: Run, stats: Mapping[str, float]) -> None:
        record = self._record
        record.always_bytes = int(stats["guest_bytes"]) + (record.places.static_bytes or int(stats["held_bytes"]))
        self.records.append(record)
        if self.device_times is not None:
            self.device_times.finish(record.device_ns)
