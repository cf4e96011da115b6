"""Plans whose forwards run side by side with backwards: torch's text, the verifier, memory, budgets and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

from bpipe.errors import ConfigurationError, PlanError
from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import computations_only, forward_only
from bpipe.passes.encoder import with_encoder
from bpipe.passes.overlap import overlap
from bpipe.passes.profiling_order import profiling_order
from bpipe.passes.recompute import recompute
from bpipe.plan.issue_order import issue_orders
from bpipe.plan.meter import occupancy
from bpipe.plan.order import clock_of
from bpipe.schedules import Action, Costs, Op, Plan, Sizes, StageSizes, build, finish, from_csv, rules, simulate, verify
from bpipe.schedules.registry import rule_named
from bpipe.simulator.critical import critical_path
from bpipe.simulator.gaps import gaps_of
from tests.amounts import amounts
from tests.schedules.replay import replay
from tests.schedules.shape_of_plan import reshaped

PLANS = {
    "dualpipe_v": lambda: build("dualpipe_v", 6, 9, overlapped=True),
    "interleaved": lambda: build("interleaved_1f1b", 8, 8, num_ranks=4, overlapped=True),
    "1f1b": lambda: finish(overlap(build("1f1b", 4, 9))),
    "bitpipe": lambda: finish(overlap(build("bitpipe", 16, 8, num_ranks=4))),
    "slices": lambda: finish(overlap(build("seq_1f1b", 3, 6, slices=2))),
}


@pytest.fixture(params=PLANS, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    made: Plan = PLANS[request.param]()
    assert made.overlapped
    return made


def torch_rows(p: int, m: int) -> list[list[str]]:
    """The computations of torch's own DualPipeV, as it writes them."""
    ranks = SimpleNamespace(pp_group_size=p, _n_microbatches=m)
    of_rank: Callable[..., list[object]] = torchs.ScheduleDualPipeV._calculate_single_rank_operations
    return [list(map(str, of_rank(ranks, rank))) for rank in range(p)]


@pytest.mark.parametrize("p", range(2, 9))
def test_torchs_dualpipe_v(p: int) -> None:
    """Its CSV is read with its pairs, which are ours; ours is read by torch, and says the same there."""
    for m in range(2 * p, 4 * p + 1):
        rows = torch_rows(p, m)
        read = from_csv("\n".join(map(",".join, rows)), name="dualpipe_v")
        assert read == build("dualpipe_v", 2 * p, m, overlapped=True)
        verify(read)
        assert Plan.from_text(read.to_text()) == read == from_csv(read.to_csv(), name="dualpipe_v")
        for line, row in zip(read.to_csv().splitlines(), rows):
            cells = [cell for cell in line.split(",") if "SEND" not in cell and "RECV" not in cell]
            assert [str(torchs._Action.from_str(cell)) for cell in cells] == row


def test_without_pairs_nothing_changes() -> None:
    """The text, and with it the fingerprint, of a plan without pairs has no word of them."""
    plain, paired = build("dualpipe_v", 4, 8), build("dualpipe_v", 4, 8, overlapped=True)
    assert "OVERLAP" not in plain.to_text() and plain.fingerprint() != paired.fingerprint()
    assert computations_only(plain).actions == computations_only(paired).actions


def test_either_order(plan: Plan) -> None:
    """Nothing stands between the two of a pair, and they may as well run in the other order: neither needs the other."""
    verify(plan)
    issue_orders(plan)
    assert replay(plan) is None
    assert replay(swapped(plan)) is None


def swapped(plan: Plan) -> Plan:
    """The plan with the backward of each pair before the forward."""
    lanes = []
    for lane in plan.actions:
        actions = list(lane)
        for index, action in enumerate(lane):
            if plan.begins_pair(action):
                actions[index], actions[index + 1] = actions[index + 1], actions[index]
        lanes.append(tuple(actions))
    return replace(plan, actions=tuple(lanes), overlapped=frozenset())


def test_all_passes_keep_or_drop_them(plan: Plan) -> None:
    assert Plan.from_text(plan.to_text()) == plan
    assert finish(computations_only(plan)) == plan
    for other in (forward_only(plan), profiling_order(plan)):
        assert not other.overlapped
        verify(finish(other))
    with pytest.raises(ConfigurationError, match="without pairs"):
        with_encoder(build("dualpipe_v", 6, 9, overlapped=True), 1, Costs())


def sizes_of(plan: Plan, random: Random) -> Sizes:
    def stage() -> StageSizes:
        parts = tuple(random.randint(1, 40) for _ in range(3))
        return StageSizes(parts=parts, amounts=amounts(received=random.randint(0, 9), sent=random.randint(0, 9)))

    return Sizes(stages=tuple(stage() for _ in range(plan.num_stages)), static=(random.randint(0, 50),) * plan.num_ranks)


@pytest.mark.parametrize("seed", range(3))
def test_budgets(plan: Plan, seed: int, little_effort: None) -> None:
    """Plans with pairs are balanced in slots and bytes like others, evicting nothing between the two of a pair."""
    random = Random(seed)
    sizes = sizes_of(plan, random)
    lowest = finish(balance(plan, sizes=sizes, costs=random.choice([None, Costs(overlapped_share=0.3)])))
    verify(lowest)
    free = max(finish(replace(computations_only(plan), sizes=sizes)).device_peak_bytes)
    budget = random.randint(max(lowest.device_peak_bytes), free)
    balanced = finish(balance(plan, sizes=sizes, budgets=budget))
    verify(balanced)
    issue_orders(balanced)
    assert balanced.overlapped == plan.overlapped and max(balanced.device_peak_bytes) <= budget
    assert replay(balanced) is replay(swapped(balanced)) is None


def test_some_evict(little_effort: None) -> None:
    """A balanced interleaved plan has pairs, evictions and fewer slots on its fullest rank."""
    plan = build("interleaved_1f1b", 8, 8, num_ranks=4, overlapped=True)
    fewer = finish(balance(plan, slots=max(plan.peak_slots) - 2))
    assert any(action.op is Op.EVICT for lane in fewer.actions for action in lane)
    assert max(fewer.peak_slots) == max(plan.peak_slots) - 2 and fewer.overlapped == plan.overlapped


def test_recomputed_pairs_come_apart() -> None:
    plan = finish(overlap(build("1f1b", 4, 9)))
    fewer = finish(recompute(plan, sizes=Sizes.of([4] * 4), budgets=12))
    again = {action.key for lane in fewer.actions for action in lane if action.op is Op.R}
    assert again and fewer.overlapped < plan.overlapped
    assert not fewer.overlapped & again
    verify(fewer)


def test_bytes_of_a_pair() -> None:
    """Both take their memory when the pair begins, and free it when it has ended, so that it does not matter who comes first."""
    stage = StageSizes(parts=(100,), amounts=amounts(received=10, sent=20))
    plan = replace(build("dualpipe_v", 4, 8, overlapped=True), sizes=Sizes(stages=(stage,) * 4, static=(0, 0)))
    one_by_one = replace(plan, overlapped=frozenset())
    for lane, other in zip(plan.actions, swapped(plan).actions):
        beside = list(occupancy(lane, plan.meter()))
        apart, reverse = (list(occupancy(one, one_by_one.meter())) for one in (lane, other))
        assert all(live >= max(others) for live, *others in zip(beside, apart, reverse))
        for i in (i for i, action in enumerate(lane) if plan.begins_pair(action)):
            assert beside[i] == beside[i + 1] == apart[i] + plan.meter().change(lane[i + 1])[0] >= max(apart[i : i + 2])


def test_verifier() -> None:
    plan = build("dualpipe_v", 4, 8, overlapped=True)
    (stage, unit), *_ = sorted(plan.overlapped)
    rank = plan.stage_ranks[stage]
    index = plan.actions[rank].index(Action(Op.F, stage, unit))

    def changed(lane: tuple[Action, ...]) -> Plan:
        return replace(plan, actions=(*plan.actions[:rank], lane, *plan.actions[rank + 1 :]))

    lane = plan.actions[rank]
    with pytest.raises(PlanError, match=rf"overlapped: .*{stage}F{unit} runs side by side with the whole backward that follows it"):
        verify(changed((*lane[: index + 1], lane[index + 2], lane[index + 1], *lane[index + 3 :])))
    with pytest.raises(PlanError, match=r"overlapped: .*cannot run side by side: one needs the other"):
        verify(replace(build("1f1b", 1, 2), overlapped=frozenset({(0, 0)})))
    with pytest.raises(PlanError, match="9F9, a forward of a pair, is outside 4 stages"):
        verify(replace(plan, overlapped=frozenset({(9, 9)})))
    with pytest.raises(PlanError, match="0SEND_F0>2 is missing"):
        verify(reshaped(plan, skips=((0, 2),)))
    with pytest.raises(PlanError, match=r"'\(0F1;0W0\)OVERLAP_F_B' is not a pair"):
        from_csv("(0F1;0W0)OVERLAP_F_B")


def test_pairs_that_would_wait_for_each_other_stay_apart() -> None:
    """Rank 0 runs 0F1 beside 0B0, which needs 1B0 behind 1F1, which needs 0F1."""
    plan = from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(PlanError, match="wait for each other"):
        clock_of(replace(plan, overlapped=frozenset({(0, 1)})), [plan.compute(rank) for rank in range(2)])
    assert overlap(plan).overlapped == {(1, 1)}
    verify(finish(overlap(plan)))


@pytest.mark.parametrize("name", [rule.name for rule in rules() if not rule.local])
def test_every_schedule_can_be_asked_for_pairs(name: str) -> None:
    num_stages = 8 if name.startswith(("bitpipe", "chimera", "interleaved", "breadth", "dual", "zbv", "v_")) else 4
    plan = finish(overlap(build(name, num_stages, 8)))
    verify(plan)
    issue_orders(plan)


@pytest.mark.parametrize(("name", "v", "slices"), [("dualpipe_v", 2, 1), ("interleaved_1f1b", 2, 1), ("interleaved_1f1b", 3, 2)])
def test_peaks_are_those_of_the_rule(name: str, v: int, slices: int) -> None:
    rule = rule_named(name).with_slices(slices).with_pairs()
    plan = build(name, 4 * v, 12, num_ranks=4, slices=slices, overlapped=True)
    assert rule.peak is not None
    assert max(plan.peak_slots) == max(rule.peak(4, 12, v, x) * v * slices for x in range(4))
    assert rule.bubble is None  # what pairs gain is up to `schedule.overlap`


def test_pairs_that_are_none() -> None:
    with pytest.raises(PlanError, match="0F0 runs side by side with the backward behind it, and there is none"):
        finish(replace(build("1f1b", 2, 4), overlapped=frozenset({(0, 0)})))
    with pytest.raises(PlanError, match="its forward is in another pair already"):
        from_csv("0F0,(0F1;0B0)OVERLAP_F_B,(0F1;0B1)OVERLAP_F_B")


@pytest.mark.parametrize("name", ["dualpipe_v", "interleaved_1f1b"])
@pytest.mark.parametrize("skips", [[(0, 2)], [(0, 1, 3), (1, 7)], [(0, 5, 7), (2, 4), (3, 6)]])
def test_pairs_and_skips(name: str, skips: list[tuple[int, ...]]) -> None:
    """No message is waited for between the two of a pair."""
    for plan in (build(name, 8, 12, num_ranks=4, overlapped=True, skips=skips), finish(overlap(build("1f1b", 8, 12, skips=skips)))):
        assert plan.overlapped and replay(plan) is None


def test_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"1f1b runs no forward side by side .*dualpipe_v or interleaved_1f1b"):
        build("1f1b", 4, 8, overlapped=True)
    with pytest.raises(ConfigurationError, match="overlapped_share=2"):
        Costs(overlapped_share=2)


@pytest.mark.parametrize(("name", "num_stages", "num_microbatches"), [("dualpipe_v", 8, 32), ("interleaved_1f1b", 8, 32)])
def test_time(name: str, num_stages: int, num_microbatches: int) -> None:
    """With 30% of each computation communication, the steady state takes 70%; one after the other, a pair costs next to nothing."""
    plain = build(name, num_stages, num_microbatches, num_ranks=4)
    paired = build(name, num_stages, num_microbatches, num_ranks=4, overlapped=True)
    before, apart, beside = (
        simulate(plan, Costs(overlapped_share=share)) for plan, share in ((plain, 0.3), (paired, 0.0), (paired, 0.3))
    )
    assert apart.makespan_s <= 1.02 * before.makespan_s
    for rank in range(4):
        begins = [span.begin_s for span in beside.computations(rank) if paired.begins_pair(span.action)]
        steady = begins[len(begins) // 4 : -len(begins) // 4]
        assert (steady[-1] - steady[0]) / (len(steady) - 1) == pytest.approx(0.7 * 3)
        assert beside.bubble_s(rank) == pytest.approx(beside.makespan_s - beside.work_s(rank)) and beside.bubble_s(rank) >= 0
        idle = sum(gap.seconds for gap in gaps_of(beside, rank))
        assert idle == pytest.approx(beside.bubble_s(rank))
    path = critical_path(beside)
    assert path[0].span.begin_s == 0 and path[-1].span.end_s == pytest.approx(beside.makespan_s)
    assert all(later.span.begin_s == pytest.approx(earlier.span.end_s) for earlier, later in pairwise(path))


def test_a_pair_lasts_as_long_as_its_longer_half() -> None:
    costs = Costs(forward_s=1.0, backward_s=3.0, overlapped_share=0.5)
    forward, backward = Action(Op.F, 0, 1), Action(Op.B, 0, 0)
    assert costs.pair_s(forward, backward) == 3.0
    assert replace(costs, overlapped_share=0.1).pair_s(forward, backward) == pytest.approx(3.6)


def test_grid() -> None:
    assert str(build("dualpipe_v", 4, 4, overlapped=True)).splitlines()[1:] == [
        "rank 0 | 0F0  0F1  0F2  3F0  3I0  3W0  3F1  (0F3 3B1  3b1) ..   (3F2 0B0  0b0) 3B2  3b2  ..   (3F3 0B1  0b1) 3B3  3b3  "
        "0I2  0W2  0I3  0W3",
        "rank 1 | ..   1F0  2F0  1F1  2F1  1F2  2B0  2b0  (2F2 1B0  1b0) (1F3 2B1  2b1) (2F3 1B1  1b1) 2B2  2b2  1B2  1b2  ..   "
        "2I3  1I3  2W3  1W3",
    ]
