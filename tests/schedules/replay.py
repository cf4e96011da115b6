"""An independent replay of a plan: a machine that moves tokens, shares no code with the verifier, and so judges it.

Every lane goes on until it must wait. A transfer is an unbuffered rendezvous: its token is read on the sender and lands on
the receiver while the receiver waits for it, and the sender's wait ends after that. Tokens say whose they are, and whoever
uses one looks: a plan that mixes up two microbatches computes with the wrong token, however neat its text. A microbatch's saved
bytes are one token for each part that can move by itself. The value of a skip is one token on each rank that uses it, which its
first user there gets and its last one uses up; its gradient says which users have given to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import NamedTuple

from bpipe.schedules import Action, Plan
from tests.schedules.counted import Bytes, RemoteBuffers
from tests.schedules.shape_of_plan import shape_of

HOST = -1
MOVES = ("EVICT", "WAIT_EVICT", "LOAD", "WAIT_LOAD")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
TO_LATER = ("SEND_F", "RECV_B")  # messages that a stage exchanges with a later one
MESSAGES = (*TO_LATER, "RECV_F", "SEND_B")

Place = tuple[object, ...]  # (rank, what, stage, microbatch)
Token = tuple[object, ...]


class HarmError(Exception):
    """What goes wrong when the plan runs."""


def replay(plan: Plan) -> str | None:
    """Run the plan on the machine: None if all is well, or the harm it does."""
    try:
        _Machine(plan).run()
    except HarmError as harm:
        return str(harm)
    return None


def occupied(plan: Plan) -> tuple[int, ...]:
    """The most slots each rank of a sound plan occupies on the machine, buffers for remote activations included."""
    machine = _Machine(plan)
    machine.run()
    return tuple(map(machine.occupied, range(len(plan.actions))))


def occupied_bytes(plan: Plan) -> tuple[int, ...]:
    """The most bytes each rank of a sound plan occupies on the machine, static ones and buffers included."""
    machine = _Machine(plan)
    machine.run()
    return tuple(map(machine.occupied_bytes, range(len(plan.actions))))


def waiting_bytes(plan: Plan) -> dict[tuple[int, tuple[object, ...]], int]:
    """The bytes that each rank of a sound plan occupies while it waits, by rank and the first four fields of the action."""
    machine = _Machine(plan)
    machine.run()
    always = [machine.occupied_bytes(rank) - machine.bytes.stores[rank].peak for rank in range(len(plan.actions))]
    return {(rank, action): always[rank] + num_bytes for (rank, action), num_bytes in machine.waiting.items()}


def crossings(plan: Plan) -> Counter[tuple[object, ...]]:
    """How often each value of a skip arrives on a rank of a sound plan: by rank, and the value's skip, source and unit."""
    machine = _Machine(plan)
    machine.run()
    return machine.crossings


def insist(condition: object, *harm: object) -> None:
    if not condition:
        raise HarmError(" ".join(map(str, harm)))


@dataclass
class _Message:
    """One transfer: where its tokens are read, where they land, and whether they have."""

    sources: list[Place] = field(default_factory=list)
    targets: list[Place] = field(default_factory=list)
    moved: bool = False


class _Way(NamedTuple):
    """What a skip is to one rank: its place in the plan's skips, the stage that makes it, and the rank's stages that use it."""

    skip: int
    source: int
    users: tuple[int, ...]

    def value(self, unit: int) -> Token:
        return ("skip", self.skip, self.source, unit)

    def gradient(self, unit: int, users: tuple[int, ...]) -> Token:
        return ("skip gradient", self.skip, self.source, unit, users)

    def at(self, rank: int, what: str, unit: int) -> Place:
        """A value is held once on a rank; at its source, what goes to and comes from several ranks is told apart."""
        return (rank, what, self.skip, self.source, unit, *self.users[:1] * (what in ("handed on", "returned")))


@dataclass
class _Queue:
    """A channel: the k-th message sent on it is the k-th received."""

    messages: list[_Message] = field(default_factory=list)
    sent: int = 0
    received: int = 0

    def at(self, index: int) -> _Message:
        self.messages += [_Message() for _ in range(index + 1 - len(self.messages))]
        return self.messages[index]


class _Machine:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.shape = plan, shape_of(plan)
        self.p, self.m = len(plan.stage_ranks), plan.num_microbatches * plan.slices
        self.depth = self.shape.depth  # stages that a microbatch passes
        self.tokens: dict[Place, Token] = {}
        self.queues: dict[Place, _Queue] = defaultdict(_Queue)
        self.works: dict[Place, _Message] = {}  # started and not yet waited for
        self.counts: dict[Place, int] = defaultdict(int)  # microbatches done, a stage and purpose
        self.away: set[Place] = set()
        self.slots: list[set[tuple[int, int, str]]] = [set() for _ in plan.actions]  # and why each is occupied
        self.peak = [0 for _ in plan.actions]
        self.bytes = Bytes(plan)
        self.waiting: dict[tuple[int, tuple[object, ...]], int] = {}  # what a rank's own objects take while it waits
        self.remote_buffers: dict[tuple[int, object], RemoteBuffers] = defaultdict(
            RemoteBuffers
        )  # in bytes, by acceptor and evictor
        self.again = {a[1:3] for lane in plan.actions for a in lane if a.op.value == "R"}  # microbatches that run forward twice
        self.sharded = {a.stage for lane in plan.actions for a in lane if a.op.value in SHARDING and a.peer is None}
        self.gathered: set[int] = set()
        self.reduced: set[int] = set()
        self.exchanged: set[tuple[int, int]] = set()  # stages whose gradients are on their way, and to which one
        self.added: set[tuple[int, int]] = set()
        self.crossings: Counter[tuple[object, ...]] = Counter()
        self.ways: dict[tuple[int, ...], list[_Way]] = {}  # of skips, by the stages that a microbatch passes

    def run(self) -> None:
        lanes = [(rank, list(lane), self.computing) for rank, lane in enumerate(self.plan.actions)]
        for rank, lane in enumerate(self.plan.served):
            chains: dict[int | None, list[Action]] = defaultdict(list)
            for action in lane:
                chains[action.peer].append(action)
            lanes += [(rank, chain, self.serving) for chain in chains.values()]
        cursors = [0] * len(lanes)
        going = True
        while going:
            going = False
            for index, (rank, lane, do) in enumerate(lanes):
                while cursors[index] < len(lane) and do(rank, lane[cursors[index]]):
                    cursors[index] += 1
                    going = True
        stuck = [f"rank {rank} at {lane[at]}" for (rank, lane, _), at in zip(lanes, cursors) if at < len(lane)]
        insist(not stuck, "deadlock:", ", ".join(stuck))
        self.check_end()

    def check_end(self) -> None:
        for stage in range(self.p):
            done = {what: self.counts[what, stage] for what in ("forward", "input gradient", "weight gradient")}
            m = len(self.units(stage))
            expected = [m, m * self.plan.has_backward, m * self.plan.has_backward]
            insist(list(done.values()) == expected, "undone: stage", stage, done)
        insist(not self.works, "undone: nobody waits for", *self.works)
        insist(not self.away, "undone: still away", *self.away)
        insist(not self.gathered, "undone: weights stay gathered of", *self.gathered)
        insist(not self.plan.has_backward or self.reduced == self.sharded, "undone: gradients of", *self.sharded - self.reduced)
        stages = range(self.p if self.plan.has_backward else 0)
        pairs = {pair for stage in stages for pair in self.exchanges_of(stage)}
        insist(self.added == pairs, "undone: gradients were not added up:", *pairs ^ self.added)
        for rank, budget in enumerate(self.plan.slots):
            peak = self.occupied(rank)
            insist(budget is None or peak <= budget, "budget: rank", rank, "occupies", peak, "of", budget)
        for rank, budget in enumerate(self.plan.budgets or ()):
            peak = self.occupied_bytes(rank)
            insist(budget is None or peak <= budget, "budget: rank", rank, "occupies", peak, "bytes of", budget)
        left = [store.objects for store in self.bytes.stores if store.objects]
        assert not left or not self.plan.has_backward, left  # else the machine's own count is wrong

    def occupied(self, rank: int) -> int:
        return self.peak[rank] + sum(
            len(buffers.sizes) for (acceptor, _), buffers in self.remote_buffers.items() if acceptor == rank
        )

    def occupied_bytes(self, rank: int) -> int:
        assert self.plan.sizes is not None
        remote_buffers = sum(sum(buffers.sizes) for (acceptor, _), buffers in self.remote_buffers.items() if acceptor == rank)
        return self.plan.sizes.static[rank] + self.bytes.stores[rank].peak + remote_buffers

    # The two kinds of lane. Each returns False where it must wait.

    def computing(self, rank: int, action: Action) -> bool:
        if action.op.value.startswith("WAIT_"):
            self.waiting[rank, action[:4]] = sum(self.bytes.stores[rank].objects.values())
        do = COMPUTING.get(str(action.op.value))
        insist(do, "wrong lane:", action, "among the computations of rank", rank)
        known = 0 <= action.stage < self.p and 0 <= action.microbatch < self.m
        insist(known and self.plan.stage_ranks[action.stage] == rank, "misplaced:", action, "on rank", rank)
        passes = action.microbatch in self.units(action.stage)
        insist(passes or action.op.value in SHARDING, "misplaced:", action, "is of the other direction, or another replica's")
        if action.part and action.op.value.removeprefix("WAIT_") in MESSAGES:
            self.check_way(action)
        elif "REDUCE_GRAD" not in action.op.value:
            self.check_part(action, MOVES)
        return do(self, rank, action) is not False

    def serving(self, rank: int, action: Action) -> bool:
        do = SERVING.get(str(action.op.value))
        insist(do, "wrong lane:", action, "served by rank", rank)
        known = 0 <= action.stage < self.p and 0 <= action.microbatch < self.m
        insist(known and self.plan.stage_ranks[action.stage] == action.peer, "misplaced:", action, "on rank", rank)
        self.check_part(action, (action.op.value,))
        return do(self, rank, action) is not False

    def check_part(self, action: Action, ops: tuple[str, ...]) -> None:
        num_parts = 0 if self.plan.sizes is None else len(self.plan.sizes.stages[action.stage].parts)
        insist(not action.part or (action.op.value in ops and action.part <= num_parts), "no such part:", action)

    # Computations.

    def forward(self, rank: int, action: Action) -> None:
        _, stage, microbatch, *_ = action
        self.check_gathered(action)
        if (stage, microbatch) in self.again:
            self.first_forward(rank, action)
            return
        self.in_order("forward", action)
        if stage % self.depth:
            before = self.beside(stage, -1, microbatch)
            near = self.plan.stage_ranks[before] == rank
            where = (rank, "output", before, microbatch) if near else (rank, "input", stage, microbatch)
            self.use(where, ("output", before, microbatch), action, keep=near)
        self.use_skips(rank, action)
        self.occupy(rank, action, "saved")
        self.bytes.before_forward(rank, action)
        for place in self.saved(rank, action):
            self.tokens[place] = place[1:]
        self.made_output(rank, action)
        self.bytes.after_forward(rank, action)

    def first_forward(self, rank: int, action: Action) -> None:
        """Nothing is saved but the input: whoever goes backward from here finds nothing."""
        _, stage, microbatch, *_ = action
        insist(not self.near(stage, microbatch) & self.stages_of(rank), "shared memory:", action, "is next to a stage of its rank")
        used = self.used(stage, microbatch)
        shared = [way for way in used if len(way.users) > 1]
        shared += [way for way in self.made(stage, microbatch) + used if self.is_local(way)]
        insist(not shared, "shared memory:", action, "shares a skip with a stage of its rank")
        self.in_order("forward", action)
        if stage % self.depth:
            self.use((rank, "input", stage, microbatch), ("output", self.beside(stage, -1, microbatch), microbatch), action)
        self.use_skips(rank, action)
        self.tokens[rank, "kept", stage, microbatch] = ("kept", stage, microbatch)
        self.bytes.before_first_forward(rank, action)
        self.made_output(rank, action)
        self.bytes.after_first_forward(rank, action)

    def made_output(self, rank: int, action: Action) -> None:
        _, stage, microbatch, *_ = action
        self.tokens[rank, "output", stage, microbatch] = ("output", stage, microbatch)
        for way in self.made(stage, microbatch):
            self.tokens[way.at(rank, "held" if self.is_local(way) else "handed on", microbatch)] = way.value(microbatch)
        self.counts["forward done", stage] += 1

    def second_forward(self, rank: int, action: Action) -> None:
        """It uses the kept input up, and saves. Its output goes nowhere."""
        _, stage, microbatch, *_ = action
        self.check_gathered(action)
        insist(self.plan.has_backward, "no use:", action, "has no backward")
        self.use((rank, "kept", stage, microbatch), ("kept", stage, microbatch), action)
        self.occupy(rank, action, "saved")
        self.bytes.before_second_forward(rank, action)
        for place in self.saved(rank, action):
            self.tokens[place] = place[1:]
        self.bytes.after_second_forward(rank, action)

    def near(self, stage: int, unit: int) -> set[int]:
        """The stages before and behind one, on the way of a unit."""
        way = self.way_of(unit)
        return {other for one, two in pairwise(way) for other in (one, two) if stage in (one, two)} - {stage}

    def way_of(self, unit: int) -> tuple[int, ...]:
        """The stages that a unit passes: those of a direction, which microbatches take in turns, or of a path."""
        microbatch = unit // self.plan.slices
        if self.shape.paths:
            return self.shape.paths[microbatch % len(self.shape.paths)]
        first = microbatch % self.shape.directions * self.depth
        return tuple(range(first, first + self.depth))

    def units(self, stage: int) -> list[int]:
        """What passes a stage, in the order of forwards."""
        return [unit for unit in range(self.m) if stage in self.way_of(unit)]

    def beside(self, stage: int, offset: int, unit: int) -> int:
        """The stage before or behind one, on the way of a unit."""
        insist(0 <= stage % self.depth + offset < self.depth, "no such message: stage", stage, "is at an end")
        return self.way_of(unit)[stage % self.depth + offset]

    def stages_of(self, rank: int) -> set[int]:
        return {stage for stage, owner in enumerate(self.plan.stage_ranks) if owner == rank}

    def check_gathered(self, action: Action) -> None:
        insist(action.stage not in self.sharded - self.gathered, "weights not there:", action)
        insist(action.op.value == "F" or action.stage not in self.reduced | self.exchanged, "reduced too early:", action)

    def saved(self, rank: int, action: Action) -> list[Place]:
        return [(rank, "saved", *action[1:3], part) for part in self.bytes.concerned(action)]

    def backward(self, rank: int, action: Action) -> None:
        self.bytes.before_backward(rank, action)
        self.backward_input(rank, action)
        self.in_order("weight gradient", action)
        self.free(rank, action)
        self.made_gradient(rank, action)

    def whole_input_half(self, rank: int, action: Action) -> None:
        self.bytes.before_backward(rank, action)
        self.backward_input(rank, action)
        self.made_gradient(rank, action)

    def backward_input(self, rank: int, action: Action) -> None:
        _, stage, microbatch, *_ = action
        self.check_gathered(action)
        insist(self.plan.has_backward, "missing token: no graph for", action)
        self.in_order("input gradient", action)
        self.state(rank, action)
        self.tokens["done backward", stage, microbatch] = ()
        for place in self.saved(rank, action):
            self.use(place, place[1:], action, keep=True)
        if (stage + 1) % self.depth and not self.shape.local:
            behind = self.beside(stage, 1, microbatch)
            near = self.plan.stage_ranks[behind] == rank
            where = (rank, "result", behind, microbatch) if near else (rank, "gradient", stage, microbatch)
            self.use(where, ("gradient", behind, microbatch), action)
        for way in () if self.shape.local else self.made(stage, microbatch):
            place = way.at(rank, "added up" if self.is_local(way) else "returned", microbatch)
            self.use(place, way.gradient(microbatch, way.users), action)
        self.bytes.after_backward_input(rank, action)

    def state(self, rank: int, action: Action) -> None:
        """A slice's backward uses the gradient of its state, which the slice behind it leaves; the last one has none."""
        _, stage, unit, *_ = action
        if (unit + 1) % self.plan.slices:
            self.use((rank, "state gradient", stage, unit), ("state gradient", stage, unit), action)
        if unit % self.plan.slices:
            self.tokens[rank, "state gradient", stage, unit - 1] = ("state gradient", stage, unit - 1)

    def made_gradient(self, rank: int, action: Action) -> None:
        self.tokens[rank, "result", *action[1:3]] = ("gradient", *action[1:3])
        self.add_to_skips(rank, action)
        self.bytes.after_backward(rank, action)

    def backward_weight(self, rank: int, action: Action) -> None:
        self.check_gathered(action)
        halves = self.counts["input gradient", action.stage], self.counts["weight gradient", action.stage]
        insist(halves[0] > halves[1], "missing token: input half for", action)
        self.in_order("weight gradient", action)
        self.free(rank, action)

    def free(self, rank: int, action: Action) -> None:
        """Use saved bytes and give them back."""
        _, stage, microbatch, *_ = action
        leaving = {work[2:5] for work in self.works if work[:2] == (rank, "EVICT")}
        for place in self.saved(rank, action):
            self.use(place, place[1:], action)
            insist(not {(stage, microbatch, 0), place[2:]} & leaving, "freed under its eviction:", action)
        self.bytes.after_weight_half(rank, action)
        self.slots[rank].discard((stage, microbatch, "saved"))

    # Skips.

    def ways_on(self, passed: tuple[int, ...]) -> list[_Way]:
        """The ranks that use skips, of a microbatch that passes some stages."""
        if passed not in self.ways:
            self.ways[passed] = [way for skip in range(len(self.shape.skips)) for way in self.ways_of(skip, passed)]
        return self.ways[passed]

    def ways_of(self, skip: int, passed: tuple[int, ...]) -> list[_Way]:
        stages, ranks = self.shape.skips[skip], self.plan.stage_ranks
        is_later = len(stages) > 1 and all(one < other for one, other in pairwise(stages))
        insist(is_later and stages[0] >= 0 and stages[-1] < self.depth, "no such skip:", stages)
        source, *users = (passed[stage] for stage in stages)
        used_on = {ranks[user] for user in users}
        return [_Way(skip, source, tuple(user for user in users if ranks[user] == rank)) for rank in sorted(used_on)]

    def made(self, stage: int, unit: int) -> list[_Way]:
        return [way for way in self.ways_on(self.way_of(unit)) if way.source == stage]

    def used(self, stage: int, unit: int) -> list[_Way]:
        return [way for way in self.ways_on(self.way_of(unit)) if stage in way.users]

    def is_local(self, way: _Way) -> bool:
        return self.plan.stage_ranks[way.source] == self.plan.stage_ranks[way.users[0]]

    def between(self, source: int, user: int, unit: int) -> list[_Way]:
        """What a message from one stage to another carries: values that its rank uses there first."""
        return [way for way in self.made(source, unit) if way.users[0] == user and not self.is_local(way)]

    def check_way(self, action: Action) -> None:
        """The message to the next stage carries what that uses first; others have one if they use something first."""
        other = action.part - 1
        ends = (action.stage, other) if action.op.value.removeprefix("WAIT_") in TO_LATER else (other, action.stage)
        is_next = ends[1] in self.near(ends[0], action.microbatch)
        insist(not is_next and self.between(*ends, action.microbatch), "no such message:", action)
        insist(self.plan.stage_ranks[other] == action.peer, "misplaced:", action, "with rank", action.peer)

    def use_skips(self, rank: int, action: Action) -> None:
        _, stage, unit, *_ = action
        for way in self.used(stage, unit):
            self.use(way.at(rank, "held", unit), way.value(unit), action, keep=stage != way.users[-1])

    def add_to_skips(self, rank: int, action: Action) -> None:
        """The first user runs backward last, after which the gradient is complete."""
        _, stage, unit, *_ = action
        for way in () if self.shape.local else self.used(stage, unit):
            *_, users = self.tokens.pop(way.at(rank, "some", unit), ((),))
            assert isinstance(users, tuple)
            what = "added up" if stage == way.users[0] else "some"
            self.tokens[way.at(rank, what, unit)] = way.gradient(unit, (stage, *users))

    # Weights.

    def gather(self, rank: int, action: Action) -> None:
        insist(action.microbatch == 0 and action.stage not in self.gathered, "gathered twice:", action)
        self.gathered.add(action.stage)

    def scatter(self, rank: int, action: Action) -> None:
        insist(action.microbatch == 0 and action.stage in self.gathered, "weights not there:", action)
        self.gathered.remove(action.stage)

    def reduce(self, rank: int, action: Action) -> None:
        if action.peer is not None:
            self.exchange(rank, action)
            return
        insist(action.microbatch == 0 and action.stage not in self.reduced, "reduced twice:", action)
        self.reduced.add(action.stage)

    def exchange(self, rank: int, action: Action) -> None:
        """Gradients of a stage leave for another one, such as its twin, and memory for those of that is taken."""
        _, stage, microbatch, part, peer = action
        other = part - 1 if part else (stage + self.depth) % self.p
        insist(microbatch == 0 and (self.shape.directions > 1 if not part else self.shape.sums), "misplaced:", action)
        insist((stage, other) not in self.exchanged, "reduced twice:", action)
        there, back = self.queues["twin", rank, peer], self.queues["twin", peer, rank]
        there.at(there.sent).sources = [(rank, "gradients", stage, other)]
        message = self.works[self.work(rank, action)] = back.at(back.received)
        message.targets = [(rank, "gradients of another", stage, other)]
        there.sent, back.received = there.sent + 1, back.received + 1
        self.tokens[rank, "gradients", stage, other] = ("gradients", stage, other, self.summed(stage, other))
        self.exchanged.add((stage, other))
        self.bytes.exchange(rank, stage, part)

    def exchanges_of(self, stage: int) -> set[tuple[int, int]]:
        """A stage, and each one with which it exchanges gradients: a twin, or the first holder of a weight on another rank."""
        ranks, twin = self.plan.stage_ranks, (stage + self.depth) % self.p
        pairs = {(stage, twin)} if self.shape.directions > 1 and ranks[stage] != ranks[twin] else set()  # else both are one module
        for holders in self.shape.sums:
            firsts = {ranks[one]: one for one in reversed(holders)}
            pairs |= {(one, other) for one, other in permutations(firsts.values(), 2) if one == stage}
        return pairs

    def summed(self, stage: int, other: int) -> tuple[int, ...]:
        """How many backwards have run of each stage on a rank whose gradients are among those that it exchanges with another."""
        here, ranks = {stage}, self.plan.stage_ranks
        for holders in self.shape.sums:
            firsts = {ranks[one]: one for one in reversed(holders)}
            if {stage, other} <= {*firsts.values()}:
                here |= {one for one in holders if ranks[one] == ranks[stage]}
        insist(all(self.counts["weight gradient", one] == len(self.units(one)) for one in here), "too early:", stage, other)
        return tuple(self.counts["weight gradient", one] for one in sorted(here))

    def exchange_ended(self, rank: int, action: Action) -> bool:
        message = self.started(rank, action)
        if not message.sources:
            return False
        stage, part = action.stage, action.part
        other = part - 1 if part else (stage + self.depth) % self.p
        self.carry(message, action)
        self.use((rank, "gradients of another", stage, other), ("gradients", other, stage, self.summed(other, stage)), action)
        del self.works[self.work(rank, action)]
        self.added.add((stage, other))
        if self.exchanges_of(stage) <= self.added:
            self.bytes.added(rank, stage)
        return True

    def in_order(self, what: str, action: Action) -> None:
        k, done, units = self.plan.slices, self.counts[what, action.stage], self.units(action.stage)
        due = done if what == "forward" else k * (done // k) + k - 1 - done % k  # slices go back against the sequence
        insist(due < len(units) and units[due] == action.microbatch, "out of order:", action, "is not the next", what)
        self.counts[what, action.stage] += 1

    def use(self, place: Place, expected: Token, action: Action, keep: bool = False) -> None:
        found = self.tokens.get(place) if keep else self.tokens.pop(place, None)
        insist(found is not None, "missing token:", action, "needs", expected)
        insist(found == expected, "wrong token:", action, "got", found, "for", expected)

    def occupy(self, rank: int, action: Action, why: str) -> None:
        self.slots[rank].add((action.stage, action.microbatch, why))
        self.peak[rank] = max(self.peak[rank], len({slot[:2] for slot in self.slots[rank]}))

    # Transfers: their starts, and their completions.

    def start_send(self, purpose: str, rank: int, action: Action, *sources: Place) -> None:
        insist(all(source in self.tokens for source in sources), "missing token:", action, "sends what is not there")
        queue = self.queue(purpose, rank, action, rank, action.peer)
        self.works[self.work(rank, action)] = message = queue.at(queue.sent)
        queue.sent += 1
        message.sources = list(sources)

    def start_receive(self, purpose: str, rank: int, action: Action, *targets: Place) -> None:
        queue = self.queue(purpose, rank, action, action.peer, rank)
        self.works[self.work(rank, action)] = message = queue.at(queue.received)
        queue.received += 1
        message.targets = list(targets)

    def queue(self, purpose: str, rank: int, action: Action, src: object, dst: object) -> _Queue:
        insist(src != dst, "channel to itself:", action, "on rank", rank)
        insist(self.work(rank, action) not in self.works, "started twice:", action)
        return self.queues[purpose, src, dst]

    @staticmethod
    def work(rank: int, action: Action) -> Place:
        return (rank, action.op.value.removeprefix("WAIT_"), *action[1:])  # with part and peer

    def complete_send(self, rank: int, action: Action) -> bool:
        message = self.started(rank, action)
        if message.moved:
            del self.works[self.work(rank, action)]
        return message.moved

    def complete_receive(self, rank: int, action: Action) -> bool:
        message = self.started(rank, action)
        if not message.sources:
            return False
        self.carry(message, action)
        del self.works[self.work(rank, action)]
        return True

    def carry(self, message: _Message, action: Action) -> None:
        insist(len(message.sources) == len(message.targets), "wrong token:", action, "gets another number of parts")
        for source, target in zip(message.sources, message.targets):
            insist(source in self.tokens, "missing token:", action, "reads", source, "which is gone")
            if target[1] == "held":
                insist(target not in self.tokens, "handed on twice:", target)
                self.crossings[target[0], *self.tokens[source][1:]] += 1
            self.tokens[target] = self.tokens[source]
        message.moved = True

    def started(self, rank: int, action: Action) -> _Message:
        message = self.works.get(self.work(rank, action))
        insist(message, "never started:", action)
        return message

    def places(self, rank: int, action: Action, what: str, of_skips: str) -> list[Place]:
        """What a message carries besides skips, if it is one to the next stage or from it, and its skips."""
        _, stage, unit, part, _ = action
        is_to_later = action.op.value in TO_LATER
        other = part - 1 if part else self.beside(stage, 1 if is_to_later else -1, unit)
        carried = self.between(stage, other, unit) if is_to_later else self.between(other, stage, unit)
        return [(rank, what, stage, unit)] * (not part) + [way.at(rank, of_skips, unit) for way in carried]

    def send_forward(self, rank: int, action: Action) -> None:
        self.start_send("forward", rank, action, *self.places(rank, action, "output", "handed on"))
        if action[1:3] not in self.again and not self.shape.local:  # else its bytes count, and no slot that it could keep
            self.occupy(rank, action, f"sending {action.part}")

    def sent_forward(self, rank: int, action: Action) -> bool:
        done = self.complete_send(rank, action)
        if done:
            self.slots[rank].discard((action.stage, action.microbatch, f"sending {action.part}"))
            self.bytes.gone(rank, action)
        return done

    def send_backward(self, rank: int, action: Action) -> None:
        self.start_send("backward", rank, action, *self.places(rank, action, "result", "added up"))

    def sent_backward(self, rank: int, action: Action) -> bool:
        done = self.complete_send(rank, action)
        if done:
            self.bytes.gone(rank, action)
        return done

    def receive_forward(self, rank: int, action: Action) -> None:
        self.bytes.arrive(rank, action)
        self.start_receive("forward", rank, action, *self.places(rank, action, "input", "held"))

    def receive_backward(self, rank: int, action: Action) -> None:
        self.bytes.arrive(rank, action)
        self.start_receive("backward", rank, action, *self.places(rank, action, "gradient", "returned"))

    # Evictions: the evictor's end, and the acceptor's.

    def evict(self, rank: int, action: Action) -> None:
        _, stage, microbatch, _, peer = action
        done = ("done backward", stage, microbatch) in self.tokens
        insist(not done, "freed under its eviction:", action, "is late")
        if peer == HOST:
            insist(self.work(rank, action) not in self.works, "started twice:", action)
            self.works[self.work(rank, action)] = message = _Message(self.saved(rank, action), self.hosted(rank, action))
            self.carry(message, action)
        else:
            self.start_send("evict", rank, action, *self.saved(rank, action))

    def evicted(self, rank: int, action: Action) -> bool:
        if not self.complete_send(rank, action):
            return False
        _, stage, microbatch, *_ = action
        if self.bytes.parts(stage)[-1] in self.bytes.concerned(action):
            self.give_up_output(rank, action)
        for place in self.saved(rank, action):
            self.use(place, place[1:], action)
            self.away.add(place)
        if not action.part:
            self.slots[rank].discard((stage, microbatch, "saved"))
        self.bytes.gone(rank, action)
        return True

    def give_up_output(self, rank: int, action: Action) -> None:
        """The output may share its bytes with the last part, so it must have arrived where it is used."""
        _, stage, microbatch, *_ = action
        insist((rank, "SEND_F", *action[1:3]) not in {work[:4] for work in self.works}, "emptied under its send:", action)
        behind = self.beside(stage, 1, microbatch) if (stage + 1) % self.depth else None
        if behind is not None and self.plan.stage_ranks[behind] == rank:
            done = self.counts["forward done", behind]
            insist(microbatch in self.units(behind)[:done], "emptied under its use:", action)
        else:
            self.tokens.pop((rank, "output", stage, microbatch), None)
        for way in self.made(stage, microbatch):
            self.tokens.pop(way.at(rank, "handed on", microbatch), None)

    def load(self, rank: int, action: Action) -> None:
        places = self.saved(rank, action)
        insist(self.away.issuperset(places), "missing token:", action, "loads what is not away")
        self.away.difference_update(places)
        self.bytes.back(rank, action)
        if not action.part:
            self.occupy(rank, action, "saved")
        if action.peer == HOST:
            self.works[self.work(rank, action)] = _Message(self.hosted(rank, action), places)
        else:
            self.start_receive("return", rank, action, *places)

    @staticmethod
    def _elsewhere(rank: int, name: str, places: list[Place]) -> list[Place]:
        return [(rank, name, *place[2:]) for place in places]

    def hosted(self, rank: int, action: Action) -> list[Place]:
        return self._elsewhere(rank, "hosted", self.saved(rank, action))

    def remotes(self, rank: int, action: Action) -> list[Place]:
        return self._elsewhere(rank, f"remote activation of {action.peer}", self.saved(rank, action))

    def accept(self, rank: int, action: Action) -> bool | None:
        queue = self.queues["evict", action.peer, rank]
        if queue.sent <= queue.received:
            return False  # the sizes arrive with the eviction
        remote_buffers = self.remote_buffers[rank, action.peer]
        insist(action[1:4] not in remote_buffers.remotes, "overwritten:", action, "has a remote activation already")
        remote_buffers.enter(action[1:4], self.bytes.movable(action))
        self.start_receive("evict", rank, action, *self.remotes(rank, action))
        return None

    def return_(self, rank: int, action: Action) -> None:
        self.start_send("return", rank, action, *self.remotes(rank, action))

    def given_back(self, rank: int, action: Action) -> bool:
        done = self.complete_send(rank, action)
        if done:
            for place in self.remotes(rank, action):
                del self.tokens[place]
            self.remote_buffers[rank, action.peer].leave(action[1:4])
        return done


Dispatch = dict[str, Callable[[_Machine, int, Action], bool | None]]
COMPUTING: Dispatch = {
    "F": _Machine.forward,
    "B": _Machine.backward,
    "I": _Machine.whole_input_half,
    "W": _Machine.backward_weight,
    "R": _Machine.second_forward,
    "SEND_F": _Machine.send_forward,
    "RECV_F": _Machine.receive_forward,
    "SEND_B": _Machine.send_backward,
    "RECV_B": _Machine.receive_backward,
    "EVICT": _Machine.evict,
    "LOAD": _Machine.load,
    "WAIT_SEND_F": _Machine.sent_forward,
    "WAIT_RECV_F": _Machine.complete_receive,
    "WAIT_SEND_B": _Machine.sent_backward,
    "WAIT_RECV_B": _Machine.complete_receive,
    "WAIT_EVICT": _Machine.evicted,
    "WAIT_LOAD": _Machine.complete_receive,
    "UNSHARD": _Machine.gather,
    "RESHARD": _Machine.scatter,
    "REDUCE_GRAD": _Machine.reduce,
    "WAIT_REDUCE_GRAD": _Machine.exchange_ended,
}
SERVING: Dispatch = {
    "ACCEPT": _Machine.accept,
    "RETURN": _Machine.return_,
    "WAIT_ACCEPT": _Machine.complete_receive,
    "WAIT_RETURN": _Machine.given_back,
}
