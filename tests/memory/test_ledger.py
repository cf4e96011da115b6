"""The ledger against a recount from nothing at every action, and against a scan of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.memory.ledger import Account, Ledger
from bpipe.memory.peaks import peak
from bpipe.memory.saved.footprint import Footprint, covering, footprint_of
from bpipe.memory.saved.stash import Movable, StashContents
from bpipe.memory.saved.storages import Held
from bpipe.schedules import Action, Op, Plan, Sizes, StageSizes, build
from tests.amounts import amounts, changed
from tests.schedules.strategies import plans
from tests.tiers import examples

Key = tuple[int, int]
Footprints = dict[Key, Footprint]


@st.composite
def footprints_with_messages(draw: st.DrawFn) -> Footprint:
    parts = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    own, received, sent = sum(parts) + draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    kept = [draw(st.integers(0, min(own, message))) for message in (received, sent)]
    messages = amounts(received=received, sent=sent, kept_received=kept[0], kept_sent=kept[1])
    return Footprint(own, sum(parts), 0, parts, draw(st.one_of(st.none(), st.integers(0, 20))), messages)


FOOTPRINTS_WITH_MESSAGES = footprints_with_messages()
FOOTPRINTS = FOOTPRINTS_WITH_MESSAGES.map(lambda footprint: footprint._replace(parts=()))


def follow(ledger: Ledger, actions: tuple[Action, ...], footprints: Footprints) -> Iterator[Action]:
    """Tell a ledger what a rank does, the way the runtime does, and stop after every action."""
    for action in actions:
        key = action.stage, action.microbatch
        if action.op is Op.F:
            account = ledger.accounts[key] = Account((action.stage, ""))
            ledger.forward(account, footprints[key])
        elif action.op is Op.I:
            ledger.backward_input(ledger.accounts[key], footprints[key].between_bytes)
        elif action.op in (Op.B, Op.W):
            ledger.backward(ledger.accounts[key])
        elif action.op is Op.WAIT_EVICT:
            ledger.evicted(action, footprints[key].movable_bytes)
        elif action.op is Op.LOAD:
            ledger.loading(action, footprints[key].movable_bytes)
        yield action


def covered(footprints: list[Footprint]) -> StageSizes:
    """The sizes that cover microbatches that are not cut into slices."""
    (sizes,) = covering([[one.sizes() for one in footprints]])
    return sizes


def recount(actions: tuple[Action, ...], footprints: Footprints) -> tuple[int, int]:
    """The bytes and slots that are live after some actions, with no running sums."""
    done = {(action.op, *action[1:3]) for action in actions}
    num_bytes = slots = 0
    for key, footprint in footprints.items():
        is_gone = (Op.F, *key) not in done or (Op.B, *key) in done or (Op.W, *key) in done
        is_away = (Op.WAIT_EVICT, *key) in done and (Op.LOAD, *key) not in done
        has = footprint.own_bytes - footprint.movable_bytes * is_away
        if (Op.I, *key) in done and footprint.between_bytes is not None:
            has = footprint.between_bytes
        num_bytes += 0 if is_gone else has
        slots += not is_gone and not is_away
    return num_bytes, slots


@given(plans(), st.data())
@settings(max_examples=examples(40))
def test_ledger_against_a_recount(plan: Plan, data: st.DataObject) -> None:
    footprints = {(x, i): data.draw(FOOTPRINTS) for x in range(plan.num_stages) for i in range(plan.num_microbatches)}
    for rank, actions in enumerate(plan.actions):
        own = {key: footprint for key, footprint in footprints.items() if plan.stage_ranks[key[0]] == rank}
        ledger = Ledger()
        counts = []
        for count, _ in enumerate(follow(ledger, actions, own), start=1):
            counts.append(recount(actions[:count], own))
            assert (ledger.live_bytes, ledger.slots) == counts[-1]
        assert (ledger.peak_bytes, ledger.peak_slots) == tuple(map(max, zip(*counts)))
        assert (ledger.live_bytes, ledger.slots) == (0, 0)
        assert peak(plan, rank, own, with_messages=False) == ledger.peak_bytes
        assert ledger.peak_slots + sum(map(len, plan.remote_buffers(rank).values())) == plan.peak_slots[rank]
        assert ledger.evicted_bytes == ledger.loaded_bytes == sum(own[key].movable_bytes for key in plan.evicted(rank))


@given(
    st.sampled_from(["gpipe", "1f1b", "balanced_1f1b"]),
    st.integers(1, 8),
    st.integers(1, 24),
    st.integers(1, 99),
    st.integers(0, 99),
)
@settings(max_examples=examples(60))
def test_peak_is_slots_times_bytes_where_all_microbatches_are_alike(name: str, p: int, m: int, movable: int, fixed: int) -> None:
    plan = build(name, p, m)
    for rank, actions in enumerate(plan.actions):
        footprints = {(rank, i): Footprint(movable + fixed, movable, 0) for i in range(m)}
        ledger = Ledger()
        assert len(list(follow(ledger, actions, footprints))) == len(actions)
        assert peak(plan, rank, footprints, with_messages=False) == ledger.peak_bytes
        if fixed == 0 or not plan.evicted(rank):
            assert ledger.peak_bytes == ledger.peak_slots * (movable + fixed)


def test_what_is_shared_counts_once_for_each_kind_of_microbatch() -> None:
    ledger = Ledger()
    for microbatch, (shapes, shared_bytes) in enumerate([("even", 8), ("even", 8), ("odd", 4), ("odd", 4)]):
        account = ledger.accounts[0, microbatch] = Account((0, shapes))
        ledger.forward(account, Footprint(0, 0, shared_bytes))
    assert ledger.held_bytes == 8 + 4


def test_a_second_look_corrects_the_first() -> None:
    ledger = Ledger()
    account = ledger.accounts[0, 0] = Account((0, ""))
    ledger.forward(account, Footprint(10, 10, 5))
    ledger.seen_again(account, contents_of(15, fixed=0), (15,))
    ledger.evicted(Action(Op.EVICT, 0, 0, peer=1), 15)
    assert ledger.live_bytes == 0
    ledger.loading(Action(Op.LOAD, 0, 0, peer=1), 15)
    ledger.backward(account)
    assert (ledger.live_bytes, ledger.peak_bytes, ledger.slots) == (0, 15, 0)


def test_a_microbatch_takes_nothing_that_is_known_before_its_forward() -> None:
    ledger = Ledger()
    account = ledger.accounts[0, 0] = Account((0, ""))
    assert ledger.footprints == {}
    with pytest.raises(AssertionError, match="known after the forward"):
        ledger.seen_again(account, contents_of(1, fixed=0), (1,))


def test_footprint() -> None:
    assert footprint_of(contents_of(20, fixed=3)) == Footprint(own_bytes=23, movable_bytes=20, shared_bytes=8)


def contents_of(movable: int, fixed: int) -> StashContents:
    """A look that found so many bytes, and 8 that are shared."""
    storage = torch.empty(movable, dtype=torch.uint8).untyped_storage()
    return StashContents([Movable(storage, [], False)], fixed={5: fixed}, shared={7: Held((2,), torch.float32, 8, "a")})


MESSAGES = amounts(received=4, sent=6, kept_received=4)


def test_peaks_are_the_plans_where_all_footprints_are_its_sizes() -> None:
    footprint = Footprint(10, 7, 0, parts=(3, 4), between_bytes=5, amounts=MESSAGES)
    for name, num_stages in (("1f1b", 4), ("zb_h1", 4), ("zbv", 8), ("interleaved_1f1b", 8)):
        sizes = Sizes(stages=(footprint.sizes(),) * num_stages, static=(100,) * 4)
        plan = replace(build(name, num_stages, 8, num_ranks=4), sizes=sizes)
        for rank in range(4):
            footprints = {(x, i): footprint for x in range(num_stages) if plan.stage_ranks[x] == rank for i in range(8)}
            assert 100 + peak(plan, rank, footprints, with_messages=True) == plan.device_peak_bytes[rank]


def test_nothing_to_predict() -> None:
    plan = build("1f1b", 2, 4)
    assert peak(replace(plan, actions=((), ())), 0, {}, with_messages=True) == 0


# Sizes that cover several kinds of microbatches.


def test_one_kind_is_covered_exactly() -> None:
    footprint = Footprint(10, 7, 0, parts=(3, 4), amounts=MESSAGES)
    assert covered([footprint, footprint]) == footprint.sizes()


def test_what_covers_has_as_many_parts_as_any() -> None:
    assert covered([Footprint(3, 3, 0, parts=(1, 2)), Footprint(4, 4, 0, parts=(4,))]).parts == (4, 2)


@given(st.lists(FOOTPRINTS_WITH_MESSAGES, min_size=1, max_size=4))
def test_what_covers_has_room_for_each_at_every_action(footprints: list[Footprint]) -> None:
    sizes = Sizes(stages=(covered(footprints),) * 4, static=(0,) * 2)
    for name, num_stages in (("1f1b", 2), ("zb_h1", 2), ("zbv", 4)):
        plan = replace(build(name, num_stages, 4, num_ranks=2), sizes=replace(sizes, stages=sizes.stages[:num_stages]))
        for rank in range(2):
            mixed = {(x, i): footprints[(x + i) % len(footprints)] for x in range(num_stages) for i in range(4)}
            assert peak(plan, rank, mixed, with_messages=True) <= plan.device_peak_bytes[rank]


def test_what_is_kept_of_a_message_is_no_more_than_what_is_saved() -> None:
    sizes = Footprint(3, 3, 0, amounts=amounts(received=8, sent=8, kept_received=8, kept_sent=4)).sizes()
    assert (sizes["in"].kept, sizes["out"].kept) == (3, 3)


def test_slices_are_covered_one_by_one() -> None:
    first = StageSizes(parts=(8,), fixed=3, amounts=amounts(state=2, collected=4))
    last = StageSizes(parts=(5, 1), fixed=1, amounts=amounts(given=4))
    assert covering([[first, first], [last]]) == (replace(first, parts=(8, 0)), last)
    other = replace(changed(first, collected=6), parts=(9,))  # what it collects, nobody has given
    covers = replace(changed(first, collected=0), parts=(9, 0), fixed=9), changed(last, given=0)
    assert covering([[first, other], [last]]) == covering([[other], [last]]) == covers
