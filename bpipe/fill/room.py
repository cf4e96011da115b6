"""What a rank can give a fill job: the seconds that it will wait, and the bytes that nobody uses meanwhile."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Mapping

from bpipe.memory.ledger import Key
from bpipe.memory.peaks import Exchanged, taken
from bpipe.memory.recent import Recent
from bpipe.memory.saved.footprint import Footprint
from bpipe.schedules import Plan

__all__: list[str] = []

LATEST = 5  # steps, of which the shortest wait but one counts: one that was short by chance says nothing
MOST_PLANS = 8


class Waits:
    """How long a rank waits at each place of each plan, as far as the latest steps show. None as a plan: between steps."""

    def __init__(self) -> None:
        self._of = Recent[int, tuple[Plan | None, dict[Hashable, deque[float]]]](MOST_PLANS)  # by the identity of the plan

    def expected(self, plan: Plan | None, place: Hashable) -> float:
        """Return the seconds that a wait will take at least; 0 if it is not known yet."""
        latest = sorted(self._places(plan).get(place, ()))
        return latest[len(latest) > 2] if latest else 0.0

    def learn(self, plan: Plan | None, place: Hashable, seconds: float) -> None:
        """Learn what a wait took, or how long at least there was nothing."""
        self._places(plan).setdefault(place, deque(maxlen=LATEST)).append(seconds)

    def _places(self, plan: Plan | None) -> dict[Hashable, deque[float]]:
        return self._of.use(id(plan), (plan, {}))[1]  # which keeps the plan, so that no other one gets its identity


class Rooms:
    """The bytes that a rank's own microbatches and messages take during each action of each plan, as far as steps have shown.

    Where steps differ, because batches have other shapes, the most counts.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Plan, array[int]]] = {}  # by the identity of the plan
        self._latest: tuple[Plan | None, Mapping[Key, Footprint], Exchanged] = (None, {}, {})

    def taken(self, plan: Plan) -> array[int] | None:
        """Return the bytes by place in the rank's lane; None if no step of the plan has ended."""
        found = self._known.get(id(plan))
        return None if found is None else found[1]

    def learn(self, plan: Plan, rank: int, footprints: Mapping[Key, Footprint], exchanged: Exchanged) -> None:
        """Learn from a step that has ended; looks at the plan again only if something has changed."""
        if self._latest == (plan, footprints, exchanged) and id(plan) in self._known:
            return
        self._latest = plan, dict(footprints), dict(exchanged)
        now = array("q", taken(plan, rank, footprints, exchanged, with_messages=True))
        before = self.taken(plan)
        self._known[id(plan)] = plan, now if before is None else array("q", map(max, before, now))
        for one in list(self._known)[:-MOST_PLANS]:
            del self._known[one]
