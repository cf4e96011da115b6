"""What is wrong with skips is said where it can be known first, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import CommError, ConfigurationError, StageError
from bpipe.schedules import build

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 4


class Makes(nn.Module):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.linear, self.values = nn.Linear(WIDTH, WIDTH), values

    def forward(self, x: torch.Tensor) -> Any:
        return self.values(self.linear(x))


class Takes(nn.Module):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(WIDTH, WIDTH), in_place

    def forward(self, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        if kept is not None and self.in_place:
            kept.mul_(2)
        y: torch.Tensor = self.linear(x)
        return y if kept is None else y + kept


KEPT = {"kept": (0, 2)}
STEP_INPUT = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def step(
    stages: list[nn.Module], skips: Any = None, rule: str = "1f1b", p: int = 3, others: Any = None, **kwargs: Any
) -> None:
    loopback, plan, n = bpipe.Loopback(p), build(rule, len(stages), 4, num_ranks=p), len(stages)
    schedules: list[bpipe.Schedule] = []
    for rank in range(p):
        names = others if others is not None and rank == p - 1 else skips or KEPT
        held = [bpipe.PipelineStage(stages[i], i, n, "cpu", loopback.rank(rank), skips=names) for i in plan.stages_of(rank)]
        made = build(rule, len(stages), 4, num_ranks=p, skips=names.values())
        schedules.append(bpipe.FromPlan(held, made, nn.functional.mse_loss))
    loopback.step(schedules, STEP_INPUT, target=STEP_INPUT, **kwargs)


def stages_with(values: Any, **how: bool) -> list[nn.Module]:
    return [Makes(values), Takes(), Takes(**how)]


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        ({"kept": (2, 1)}, r"skip 'kept': a skip \(2, 1\): expected a stage, then later ones"),
        ({"kept": (1, 1)}, "expected a stage, then later ones"),
        ({"kept": (0, 3)}, "up to 2"),
        ({"kept": (-1, 2)}, "expected a stage"),
        ({"kept": (0,)}, "expected a stage"),
        ({"kept": 3}, r"a skip \(3,\): expected a stage, then"),
        ({"kept": "ab"}, "expected a tuple of numbers of stages"),
        ({"kept": (0, 1.5)}, "expected a tuple of numbers of stages"),
        ({"kept": (True, 2)}, "expected a tuple of numbers of stages"),
        ({"kept": (0, 2, 1)}, "in ascending order"),
        ([(0, 2)], "give a dict of names"),
        ({"a b": (0, 2)}, "'a b'.*the name is that of a keyword argument"),
        ({"past": (0, 2)}, "'past'"),
        ({"self": (0, 2)}, "'self'"),
        ({"class": (0, 2)}, "'class'"),
        ({1: (0, 2)}, "the name is that"),
    ],
)
def test_skips_that_no_stage_can_have(skips: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        bpipe.PipelineStage(nn.Linear(1, 1), 0, 3, skips=skips)


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        ([(3, 1)], "expected a stage, then later ones"),
        ([("a", 1)], "expected a tuple of numbers"),
        ([3], "expected a stage, then"),
        ({"kept": (0, 2)}, r"give skips.values\(\)"),
    ],
)
def test_builds_refuse_them_too(skips: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build("1f1b", 4, 4, skips=skips)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda y: y, r"stage 0, microbatch 0: a stage that hands on skips returns \(output, values\).*'kept'.*returned a Tensor"),
        (lambda y: (y, y), "returned a tuple"),
        (lambda y: (y, {}), r"returned \(output, a dict of nothing\)"),
        (lambda y: (y, {"kept": y, "more": y}), "a dict of 'kept', 'more'"),
        (lambda y: (y, {"kept": object()}), "skip 'kept' returned a builtins.object"),
    ],
)
def test_a_stage_that_does_not_hand_on_what_it_should(values: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        step(stages_with(values))


def test_names_that_ranks_do_not_share() -> None:
    with pytest.raises(CommError, match="carries the skips 'kept', expected 'other': give all ranks' stages the same skips"):
        step(stages_with(lambda y: (y, {"kept": y})), others={"other": (0, 2)})


def test_stages_of_a_rank_that_do_not_share_them() -> None:
    loopback = bpipe.Loopback(2)
    given: list[tuple[int, dict[str, tuple[int, ...]]]] = [(0, {"a": (0, 3)}), (2, {})]
    stages = [bpipe.PipelineStage(nn.Linear(1, 1), i, 4, "cpu", loopback.rank(0), skips=skips) for i, skips in given]
    with pytest.raises(ConfigurationError, match="the stages of a rank must have the same skips"):
        bpipe.Interleaved1F1B(stages, 4)


def test_a_plan_with_other_skips() -> None:
    loopback = bpipe.Loopback(3)
    stage = bpipe.PipelineStage(nn.Linear(1, 1), 0, 3, "cpu", loopback.rank(0), skips={"a": (0, 2)})
    with pytest.raises(ConfigurationError, match=r"has the skips \(\), and its stages have \(\(0, 2\),\): build the plan"):
        bpipe.FromPlan(stage, build("1f1b", 3, 4))


def test_an_argument_of_step_with_the_name_of_a_skip() -> None:
    stages = [Makes(lambda y: (y, {"kept": y})), Takes(), Takes()]
    stages[0].forward = lambda x, kept=None: (x, {"kept": stages[0].linear(x)})  # type: ignore[method-assign, operator]
    with pytest.raises(StageError, match=r"step\(kept=...\): stage 2 gets a skip of this name from the pipeline"):
        step(stages, kept=torch.randn(8, WIDTH))


# No user has the value to itself: in the V, stage 3 is on the rank of stage 0, which makes it.
SHARED = [("interleaved_1f1b", 2, (1, 3)), ("interleaved_1f1b", 1, (1, 2, 3)), ("zbv", 2, (1, 2, 3))]


@pytest.mark.parametrize(("rule", "p", "users", "changes"), [(*shared, user) for shared in SHARED for user in shared[2]])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_value_that_one_of_several_on_a_rank_changes(
    rule: str, p: int, users: tuple[int, ...], changes: int, needs_gradient: bool
) -> None:
    """Each of them may have saved it, whether it runs before or after."""
    makes = Makes(lambda y: (y, {"kept": y.sin() if needs_gradient else y.detach().sin()}))
    stages: list[nn.Module] = [makes, Takes(), Takes(), Takes()]
    stages[changes] = Takes(in_place=True)
    with pytest.raises(StageError, match=f"stage {changes}, microbatch 0: the skip 'kept' was changed in place, and another stage"):
        step(stages, skips={"kept": (0, *users)}, rule=rule, p=p)


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        return x.mul_(2) if kept is None else x + kept.mul_(3)


def test_a_value_that_is_the_output_and_is_changed_by_its_only_user() -> None:
    """The stage between has saved it."""
    stages: list[nn.Module] = [Makes(lambda y: (y, {"kept": y})), Takes(), Doubles()]
    with pytest.raises(StageError, match="stage 2, microbatch 0: the skip 'kept' was changed in place"):
        step(stages, p=1, rule="interleaved_1f1b")


def test_an_output_that_the_next_stage_changes_while_it_is_evaluated() -> None:
    """Stage 2 is on the rank of stage 1, from which the value is still being sent to stage 3."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [Takes(), Makes(lambda y: (y, {"kept": y})), Doubles(), Takes()]
    loopback, skips = bpipe.Loopback(2), {"kept": (1, 3)}
    plan = build("zbv", 4, 4, num_ranks=2, skips=skips.values())
    held = [
        [bpipe.PipelineStage(stages[i], i, 4, "cpu", loopback.rank(r), skips=skips) for i in plan.stages_of(r)] for r in range(2)
    ]
    schedules: list[bpipe.Schedule] = [bpipe.FromPlan(of_rank, plan, nn.functional.mse_loss) for of_rank in held]
    x = torch.randn(8, WIDTH)
    with torch.inference_mode():
        output = loopback.eval(schedules, x)
        kept = stages[1].linear(stages[0](x))  # type: ignore[operator]
        torch.testing.assert_close(output, stages[3](kept * 2, kept=kept))


def test_a_value_that_its_only_user_changes() -> None:
    """It is that stage's own: the stage that made it trains as if a copy had been changed."""
    torch.manual_seed(0)
    stages = stages_with(lambda y: (y, {"kept": y.sin()}), in_place=True)
    first, last = stages[0].linear, stages[2].linear
    step(stages)
    found = [parameter.grad for linear in (first, last) for parameter in linear.parameters()]
    for stage in stages:
        stage.zero_grad()
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    for x in STEP_INPUT.chunk(4):
        y = first(x)
        output = last(stages[1](y)) + y.sin() * 2
        (nn.functional.mse_loss(output, x) / 4).backward()
    for one, parameter in zip(found, [*first.parameters(), *last.parameters()], strict=True):
        assert one is not None
        torch.testing.assert_close(one, parameter.grad)
