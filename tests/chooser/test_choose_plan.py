"""The chosen plan is never slower than a named schedule with the best cut, keeps the memory, and says why the others lose."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bpipe.api.options import Options
from bpipe.chooser.choose_plan import choose_plan
from bpipe.chooser.compare_plans import choose
from bpipe.chooser.known_costs import KnownCosts
from bpipe.chooser.plan_choice import Choice
from bpipe.chooser.question import StagesQuestion
from bpipe.errors import BPipeError, BudgetError, ConfigurationError
from bpipe.estimate import Measurement, Profile, model_named
from bpipe.partition import LayerCost, choose_stages
from bpipe.passes.communicate import computations_only
from bpipe.passes.evict_or_recompute import evict_or_recompute
from bpipe.schedules import Costs, Link, Plan, build, finish, simulate, verify
from bpipe.tools.balancing import sizes_of
from tests.estimate.samples import STAGE
from tests.schedules.replay import occupied_bytes, replay

P, BATCH = 4, 16


def layers_of(seed: int, num_layers: int = 12) -> list[LayerCost]:
    """Return random layers, the last of which is a head that saves much."""
    random = Random(seed)
    return [
        LayerCost(
            names=(f"layers.{index}",),
            forward_s=(forward_s := random.uniform(0.5, 1.5) * (2 if index == num_layers - 1 else 1)),
            backward_s=2 * forward_s,
            input_s=random.uniform(0.8, 1.2) * forward_s,
            saved_bytes=random.randint(500, 1500),
            output_bytes=100,
            static_bytes=random.randint(0, 2000),
        )
        for index in range(num_layers)
    ]


def named_by_hand(layers: list[LayerCost], budget: int, link: float) -> float:
    """Return the fastest step of named schedules with cuts by `choose_stages`, as they are or kept within the budget."""
    steps = [inf]
    for name, v in (("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("v_half", 2)):
        choice = choose_stages(layers, P * v, BATCH, schedule=name)
        halves = [sum(one.input_s or 0.0 for one in layers if one.names[0] in names) for names in choice.stages]
        costs = replace(choice.costs, input_s=halves, link=Link(bytes_per_s=link))
        plan = build(name, P * v, BATCH)
        sizes = sizes_of(plan, costs, 1)
        try:
            kept = evict_or_recompute(plan, sizes=sizes, budgets=budget, costs=costs)
        except BudgetError:
            continue
        finished = finish(kept)
        if max(finished.device_peak_bytes) <= budget:
            steps.append(simulate(finished, costs).makespan_s)
        plain = finish(replace(computations_only(plan), sizes=sizes))
        if max(plain.device_peak_bytes) <= budget:
            steps.append(simulate(plain, costs).makespan_s)
    return min(steps)


@pytest.mark.parametrize("seed", range(6))
def test_never_slower_than_what_is_chosen_by_hand(seed: int) -> None:
    layers, link = layers_of(seed), (inf, 2000.0, 500.0)[seed % 3]
    budget = (24_000, 16_000)[seed % 2]
    choice = choose_plan(
        layers,
        batch=BATCH,
        num_ranks=P,
        memory_bytes=budget,
        link=link,
        options=Options(reserve_bytes=0, effort=150_000),
        microbatch_sizes=[1],
    )
    assert choice.step_s <= named_by_hand(layers, budget, link) * 1.015  # the price of plans that trust in more
    check(choice, budget)


def check(choice: Choice, budget: int | None) -> None:
    plan = choice.plan
    verify(plan)
    assert replay(plan) is None and occupied_bytes(plan) == plan.device_peak_bytes == choice.device_peak_bytes
    assert budget is None or max(choice.device_peak_bytes) <= budget
    assert len(choice.stages) == plan.num_stages
    assert choice.bound_s <= choice.step_s
    assert Choice.from_json(choice.to_json()) == choice
    assert choice.others and all(one.reason for one in choice.others)
    assert len({one.kind for one in choice.others}) == len(choice.others)
    assert all(one.least_s >= choice.bound_s * (1 - 1e-9) or one.kind[:4] != choice.name[:4] for one in choice.others)


def test_the_stages_are_the_model() -> None:
    layers = layers_of(3)
    choice = choose_plan(layers, batch=BATCH, num_ranks=P, options=Options(effort=0), microbatch_sizes=[1])
    assert [name for names in choice.stages for name in names] == [one.names[0] for one in layers]


def test_the_same_arguments_choose_the_same() -> None:
    first, second = (choose_plan(layers_of(1), batch=8, num_ranks=2, options=Options(effort=60_000)) for _ in range(2))
    assert first == second


def test_a_larger_microbatch_that_is_more_efficient() -> None:
    """Of two sizes the larger is chosen if it pays, and fits; a tight budget leaves the smaller one."""
    small = layers_of(5)
    by_size = {1: small, 2: [replace(one, saved_bytes=2 * one.saved_bytes, **times(one, 1.5)) for one in small]}
    wishes: dict[str, Any] = {"batch": 32, "num_ranks": P, "options": Options(reserve_bytes=0, effort=0), "by": "evict"}
    assert choose_plan(by_size, **wishes).microbatch_size == 2
    tight = choose_plan(by_size, **wishes, memory_bytes=17_000)
    assert tight.microbatch_size == 1 and max(tight.device_peak_bytes) <= 17_000


def times(layer: LayerCost, factor: float) -> dict[str, float]:
    return {name: factor * getattr(layer, name) for name in ("forward_s", "backward_s", "input_s")}


def test_slow_links_are_not_evicted_over() -> None:
    layers = [LayerCost(names=(f"{i}",), forward_s=1.0, backward_s=2.0, saved_bytes=1000, output_bytes=1) for i in range(P)]
    wishes: dict[str, Any] = {
        "num_ranks": P,
        "memory_bytes": 3100,
        "schedules": ["1f1b"],
        "options": Options(reserve_bytes=0, effort=0),
    }
    fast, slow = (choose_plan(layers, batch=8, link=rate, **wishes) for rate in (1e6, 20.0))
    assert "offload to other ranks" in fast.name and "offload" not in slow.name
    assert "recomputation" in slow.name
    [other] = [one for one in slow.others if "offload" in one.name]
    assert "more waiting for evictions and loads" in other.reason
    check(slow, 3100)


def test_the_host_where_no_rank_has_room() -> None:
    layers = [LayerCost(names=(f"{i}",), forward_s=1.0, backward_s=2.0, saved_bytes=1000, output_bytes=1) for i in range(6)]
    of = ["1f1b", "zb_h1"]
    wishes: dict[str, Any] = {"num_ranks": 6, "memory_bytes": 3100, "by": "evict", "schedules": of}
    with pytest.raises(BudgetError, match=r"inside layers, or options=Options\(host=True\)$"):
        choose_plan(layers, batch=12, options=Options(effort=0, reserve_bytes=0), **wishes)
    fast, slow = (
        choose_plan(layers, batch=12, options=Options(effort=0, reserve_bytes=0, host=True, host_link=rate), **wishes)
        for rate in (1e6, 200.0)
    )
    assert "offload to the host" in fast.name and fast.step_s < slow.step_s
    check(fast, 3100)


def test_slices_are_only_chosen_where_they_are_allowed() -> None:
    layers = [LayerCost(names=(f"{i}",), forward_s=1.0, backward_s=2.0, saved_bytes=1000) for i in range(P)]
    whole, sliced = (
        choose_plan(layers, batch=4, num_ranks=P, options=Options(effort=0), slices=slices) for slices in ((1,), (1, 4))
    )
    assert whole.plan.slices == 1 and sliced.plan.slices == 4 and sliced.step_s < whole.step_s


def test_static_bytes_decide_where_to_cut() -> None:
    """The first layers are fast and have many parameters: cut by time, they would all be on one rank."""
    fast, slow = ({"saved_bytes": 10, "forward_s": s, "backward_s": 1.0, "static_bytes": n} for s, n in ((0.1, 900), (1.0, 10)))
    layers = [LayerCost(names=(f"{i}",), **(fast if i < 4 else slow)) for i in range(8)]
    wishes: dict[str, Any] = {
        "batch": 8,
        "num_ranks": 2,
        "stages_per_rank": (1,),
        "options": Options(reserve_bytes=0, effort=0),
    }
    roomy, tight = (choose_plan(layers, **wishes, memory_bytes=most) for most in (9000, 2300))
    assert max(tight.device_peak_bytes) <= 2300 < max(roomy.device_peak_bytes)
    assert tight.step_s > roomy.step_s


def test_what_a_layer_makes_again_is_set_aside() -> None:
    wishes: dict[str, Any] = {
        "batch": 8,
        "num_ranks": 2,
        "device": "a100-80gb",
        "options": Options(reserve_bytes=0, effort=0),
        "microbatch_sizes": [2],
    }
    none, full = (choose_plan("gpt2", **wishes, recomputations=[how]) for how in ("none", "full"))
    assert none.recomputation == "" and full.recomputation == "full"
    assert full.budgets[0] < none.budgets[0]


def test_a_model_by_name() -> None:
    choice = choose_plan("gpt3-13b", batch=16, num_ranks=4, device="a100-80gb", recomputations=["none"], options=Options(effort=0))
    assert choice.stages[0][0] == "embedding" and choice.stages[-1][-1] == "head"
    assert sum(map(len, choice.stages)) == 42
    check(choice, None)
    text = str(choice)
    assert text.startswith(f"Run {choice.name}: ") and "Assumed:" in text and "To be surer:" in text


def test_profiles_are_joined_but_not_cut() -> None:
    sizes = {"own_bytes": 900, "movable_bytes": 800, "shared_bytes": 0, "output_bytes": 20, "input_gradient_bytes": 20}
    one = Measurement(microbatch_size=1, forward_s=1.0, backward_s=2.0, **sizes)
    none = dict.fromkeys(("num_parameters", "num_trainable", "parameter_bytes", "trainable_bytes", "gradient_bytes"), 0)
    profile = Profile(name="Stage", device="cpu", buffer_bytes=0, measurements=(one,), **none)
    choice = choose_plan([profile] * 8, batch=8, num_ranks=4, options=Options(effort=0))
    assert sum(map(len, choice.stages)) == 8


def test_profiles_move_what_can_move() -> None:
    """What cannot move stays on its rank when a microbatch is offloaded, and gradients are as large as they were measured."""
    sizes = {"own_bytes": 900, "movable_bytes": 500, "shared_bytes": 0, "output_bytes": 20, "input_gradient_bytes": 30}
    one = Measurement(microbatch_size=1, forward_s=1.0, backward_s=2.0, **sizes)
    none = dict.fromkeys(("num_parameters", "num_trainable", "parameter_bytes", "trainable_bytes", "gradient_bytes"), 0)
    profile = Profile(name="Stage", device="cpu", buffer_bytes=0, measurements=(one,), **none)
    wishes: dict[str, Any] = {
        "batch": 8,
        "num_ranks": 4,
        "by": "evict",
        "schedules": ["1f1b"],
        "options": Options(reserve_bytes=0, effort=0),
    }
    choice = choose_plan(profile, **wishes, memory_bytes=3500)
    assert "offload" in choice.name and choice.plan.sizes is not None
    assert {(stage.saved, stage.movable) for stage in choice.plan.sizes.stages} == {(900, 500)}
    assert [stage["in"].num_bytes for stage in choice.plan.sizes.stages] == [0, 30, 30, 30]
    joined = choose_plan([profile] * 8, **wishes)
    assert joined.plan.sizes is not None and joined.plan.sizes.stages[0].movable == 1000
    with pytest.raises(ConfigurationError, match="only the forward of Stage was measured"):
        choose_plan(replace(profile, measurements=(replace(one, backward_s=0.0),)), **wishes)


def test_a_tied_head_beside_the_embedding_counts_once() -> None:
    wishes: dict[str, Any] = {
        "batch": 8,
        "num_ranks": 1,
        "device": "a100-80gb",
        "options": Options(bytes_per_parameter=18, effort=0),
        "microbatch_sizes": [1],
    }
    one = choose_plan("gpt2", **wishes, recomputations=["none"])
    assert one.plan.sizes is not None and one.plan.sizes.static == (18 * model_named("gpt2").num_parameters,)


def test_answers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: dict[str, Any] = {"batch": 8, "num_ranks": 2, "options": Options(effort=20_000), "cache": tmp_path}
    first = choose_plan(layers_of(2), **wishes)
    monkeypatch.setattr("bpipe.chooser.choose_plan.choose", lambda *_, **__: pytest.fail("was kept"))
    assert choose_plan(layers_of(2), **wishes) == first
    [file] = tmp_path.iterdir()
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="not a choice"):
        choose_plan(layers_of(2), **wishes)


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[tuple[int, int]] = []
    choose_plan(layers_of(2), batch=8, num_ranks=2, options=Options(effort=20_000, progress=lambda *done: told.append(done)))
    assert told == sorted(told) and told[0][0] == 0 and told[-1] == (1000, 1000)


LAYERS = layers_of(0)


@pytest.mark.parametrize(
    ("model", "wishes", "error", "said"),
    [
        (LAYERS, {"batch": 8, "num_ranks": 20}, ConfigurationError, "no schedule runs this on 20 ranks"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "by": "magic"}, ConfigurationError, "by='magic'"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "schedules": ["bitpipe"]}, ConfigurationError, "needs each stage on two ranks"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "schedules": ["local_learning"]}, ConfigurationError, "learns something else"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "schedules": ["1f2b"]}, ConfigurationError, "no schedule is called '1f2b'"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "memory_bytes": [1, 2, 3]}, ConfigurationError, "or one for each of 2 ranks"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "memory_bytes": 500}, BudgetError, "no plan was found"),
        ({3: LAYERS}, {"batch": 8, "num_ranks": 2}, ConfigurationError, "none of the microbatch sizes"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "microbatch_sizes": [2]}, ConfigurationError, "microbatch size 2, only about 1"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "schedules": "1f1b"}, ConfigurationError, "give a list of names"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "memory_bytes": "2GiB"}, ConfigurationError, "memory_bytes="),
        (LAYERS, {"batch": 8, "num_ranks": 2, "memory_bytes": 2.2e6}, ConfigurationError, "memory_bytes="),
        (LAYERS, {"batch": 8, "num_ranks": 2, "microbatch_sizes": [3]}, ConfigurationError, "into microbatches of 3"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "options": Options(slots=2)}, ConfigurationError, "choose_plan does not use slots"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "slices": (0,)}, ConfigurationError, "slices=0"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "slices": 0}, ConfigurationError, "slices=0"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "microbatch_sizes": []}, ConfigurationError, "microbatch_sizes is empty"),
        (LAYERS, {"batch": 8, "num_ranks": 2, "options": Options(host_link=0)}, ConfigurationError, "host_link=0"),
        ({1: LAYERS, 2: LAYERS[1:]}, {"batch": 8, "num_ranks": 2}, ConfigurationError, "different names"),
        ([], {"batch": 8, "num_ranks": 2}, ConfigurationError, "give LayerCosts"),
        ("gpt3-13b", {"batch": 8, "num_ranks": 2}, ConfigurationError, "how fast is a device"),
        (STAGE, {"batch": 8, "num_ranks": 2, "attention": "materialised"}, ConfigurationError, "attention= says how to calculate"),
    ],
)
def test_bad_input(model: Any, wishes: dict[str, Any], error: type[BPipeError], said: str) -> None:
    with pytest.raises(error) as caught:
        choose_plan(model, **{"options": Options(reserve_bytes=0, effort=0)} | wishes)
    assert said in str(caught.value)


def test_reasons_add_up_to_what_is_slower() -> None:
    """Also where messages that meet no receiver yet make a step longer than its order."""
    odd = [0.01 * (1 + 0.2 * (i % 3 == 0)) for i in range(10)], [0.01 * (1 + 0.2 * (i % 4 == 1)) for i in range(10)]
    layers = [LayerCost(names=(f"{i}",), forward_s=f, backward_s=b, saved_bytes=100) for i, (f, b) in enumerate(zip(*odd))]
    for one in choose_plan(layers, batch=128, num_ranks=2, options=Options(effort=0)).others:
        assert one.step_s is not None and (one.step_s < 1.01 * 13.84 or "more waiting" in one.reason)
        assert "assumes more" not in one.reason


def test_plans_of_costs_that_are_free() -> None:
    free = [LayerCost(names=(f"{i}",), forward_s=0.0, backward_s=0.0) for i in range(4)]
    assert isinstance(choose_plan(free, batch=4, num_ranks=2, options=Options(effort=1000)).plan, Plan)


def test_of_equally_fast_plans_the_one_that_needs_less() -> None:
    layers = [LayerCost(names=(f"{i}",), forward_s=1.0, backward_s=2.0, saved_bytes=10) for i in range(P)]
    assert choose_plan(layers, batch=16, num_ranks=P, options=Options(effort=0), schedules=["gpipe", "1f1b"]).plan.name == "1f1b"


@pytest.mark.parametrize("seed", range(4))
def test_halves_that_take_less_than_a_whole_backward(seed: int) -> None:
    """As when a slow first step measured whole ones, and later steps their halves: no schedule is left out for that."""
    random = Random(seed)
    stages = [random.uniform(0.5, 1.5) for _ in range(P)]
    costs = Costs(forward_s=stages, backward_s=[2.6 * one for one in stages], input_s=stages, weight_s=stages, saved_bytes=10)
    plan = build("1f1b", P, 8)
    question = StagesQuestion(flow=plan.flow, costs=costs, sizes=sizes_of(plan, costs, 1), budgets=(None,) * P)
    choice = choose(question, effort=0)
    assert choice.step_s <= simulate(build("zb_h2", P, 8), costs).makespan_s * (1 + 1e-9)
    assert choice.plan.name.startswith("zb_")


def test_costs_that_a_trace_changes() -> None:
    known = KnownCosts(seconds={"forward_s": [[1.0]], "backward_s": [[4.0]], "input_s": [[1.0]], "weight_s": [[1.0]]})
    known.bring_together({"forward_s", "input_s", "weight_s"})
    assert known.seconds["backward_s"] == [[2.0]]
    known.seconds["backward_s"] = [[3.0]]
    known.bring_together({"forward_s", "backward_s"})
    assert known.seconds["input_s"] == known.seconds["weight_s"] == [[1.5]]
