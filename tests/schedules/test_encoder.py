"""An encoder in front of a model: plans that are sound by an independent replay, never slower than an encoder around stage 0."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.schedules import Action, Costs, Op, Plan, build, finish, from_csv, simulate, with_encoder
from tests.schedules.replay import replay
from tests.tiers import examples

RULES = ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zbv", "balanced_1f1b")


def base_of(rule: str, p: int, m: int) -> Plan:
    several = 2 if rule in ("interleaved_1f1b", "zbv") else 1
    return build(rule, p * several, m * (p if rule == "interleaved_1f1b" else 1), num_ranks=p)


def held(plan: Plan) -> int:
    """The most microbatches that stage 0 holds, from its forward to its backward."""
    now = most = 0
    for lane in plan.actions:
        for action in lane:
            if action.stage == 0 and action.op in (Op.F, Op.B, Op.I):
                now += 1 if action.op is Op.F else -1
                most = max(most, now)
    assert now == 0
    return most


@st.composite
def problems(draw: st.DrawFn) -> tuple[Plan, int, Costs, int]:
    p = draw(st.integers(2, 5))
    base = base_of(draw(st.sampled_from(RULES)), p, draw(st.integers(1, 6)))
    pieces = draw(st.integers(1, 3))
    seconds = st.floats(0.05, 3.0)
    forwards = [*draw(st.lists(seconds, min_size=pieces, max_size=pieces)), *[draw(seconds)] * base.num_stages]
    return base, pieces, Costs(forward_s=forwards), draw(st.integers(0, p - 1))


@given(problems(), st.none() | st.integers(0, 3))
@settings(max_examples=examples(80))
def test_plans_are_sound_and_hold_no_more_than_they_may(problem: tuple[Plan, int, Costs, int], more: int | None) -> None:
    base, pieces, costs, rank = problem
    most = None if more is None else held(base) + more
    plan = finish(with_encoder(base, pieces, costs, rank=rank, most=most))
    assert replay(plan) is None
    assert plan.stage_ranks == ((rank,) * pieces + base.stage_ranks)
    if most is not None:
        assert held(plan) <= most
    for own, lane in zip(base.actions, plan.actions):  # the model's order is its own
        computed = [a for a in own if a.op in (Op.F, Op.B, Op.I, Op.W)]
        assert [a for a in lane if a.op in (Op.F, Op.B, Op.I, Op.W) and a.stage >= pieces] == [
            Action(a.op, a.stage + pieces, a.microbatch) for a in computed
        ]


@pytest.mark.parametrize("rule", ["1f1b", "zb_h1", "interleaved_1f1b"])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_waits_are_used(rule: str, share: float) -> None:
    """Beside an encoder right around the first stage, which lengthens each of its turns."""
    base = base_of(rule, 4, 16 if rule != "interleaved_1f1b" else 4)
    costs = Costs(forward_s=[share, *[1.0] * base.num_stages])
    lanes: list[list[Action]] = []
    for lane in base.actions:
        lanes.append([])
        for action in (a for a in lane if a.op in (Op.F, Op.B, Op.I, Op.W)):
            moved = action._replace(stage=action.stage + 1)
            of_first = action.stage == 0
            lanes[-1] += [Action(Op.F, 0, action.microbatch)] * (of_first and action.op is Op.F)
            lanes[-1].append(moved)
            lanes[-1] += [Action(Op.B, 0, action.microbatch)] * (of_first and action.op in (Op.B, Op.I))
    csv = "\n".join(",".join(map(str, lane)) for lane in lanes)
    around = simulate(from_csv(csv), costs).makespan_s
    placed = simulate(finish(with_encoder(base, 1, costs)), costs).makespan_s
    assert placed <= around + 1e-9
    if rule == "1f1b" and share == 0.1:  # all of it fits, but for the first forward and the last backward
        alone = simulate(base, Costs()).makespan_s
        assert placed == pytest.approx(alone + 0.3) and around == pytest.approx(alone + 3.9)


def test_fewer_microbatches_than_the_first_stage_holds_are_refused() -> None:
    base, costs = build("1f1b", 4, 8), Costs()
    with pytest.raises(ConfigurationError, match="most=3: the encoder holds a microbatch as long as"):
        with_encoder(base, 1, costs, most=3)
    assert held(finish(with_encoder(base, 1, costs, most=4))) == 4


@pytest.mark.parametrize(
    ("plan", "how", "says"),
    [
        (build("seq_1f1b", 2, 4, slices=2), {}, "whole microbatches through a chain"),
        (build("chimera", 4, 4), {}, "whole microbatches through a chain"),
        (build("1f1b", 2, 4), {"pieces": 0}, "pieces=0, rank=0: give at least one piece"),
        (build("1f1b", 2, 4), {"rank": 2}, "one of the plan's 2 ranks"),
        (build("1f1b", 2, 4), {"costs": Costs(forward_s=[1.0, 1.0])}, "forward_s"),
    ],
)
def test_what_no_encoder_fits_is_refused(plan: Plan, how: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        with_encoder(plan, **{"pieces": 1, "costs": Costs(), **how})  # type: ignore[arg-type]
