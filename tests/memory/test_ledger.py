"""The ledger against a recount from nothing at every action, and against the plan's own prediction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.memory.footprint import Footprint, footprint_of
from bpipe.memory.ledger import Ledger, predicted_peak_bytes
from bpipe.memory.stash import Contents
from bpipe.memory.storages import Held
from bpipe.schedules import Action, Op, Plan, build
from tests.schedules.strategies import plans

Key = tuple[int, int]
Footprints = dict[Key, Footprint]


def follow(ledger: Ledger, actions: tuple[Action, ...], footprints: Footprints) -> Iterator[Action]:
    """Tell a ledger what a rank does, the way the runtime does, and stop after every action."""
    for action in actions:
        key = action[1:3]
        if action.op is Op.F:
            ledger.forward(key, (key[0], ""), footprints[key])
        elif action.op in (Op.B, Op.W):
            ledger.backward(key)
        elif action.op is Op.WAIT_EVICT:
            ledger.evicted(action, footprints[key].movable_bytes)
        elif action.op is Op.LOAD:
            ledger.loading(action)
        yield action


def recount(actions: tuple[Action, ...], footprints: Footprints) -> tuple[int, int]:
    """The bytes and slots that are live after some actions, with no running sums."""
    done = {(action.op, *action[1:3]) for action in actions}
    num_bytes = slots = 0
    for key, footprint in footprints.items():
        is_gone = (Op.F, *key) not in done or (Op.B, *key) in done or (Op.W, *key) in done
        is_away = (Op.WAIT_EVICT, *key) in done and (Op.LOAD, *key) not in done
        num_bytes += 0 if is_gone else footprint.own_bytes - footprint.movable_bytes * is_away
        slots += not is_gone and not is_away
    return num_bytes, slots


@given(plans(), st.data())
@settings(max_examples=40)
def test_ledger_against_a_recount(plan: Plan, data: st.DataObject) -> None:
    sizes = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: Footprint(sum(pair), pair[0], 0))
    footprints = {(x, i): data.draw(sizes) for x in range(plan.num_stages) for i in range(plan.num_microbatches)}
    for rank, actions in enumerate(plan.actions):
        own = {key: footprint for key, footprint in footprints.items() if plan.stage_ranks[key[0]] == rank}
        ledger = Ledger()
        counts = []
        for count, _ in enumerate(follow(ledger, actions, own), start=1):
            counts.append(recount(actions[:count], own))
            assert (ledger.live_bytes, ledger.slots) == counts[-1]
        assert (ledger.peak_bytes, ledger.peak_slots) == tuple(map(max, zip(*counts)))
        assert (ledger.live_bytes, ledger.slots) == (0, 0)
        assert predicted_peak_bytes(actions, own) == ledger.peak_bytes
        assert ledger.peak_slots + sum(map(len, plan.rooms(rank).values())) == plan.peak_slots[rank]
        assert ledger.evicted_bytes == ledger.loaded_bytes == sum(own[key].movable_bytes for key in plan.evicted(rank))


@given(
    st.sampled_from(["gpipe", "1f1b", "balanced_1f1b"]),
    st.integers(1, 8),
    st.integers(1, 24),
    st.integers(1, 99),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_peak_is_slots_times_bytes_where_all_microbatches_are_alike(name: str, p: int, m: int, movable: int, fixed: int) -> None:
    plan = build(name, p, m)
    for rank, actions in enumerate(plan.actions):
        footprints = {(rank, i): Footprint(movable + fixed, movable, 0) for i in range(m)}
        ledger = Ledger()
        assert len(list(follow(ledger, actions, footprints))) == len(actions)
        assert predicted_peak_bytes(actions, footprints) == ledger.peak_bytes
        if fixed == 0 or not plan.evicted(rank):
            assert ledger.peak_bytes == ledger.peak_slots * (movable + fixed)


def test_what_is_shared_counts_once_for_each_kind_of_microbatch() -> None:
    ledger = Ledger()
    for microbatch, (shapes, shared_bytes) in enumerate([("even", 8), ("even", 8), ("odd", 4), ("odd", 4)]):
        ledger.forward((0, microbatch), (0, shapes), Footprint(0, 0, shared_bytes))
    assert ledger.held_bytes == 8 + 4


def test_a_second_look_corrects_the_first() -> None:
    ledger = Ledger()
    ledger.forward((0, 0), (0, ""), Footprint(10, 10, 5))
    ledger.seen_again((0, 0), Footprint(15, 15, 0))
    ledger.evicted(Action(Op.EVICT, 0, 0, peer=1), 15)
    assert ledger.live_bytes == 0
    ledger.loading(Action(Op.LOAD, 0, 0, peer=1))
    ledger.backward((0, 0))
    assert (ledger.live_bytes, ledger.peak_bytes, ledger.slots) == (0, 15, 0)


def test_an_eviction_of_what_was_never_saved() -> None:
    with pytest.raises(KeyError):
        Ledger().loading(Action(Op.LOAD, 0, 0, peer=1))


def test_footprint() -> None:
    tensor = torch.empty(5)
    contents = Contents([(tensor.untyped_storage(), 1)], fixed_bytes=3, shared={7: Held((2,), torch.float32, 8, "a")})
    assert footprint_of(contents) == Footprint(own_bytes=23, movable_bytes=20, shared_bytes=8)


def test_nothing_to_predict() -> None:
    assert predicted_peak_bytes([], {}) == 0
