"""The balance pass in bytes: any sizes, budgets, placements and destinations, judged by the independent replay."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import BudgetError, ConfigurationError, PlanError
from bpipe.passes.balance.balance import balance
from bpipe.passes.fit import FINENESS
from bpipe.schedules import Costs, Destinations, Plan, Sizes, build, finish, verify
from tests.schedules.mutations import ORDERING, STRUCTURAL, Mutation, refused, size_changed
from tests.schedules.replay import occupied, occupied_bytes, replay
from tests.schedules.sized import Problem, problems, sized_plans
from tests.tiers import examples

MUTANTS = 12  # of each plan

pytestmark = pytest.mark.usefixtures("little_effort")


# Balanced plans.


@given(sized_plans())
@settings(max_examples=examples(50))
def test_balanced_plans_verify_run_and_keep_their_budgets(plan: Plan) -> None:
    verify(plan)
    assert occupied(plan) == plan.peak_slots
    peaks = occupied_bytes(plan)
    assert peaks == plan.device_peak_bytes
    assert plan.budgets is None or all(budget is None or peak <= budget for peak, budget in zip(peaks, plan.budgets))


def smallest(error: BudgetError) -> list[int | None]:
    found = re.search(r"[Tt]he smallest budget that works here is budgets=(.+) \(.*\)\.$", str(error))
    assert found is not None
    budget = ast.literal_eval(found[1])
    return budget if isinstance(budget, int) else list(budget)


@given(problems(), st.integers(1, 60) | st.lists(st.none() | st.integers(1, 60), min_size=5, max_size=5))
@settings(max_examples=examples(50))
def test_a_budget_is_kept_or_the_smallest_that_works_is_named(drawn: Problem, given_budget) -> None:
    """It works, and one quantum less does not: budgets are searched to a part of the highest peak."""
    plan, sizes, to, costs = drawn
    budgets = given_budget if isinstance(given_budget, int) else given_budget[: plan.num_ranks]
    quantum = max(1, max(finish(replace(plan, sizes=sizes)).device_peak_bytes) // FINENESS)
    try:
        balanced = finish(balance(plan, sizes=sizes, budgets=budgets, to=to, costs=costs))
    except BudgetError as error:
        enough = smallest(error)
        balanced = finish(balance(plan, sizes=sizes, budgets=enough, to=to, costs=costs))
        short = enough - quantum if isinstance(enough, int) else [k if k is None else k - quantum for k in enough]
        with pytest.raises(BudgetError):
            balance(plan, sizes=sizes, budgets=short, to=to, costs=costs)
        budgets = enough
    each = (budgets,) * plan.num_ranks if isinstance(budgets, int) else budgets
    assert all(budget is None or peak <= budget for peak, budget in zip(occupied_bytes(balanced), each))
    assert [balanced.compute(rank) for rank in range(plan.num_ranks)] == [plan.compute(rank) for rank in range(plan.num_ranks)]


# Damaged plans.


@given(sized_plans(), st.sampled_from(STRUCTURAL), st.randoms(use_true_random=False))
@settings(max_examples=examples(50))
def test_structural_mutations_are_caught(plan: Plan, mutation: Mutation, random: Random) -> None:
    mutant = mutation(plan, random)
    if mutant is not None:
        assert replay(mutant) is not None
        assert refused(mutant)


@given(sized_plans(), st.sampled_from(STRUCTURAL), st.randoms(use_true_random=False), st.sampled_from(["stages", "static", ""]))
def test_an_unsound_plan_is_shown_or_refused(plan: Plan, mutation: Mutation, random: Random, lacking: str) -> None:
    mutant = mutation(plan, random) or plan
    if lacking:
        mutant = replace(mutant, sizes=replace(mutant.sizes, **{lacking: getattr(mutant.sizes, lacking)[:-1]}))
    for show in (str, lambda plan: plan.device_peak_bytes, lambda plan: plan.host_bytes(0)):
        try:
            assert show(mutant) is not None
        except PlanError:
            assert refused(mutant)


def test_an_unsound_plan_says_that_it_is() -> None:
    plan = replace(build("1f1b", 4, 8), sizes=Sizes.of([1] * 3, num_ranks=4))
    for show in (str, lambda plan: plan.device_peak_bytes):
        with pytest.raises(PlanError, match="plan '1f1b' names something that it does not have; verify"):
            show(plan)


@given(sized_plans(), st.lists(st.sampled_from(ORDERING), min_size=1, max_size=2), st.randoms(use_true_random=False))
@settings(max_examples=examples(50))
def test_harmful_mutations_are_caught(plan: Plan, chosen: list[Mutation], random: Random) -> None:
    for _ in range(MUTANTS):
        mutant = plan
        for mutation in chosen:
            mutant = mutation(mutant, random) or mutant
        harm = replay(mutant)
        assert harm is None or refused(mutant), harm


@given(sized_plans(), st.randoms(use_true_random=False))
@settings(max_examples=examples(50))
def test_a_changed_size_has_the_verdict_of_the_replay(plan: Plan, random: Random) -> None:
    for _ in range(MUTANTS):
        mutant = size_changed(plan, random)
        if mutant is not None:
            assert refused(mutant) is (replay(mutant) is not None)


@given(problems())
@settings(max_examples=examples(60))
def test_what_is_reached_can_be_asked_for(drawn: Problem) -> None:
    plan, sizes, to, costs = drawn
    lowest = balance(plan, sizes=sizes, to=to, costs=costs)
    if lowest.budgets is not None:
        again = finish(balance(plan, sizes=sizes, budgets=lowest.budgets, to=to, costs=costs))
        assert again.budgets == lowest.budgets


# Bad input.


PLAN, SIZES = build("1f1b", 4, 8), Sizes.of([8] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give slots=, or sizes= and budgets="),
        ({"budgets": 24}, "give slots=, or sizes= and budgets="),
        ({"slots": 3, "sizes": SIZES, "budgets": 24}, "give slots=, or sizes= and budgets="),
        ({"sizes": SIZES, "budgets": 24, "rule": "eager"}, "the latter only with slots="),
        ({"sizes": SIZES, "budgets": 0}, "budgets=0: give a whole number of at least 1, or one for each of 4 ranks"),
        ({"sizes": SIZES, "budgets": [24, 24]}, "budgets=[24, 24]: give a whole number"),
        ({"sizes": SIZES, "budgets": 24.5}, "budgets=24.5: give a whole number"),
        ({"sizes": Sizes.of([8] * 3), "budgets": 24}, "sizes of 3 stages and 3 ranks for a plan of 4 and 4"),
        ({"sizes": SIZES, "budgets": 24, "costs": Costs(saved_bytes=(8, 8))}, "saved_bytes has 2 entries"),
        ({"sizes": SIZES, "budgets": 24, "to": Destinations(nodes=(0, 1))}, "give the node of each of 4 ranks"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        balance(PLAN, **options)


@pytest.mark.parametrize(
    ("static", "message"),
    [
        (0, "^23 bytes are too few for 1f1b with 4 stages and 8 microbatches: rank 0 occupies 32 of 23 at 0F3 and .*=24 "),
        (100, "^23 bytes are too few for .*: rank 0 occupies 108 of 23 at 0F0 and .* budget that works here is budgets=124 "),
    ],
)
def test_a_budget_that_is_too_small_is_told_with_static_bytes(static: int, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        balance(PLAN, sizes=replace(SIZES, static=(static,) * 4), budgets=23)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "budgets: 24 ",
            "budgets: 23 ",
            "rank 0 occupies 24 bytes of its own and 0 for remote activations and static bytes, over its budget of 23",
        ),
        (
            "size 0: 8 ",
            "size 0: 9 ",
            "rank 0 occupies 27 bytes of its own .*\n.* rank 3 occupies 8 bytes of its own and 18 for remote activations",
        ),
        (
            "static: 0 ",
            "static: 1 ",
            "rank 0 occupies 24 bytes of its own and 1 for remote activations and static bytes, over its budget of 24",
        ),
        ("0EVICT1@3", "0EVICT2@3", r"0EVICT1 is missing"),
        ("0EVICT1@3", "0EVICT1.2@3", r"0EVICT1\.2 names a part that does not exist"),
        ("0EVICT1@3", "0EVICT1@host", "0WAIT_EVICT1 on rank 0 with peer 3: expected rank 0 and the host"),
        ("0LOAD1@3", "0LOAD1@2", "0LOAD1 on rank 0 with peer 2: expected rank 0 and peer 3"),
    ],
)
def test_a_file_with_one_thing_changed_is_refused(old: str, new: str, message: str) -> None:
    text = finish(balance(PLAN, sizes=SIZES, budgets=24)).to_text()
    assert Plan.from_text(text).to_text() == text
    with pytest.raises(PlanError, match=message):
        verify(Plan.from_text(text.replace(old, new, 1)))


def test_a_refusal_names_the_computation_that_an_idle_step_stands_before() -> None:
    plan, sizes = build("zbv", 4, 4, num_ranks=2), Sizes.of([1, 2, 1, 2], num_ranks=2)
    with pytest.raises(BudgetError, match=r"rank 1 occupies 6 of 4 at [12]I\d and can evict nothing in time"):
        balance(plan, sizes=sizes, budgets=4, to=Destinations(host="only"))
