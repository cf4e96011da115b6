"""Two pipelines in opposite directions: their orders, their figures, their twins, and what a wrong plan of them is refused for."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import BudgetError, ConfigurationError, PlanError
from bpipe.passes.balance.balance import balance
from bpipe.plan.grid import rows
from bpipe.plan.order import UNITS, clock_of, linearise
from bpipe.schedules import (
    Action,
    Costs,
    Link,
    Op,
    Plan,
    Sizes,
    StageSizes,
    bidirectional,
    build,
    check_rule,
    finish,
    rules,
    simulate,
    verify,
)
from bpipe.simulator.critical import critical_path
from tests.amounts import amounts, changed
from tests.schedules.replay import occupied, occupied_bytes, replay
from tests.schedules.shape_of_plan import reshaped
from tests.tiers import examples

RULES = {rule.name: rule for rule in rules() if rule.placement.directions == 2}

# The authors' figure (docs/BitPipe_images/BitPipe-v.svg of their repository), a column a forward of a stage: d and u are the two
# directions, then the operation, the stage of the direction, and the microbatch of the direction.
PUBLISHED = """
dF0:0 dF0:1 . uF3:0 uF4:0 uF3:1 uF4:1 dF7:0 dB7:0 dB7:0 dF7:1 dB7:1 dB7:1 . uB4:0 uB4:0 uB3:0 uB3:0 uB4:1 uB4:1 uB3:1 uB3:1 dB0:0 dB0:0 . . dB0:1 dB0:1
. dF1:0 uF2:0 dF1:1 uF2:1 uF5:0 dF6:0 uF5:1 dF6:1 . dB6:0 dB6:0 uB5:0 uB5:0 dB6:1 dB6:1 uB5:1 uB5:1 uB2:0 uB2:0 dB1:0 dB1:0 uB2:1 uB2:1 dB1:1 dB1:1 . .
. uF1:0 dF2:0 uF1:1 dF2:1 dF5:0 uF6:0 dF5:1 uF6:1 . uB6:0 uB6:0 dB5:0 dB5:0 uB6:1 uB6:1 dB5:1 dB5:1 dB2:0 dB2:0 uB1:0 uB1:0 dB2:1 dB2:1 uB1:1 uB1:1 . .
uF0:0 uF0:1 . dF3:0 dF4:0 dF3:1 dF4:1 uF7:0 uB7:0 uB7:0 uF7:1 uB7:1 uB7:1 . dB4:0 dB4:0 dB3:0 dB3:0 dB4:1 dB4:1 dB3:1 dB3:1 uB0:0 uB0:0 . . uB0:1 uB0:1
"""  # noqa: E501


def made(name: str, p: int, m: int) -> Plan:
    return build(name, p * RULES[name].default_stages_per_rank, m, num_ranks=p)


def step(plan: Plan) -> float:
    """The step in forwards of a rank's share of the model, whose backward takes two."""
    share = plan.num_ranks / plan.depth
    return simulate(plan, Costs(forward_s=share, backward_s=2 * share)).makespan_s


def peaks(plan: Plan) -> list[float]:
    """Peaks in microbatches of a rank's share."""
    return [slots * plan.num_ranks / plan.depth for slots in plan.peak_slots]


def test_bitpipe_is_the_published_figure() -> None:
    plan = made("bitpipe", 4, 4)
    starts = clock_of(plan, [plan.compute(rank) for rank in range(4)])[0]
    drawn = []
    for rank, times in enumerate(starts):
        cells = ["."] * 28
        for action, start in zip(plan.compute(rank), times):
            direction, stage = divmod(action.stage, 8)
            for unit in range(UNITS[action.op]):
                cells[start + unit] = f"{'du'[direction]}{action.op}{stage}:{action.microbatch // 2}"
        drawn.append(" ".join(cells))
    assert drawn == PUBLISHED.strip().splitlines()


def test_the_grids_in_the_docstring_are_the_rules() -> None:
    for plan in (made("bitpipe", 2, 2), made("chimera", 4, 4)):
        assert "\n".join(rows(plan)) in str(bidirectional.__doc__)


@pytest.mark.parametrize(("p", "steps"), [(2, 6), (4, 14), (6, 22), (8, 30), (16, 62)])
def test_bitpipe_of_one_unit(p: int, steps: int) -> None:
    plan = made("bitpipe", p, p)
    assert step(plan) == steps == 3 * p + p - 2
    assert peaks(plan) == [p - (p / 2 - 1 - min(x, p - 1 - x)) / 2 for x in range(p)]
    assert made("bitpipe_reordered", p, p).actions == plan.actions


def test_two_units() -> None:
    """Concatenated as in the authors' code they take 27 and 57 forwards."""
    found = {(name, p): step(made(name, p, 2 * p)) for name, p in product(RULES, (4, 8))}
    assert (found["bitpipe", 4], found["bitpipe", 8]) == (26.5, 56.5)
    assert (found["bitpipe_reordered", 4], found["bitpipe_reordered", 8]) == (25.5, 52.5)
    assert max(peaks(made("bitpipe", 8, 16))) == 8 and max(peaks(made("bitpipe_reordered", 8, 16))) == 9.5


@pytest.mark.parametrize(("p", "bubble"), [(4, 0.5), (8, 1.5)])
def test_bitpipe_with_halves(p: int, bubble: float) -> None:
    for units in (1, 2, 3):
        plan = made("bitpipe_zb", p, units * p)
        assert step(plan) - 3 * plan.num_microbatches == bubble
        assert max(peaks(plan)) == p


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_chimera(p: int) -> None:
    plan = made("chimera", p, p)
    assert step(plan) - 3 * p == 2 * (p - 2)
    assert max(peaks(plan)) == p


def test_beside_zbv_bitpipe_with_whole_backwards_is_slower() -> None:
    """What the docstring says of the second copy of the weights."""
    for p in (4, 8):
        zbv = simulate(build("zbv", 2 * p, p, num_ranks=p), Costs(forward_s=0.5, backward_s=1.0)).makespan_s
        assert zbv < step(made("bitpipe", p, p)) and zbv >= step(made("bitpipe_zb", p, p))


@pytest.mark.parametrize("name", RULES)
def test_formulas_hold(name: str) -> None:
    for p, units in product((2, 4, 6, 10), (1, 2, 4)):
        check_rule(RULES[name], p, units * p)


@pytest.mark.parametrize("name", RULES)
def test_the_independent_machine_agrees(name: str) -> None:
    for p, units in product((2, 4, 6), (1, 2)):
        plan = made(name, p, units * p)
        assert replay(plan) is None
        assert occupied(plan) == plan.peak_slots
        assert Plan.from_text(plan.to_text()) == plan
        assert len(linearise(plan)) == sum(map(len, plan.actions))


@pytest.mark.parametrize("name", RULES)
def test_each_microbatch_goes_one_way_and_each_stage_exchanges_its_gradients_once(name: str) -> None:
    plan = made(name, 4, 8)
    for rank, lane in enumerate(plan.actions):
        for stage in plan.stages_of(rank):
            own = [a for a in lane if a.stage == stage]
            twin = plan.flow.exchanges[stage, 0].other
            assert plan.flow.exchanges[twin, 0].other == stage and plan.stage_ranks[twin] == 3 - rank
            assert [a.microbatch for a in own if a.op is Op.F] == list(range(stage // plan.depth, 8, 2))
            ends = [(a.op, a.peer) for a in own if a.op in (Op.B, Op.W, Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD)][-3:]
            assert [op for op, _ in ends[1:]] == [Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD]
            assert {peer for _, peer in ends[1:]} == {3 - rank}


def test_the_table_of_the_page_is_that_of_the_plans() -> None:
    """Bubbles and peaks in docs/two-directions.md."""
    page = (Path(__file__).parents[2] / "docs" / "two-directions.md").read_text()
    names = {"OneFOneB": "1f1b", "ZBV": "zbv"} | {rule.runs_as: rule.name for rule in RULES.values()}
    table = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|[^|]*\|$", page, re.MULTILINE))
    assert table.keys() == names.keys()
    for runs_as, name in names.items():
        rule = next(rule for rule in rules() if rule.name == name)
        plans = [build(name, p * rule.default_stages_per_rank, m, num_ranks=p) for p, m in ((4, 4), (8, 8), (4, 8), (8, 16))]
        found = [*(step(plan) - 3 * plan.num_microbatches for plan in plans), max(peaks(plans[2]))]
        assert [float(cell) for cell in table[runs_as].split("|")] == found, name


def test_exchanges_hide_behind_computations() -> None:
    """Exchanges that take as long as a forward of a rank make the step longer by the last one alone, not by one for each stage."""
    plan = made("bitpipe", 8, 8)
    costs = Costs(forward_s=0.5, backward_s=1.0, exchanged_bytes=1)
    plain, slow = (simulate(plan, replace(costs, link=Link(bytes_per_s=speed))) for speed in (float("inf"), 1.0))
    computed = [max(timeline.span_s(rank)[1] for rank in range(8)) for timeline in (plain, slow)]
    assert computed[0] == computed[1] == plain.makespan_s  # computations wait for no exchange
    assert slow.makespan_s == max(max(times.end_s) for times in slow.actions) == plain.makespan_s + 1.0
    *_, (_, (last, begin_s, end_s)) = critical_path(slow)
    assert (last.op, end_s - begin_s) == (Op.REDUCE_GRAD, 1.0)


def test_an_odd_number_of_ranks_and_a_part_of_a_unit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the number of ranks must be even"):
        build("bitpipe", 12, 6, num_ranks=3)
    with pytest.raises(ConfigurationError, match="8 would"):
        build("bitpipe", 16, 6, num_ranks=4)
    with pytest.raises(ConfigurationError, match="two stages per rank, one of each direction"):
        build("chimera", 16, 4, num_ranks=4)


def test_torch_has_no_two_directions() -> None:
    with pytest.raises(PlanError, match="has alternatives, which torch"):
        made("bitpipe", 2, 2).to_csv()


WRONG_ROUTES = ["[]", "[[0,1,2],[3,4]]", "[[0,1,2],[3,4,6]]", "[[0,1,2],[3,5,4]]", "[[0,1,2],[3,4,-5]]", "3", '"012"']


@pytest.mark.parametrize("routes", WRONG_ROUTES)
def test_a_text_with_wrong_routes_is_refused(routes: str) -> None:
    shape = f"flow alternatives [[0,1,2,2,1,0],{routes},true]\nrank 0:"
    with pytest.raises(PlanError, match="not a plan: what it computes cannot be read"):
        Plan.from_text(build("1f1b", 3, 3).to_text().replace("rank 0:", shape))
    Plan.from_text(build("1f1b", 3, 3).to_text().replace("rank 0:", shape.replace(routes, "[[0,1,2],[3,4,5]]")))


def harmful(plan: Plan) -> dict[str, Plan]:
    """Plans with one mistake about directions or twins each."""

    def with_lane(rank: int, lane: list[Action]) -> Plan:
        return replace(plan, actions=(*plan.actions[:rank], tuple(lane), *plan.actions[rank + 1 :]))

    lane = list(plan.actions[0])
    first = next(i for i, a in enumerate(lane) if a.op is Op.REDUCE_GRAD)
    wait = next(i for i, a in enumerate(lane) if a.op is Op.WAIT_REDUCE_GRAD)
    backward = max(i for i in range(first) if lane[i].stage == lane[first].stage and lane[i].op in (Op.B, Op.W))
    forward = next(i for i, a in enumerate(lane) if a.op is Op.F)
    exchanges = [i for i, a in enumerate(lane) if a.op is Op.REDUCE_GRAD]
    swapped = list(lane)
    swapped[exchanges[-2]], swapped[exchanges[-1]] = lane[exchanges[-1]], lane[exchanges[-2]]
    swapped.sort(key=lambda a: a.op is Op.REDUCE_GRAD or a.op is Op.WAIT_REDUCE_GRAD)  # all behind the computations
    other = lane[forward]._replace(microbatch=lane[forward].microbatch + 1)
    return {
        "an exchange is missing": with_lane(0, lane[:first] + lane[first + 1 :]),
        "both of one are missing": with_lane(0, [a for i, a in enumerate(lane) if i not in (first, wait)]),
        "nobody waits for one": with_lane(0, lane[:wait] + lane[wait + 1 :]),
        "twice": with_lane(0, [*lane, lane[first]]),
        "too early": with_lane(0, [*lane[:backward], lane[first], *lane[backward:first], *lane[first + 1 :]]),
        "awaited first": with_lane(0, [*lane[:first], lane[wait], *lane[first:wait], *lane[wait + 1 :]]),
        "with another rank": with_lane(0, [*lane[:first], lane[first]._replace(peer=1), *lane[first + 1 :]]),
        "with nobody": with_lane(0, [*lane[:first], lane[first]._replace(peer=None), *lane[first + 1 :]]),
        "in another order": with_lane(0, swapped),
        "a microbatch of the other direction": with_lane(0, [*lane[:forward], other, *lane[forward + 1 :]]),
        "one direction": reshaped(plan, directions=1),
    }


@pytest.mark.parametrize(("name", "harm"), [*product(RULES, harmful(made("bitpipe", 4, 4)))])
def test_harmful_mutations_are_caught(name: str, harm: str) -> None:
    plan = harmful(made(name, 4, 8))[harm]
    with pytest.raises(PlanError, match="breaks"):
        verify(plan)
    assert replay(plan) is not None


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_no_reordering_that_does_harm_is_missed(name: str, data: st.DataObject) -> None:
    plan = made(name, 4, 8)
    rank = data.draw(st.integers(0, 3))
    lane = list(plan.actions[rank])
    source = data.draw(st.integers(0, len(lane) - 1))
    action = lane.pop(source)
    lane.insert(data.draw(st.integers(max(0, source - 12), min(len(lane), source + 12))), action)
    changed = replace(plan, actions=(*plan.actions[:rank], tuple(lane), *plan.actions[rank + 1 :]))
    try:
        verify(changed)
    except PlanError:
        return
    assert replay(changed) is None


@st.composite
def sized(draw: st.DrawFn) -> Plan:
    """Plans in bytes, with the gradients that twins exchange, many of them with evictions."""
    name, p = draw(st.sampled_from(sorted(RULES))), draw(st.sampled_from((2, 4)))
    plan = made(name, p, p * draw(st.integers(1, 2)))
    number = st.integers(0, 9)
    half = [
        StageSizes(
            parts=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=1))),
            fixed=draw(number),
            amounts=amounts(sent=draw(number), gradients=draw(number)),
        )
        for _ in range(plan.depth)
    ]
    half = [changed(one, received=half[s - 1]["out"].num_bytes if s else 0) for s, one in enumerate(half)]
    sizes = Sizes(stages=(*half, *half), static=(draw(number),) * p)
    highest = replace(plan, sizes=sizes).device_peak_bytes
    budgets = [peak - draw(st.integers(0, peak // 8)) for peak in highest]
    with suppress(BudgetError):
        return finish(balance(plan, sizes=sizes, budgets=budgets))
    return finish(balance(plan, sizes=sizes, budgets=list(highest)))


@given(sized())
@settings(max_examples=examples(60), deadline=None)
def test_bytes_are_those_of_the_independent_machine(plan: Plan) -> None:
    verify(plan)
    assert replay(plan) is None
    assert plan.device_peak_bytes == occupied_bytes(plan)
    assert Plan.from_text(plan.to_text()) == plan
    assert simulate(plan, Costs()).makespan_s > 0
