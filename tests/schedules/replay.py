"""An independent replay of a plan: a machine that moves tokens, shares no code with the verifier, and so judges it.

Every lane goes on until it must wait. A transfer is an unbuffered rendezvous: its token is read on the sender and lands on
the receiver while the receiver waits for it, and the sender's wait ends after that. Tokens say whose they are, and whoever
uses one looks: a plan that mixes up two microbatches computes with the wrong token, however neat its text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from bpipe.schedules import Action, Plan

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
    """The most slots each rank of a sound plan occupies on the machine, rooms for guests included."""
    machine = _Machine(plan)
    machine.run()
    return tuple(map(machine.occupied, range(len(plan.actions))))


def insist(condition: object, *harm: object) -> None:
    if not condition:
        raise HarmError(" ".join(map(str, harm)))


@dataclass
class _Message:
    """One transfer: where its token is read, where it lands, and whether it has."""

    source: Place | None = None
    target: Place | None = None
    moved: bool = False


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
        self.plan = plan
        self.p, self.m = len(plan.stage_ranks), plan.num_microbatches
        self.tokens: dict[Place, Token] = {}
        self.queues: dict[Place, _Queue] = defaultdict(_Queue)
        self.works: dict[Place, _Message] = {}  # started and not yet waited for
        self.counts: dict[Place, int] = defaultdict(int)  # microbatches done, a stage and purpose
        self.away: set[Place] = set()
        self.slots: list[set[tuple[int, int, str]]] = [set() for _ in plan.actions]  # and why each is occupied
        self.peak = [0 for _ in plan.actions]
        self.guests: dict[tuple[int, object], set[tuple[int, int]]] = defaultdict(set)
        self.guest_peak: dict[tuple[int, object], int] = defaultdict(int)

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
            expected = [self.m, self.m * self.plan.has_backward, self.m * self.plan.has_backward]
            insist(list(done.values()) == expected, "undone: stage", stage, done)
        insist(not self.works, "undone: nobody waits for", *self.works)
        insist(not self.away, "undone: still away", *self.away)
        for rank, budget in enumerate(self.plan.slots):
            peak = self.occupied(rank)
            insist(budget is None or peak <= budget, "budget: rank", rank, "occupies", peak, "of", budget)

    def occupied(self, rank: int) -> int:
        return self.peak[rank] + sum(peak for (acceptor, _), peak in self.guest_peak.items() if acceptor == rank)

    # The two kinds of lane. Each returns False where it must wait.

    def computing(self, rank: int, action: Action) -> bool:
        do = COMPUTING.get(str(action.op.value))
        insist(do, "wrong lane:", action, "among the computations of rank", rank)
        known = 0 <= action.stage < self.p and 0 <= action.microbatch < self.m
        insist(known and self.plan.stage_ranks[action.stage] == rank, "misplaced:", action, "on rank", rank)
        return do(self, rank, action) is not False

    def serving(self, rank: int, action: Action) -> bool:
        do = SERVING.get(str(action.op.value))
        insist(do, "wrong lane:", action, "served by rank", rank)
        return do(self, rank, action) is not False

    # Computations.

    def forward(self, rank: int, action: Action) -> None:
        _, stage, microbatch, *_ = action
        self.in_order("forward", action)
        if stage:
            near = self.plan.stage_ranks[stage - 1] == rank
            where = (rank, "output", stage - 1, microbatch) if near else (rank, "input", stage, microbatch)
            self.use(where, ("output", stage - 1, microbatch), action, keep=near)
        self.tokens[rank, "saved", stage, microbatch] = ("saved", stage, microbatch)
        self.tokens[rank, "output", stage, microbatch] = ("output", stage, microbatch)
        self.occupy(rank, action, "saved")

    def backward(self, rank: int, action: Action) -> None:
        self.input_half(rank, action)
        self.weight_half(rank, action)

    def input_half(self, rank: int, action: Action) -> None:
        _, stage, microbatch, *_ = action
        insist(self.plan.has_backward, "missing token: no graph for", action)
        self.in_order("input gradient", action)
        self.use((rank, "saved", stage, microbatch), ("saved", stage, microbatch), action, keep=True)
        if stage + 1 < self.p:
            near = self.plan.stage_ranks[stage + 1] == rank
            where = (rank, "result", stage + 1, microbatch) if near else (rank, "gradient", stage, microbatch)
            self.use(where, ("gradient", stage + 1, microbatch), action)
        self.tokens[rank, "result", stage, microbatch] = ("gradient", stage, microbatch)

    def weight_half(self, rank: int, action: Action) -> None:
        _, stage, microbatch, *_ = action
        self.in_order("weight gradient", action)
        insist(self.counts["input gradient", stage] > microbatch, "missing token: input half for", action)
        self.use((rank, "saved", stage, microbatch), ("saved", stage, microbatch), action)
        insist((rank, "EVICT", *action[1:3]) not in {work[:4] for work in self.works}, "freed under its eviction:", action)
        self.slots[rank].discard((stage, microbatch, "saved"))

    def in_order(self, what: str, action: Action) -> None:
        insist(self.counts[what, action.stage] == action.microbatch, "out of order:", action, "is not the next", what)
        self.counts[what, action.stage] += 1

    def use(self, place: Place, expected: Token, action: Action, keep: bool = False) -> None:
        found = self.tokens.get(place) if keep else self.tokens.pop(place, None)
        insist(found is not None, "missing token:", action, "needs", expected)
        insist(found == expected, "wrong token:", action, "got", found, "for", expected)

    def occupy(self, rank: int, action: Action, why: str) -> None:
        self.slots[rank].add((action.stage, action.microbatch, why))
        self.peak[rank] = max(self.peak[rank], len({slot[:2] for slot in self.slots[rank]}))

    # Transfers: their starts, and their completions.

    def start_send(self, purpose: str, rank: int, action: Action, source: Place) -> None:
        insist(source in self.tokens, "missing token:", action, "sends what is not there")
        queue = self.queue(purpose, rank, action, rank, action.peer)
        self.works[self.work(rank, action)] = message = queue.at(queue.sent)
        queue.sent += 1
        message.source = source

    def start_receive(self, purpose: str, rank: int, action: Action, target: Place) -> None:
        queue = self.queue(purpose, rank, action, action.peer, rank)
        self.works[self.work(rank, action)] = message = queue.at(queue.received)
        queue.received += 1
        message.target = target

    def queue(self, purpose: str, rank: int, action: Action, src: object, dst: object) -> _Queue:
        insist(src != dst, "channel to itself:", action, "on rank", rank)
        insist(self.work(rank, action) not in self.works, "started twice:", action)
        return self.queues[purpose, src, dst]

    @staticmethod
    def work(rank: int, action: Action) -> Place:
        return (rank, action.op.value.removeprefix("WAIT_"), *action[1:])

    def complete_send(self, rank: int, action: Action) -> bool:
        message = self.started(rank, action)
        if message.moved:
            del self.works[self.work(rank, action)]
        return message.moved

    def complete_receive(self, rank: int, action: Action) -> bool:
        message = self.started(rank, action)
        if message.source is None:
            return False
        insist(message.source in self.tokens, "missing token:", action, "reads", message.source, "which is gone")
        assert message.target is not None
        self.tokens[message.target] = self.tokens[message.source]
        message.moved = True
        del self.works[self.work(rank, action)]
        return True

    def started(self, rank: int, action: Action) -> _Message:
        message = self.works.get(self.work(rank, action))
        insist(message, "never started:", action)
        return message

    def send_forward(self, rank: int, action: Action) -> None:
        self.start_send("forward", rank, action, (rank, "output", *action[1:3]))
        self.occupy(rank, action, "sending")

    def sent_forward(self, rank: int, action: Action) -> bool:
        done = self.complete_send(rank, action)
        if done:
            self.slots[rank].discard((action.stage, action.microbatch, "sending"))
        return done

    def send_backward(self, rank: int, action: Action) -> None:
        self.start_send("backward", rank, action, (rank, "result", *action[1:3]))

    def receive_forward(self, rank: int, action: Action) -> None:
        self.start_receive("forward", rank, action, (rank, "input", *action[1:3]))

    def receive_backward(self, rank: int, action: Action) -> None:
        self.start_receive("backward", rank, action, (rank, "gradient", *action[1:3]))

    # Evictions: the evictor's end, and the acceptor's.

    def evict(self, rank: int, action: Action) -> None:
        self.start_send("evict", rank, action, (rank, "saved", *action[1:3]))

    def evicted(self, rank: int, action: Action) -> bool:
        if not self.complete_send(rank, action):
            return False
        insist((rank, "SEND_F", *action[1:3]) not in {work[:4] for work in self.works}, "emptied under its send:", action)
        self.use((rank, "saved", *action[1:3]), ("saved", *action[1:3]), action)
        if self.plan.stage_ranks[action.stage + 1 : action.stage + 2] != (rank,):
            self.tokens.pop((rank, "output", *action[1:3]), None)  # it may share its bytes with what was saved
        self.slots[rank].discard((action.stage, action.microbatch, "saved"))
        self.away.add((rank, *action[1:3]))
        return True

    def load(self, rank: int, action: Action) -> None:
        insist((rank, *action[1:3]) in self.away, "missing token:", action, "loads what is not away")
        self.away.remove((rank, *action[1:3]))
        self.start_receive("return", rank, action, (rank, "saved", *action[1:3]))
        self.occupy(rank, action, "saved")

    def accept(self, rank: int, action: Action) -> bool | None:
        queue = self.queues["evict", action.peer, rank]
        if queue.sent <= queue.received:
            return False  # the sizes arrive with the eviction
        room = self.guests[rank, action.peer]
        insist(action[1:3] not in room, "overwritten:", action, "has a guest already")
        room.add(action[1:3])
        self.guest_peak[rank, action.peer] = max(self.guest_peak[rank, action.peer], len(room))
        self.start_receive("evict", rank, action, self.guest(rank, action))
        return None

    def give_back(self, rank: int, action: Action) -> None:
        self.start_send("return", rank, action, self.guest(rank, action))

    def given_back(self, rank: int, action: Action) -> bool:
        done = self.complete_send(rank, action)
        if done:
            del self.tokens[self.guest(rank, action)]
            self.guests[rank, action.peer].remove(action[1:3])
        return done

    @staticmethod
    def guest(rank: int, action: Action) -> Place:
        return (rank, f"guest of {action.peer}", *action[1:3])


Dispatch = dict[str, Callable[[_Machine, int, Action], bool | None]]
COMPUTING: Dispatch = {
    "F": _Machine.forward,
    "B": _Machine.backward,
    "I": _Machine.input_half,
    "W": _Machine.weight_half,
    "SEND_F": _Machine.send_forward,
    "RECV_F": _Machine.receive_forward,
    "SEND_B": _Machine.send_backward,
    "RECV_B": _Machine.receive_backward,
    "EVICT": _Machine.evict,
    "LOAD": _Machine.load,
    "WAIT_SEND_F": _Machine.sent_forward,
    "WAIT_RECV_F": _Machine.complete_receive,
    "WAIT_SEND_B": _Machine.complete_send,
    "WAIT_RECV_B": _Machine.complete_receive,
    "WAIT_EVICT": _Machine.evicted,
    "WAIT_LOAD": _Machine.complete_receive,
}
SERVING: Dispatch = {
    "ACCEPT": _Machine.accept,
    "RETURN": _Machine.give_back,
    "WAIT_ACCEPT": _Machine.complete_receive,
    "WAIT_RETURN": _Machine.given_back,
}
