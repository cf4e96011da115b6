"""Values that one stage changes in place and a later one uses: refused wherever the stages lie.

In a single process it is one tensor, so that the later stage sees what the earlier one has made of it, and its gradient goes back
through the change: on other ranks there is no such tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import StageError
from bpipe.schedules import build

pytestmark = pytest.mark.usefixtures("one_thread")

M, WIDTH = 4, 8
PLACES = {
    "a stage a rank": ("1f1b", 4),
    "in a loop": ("interleaved_1f1b", 2),
    "in a V": ("zbv", 2),
    "on one rank": ("interleaved_1f1b", 1),
}
Does = Callable[..., Any]


class Stage(nn.Module):
    """A linear layer, and what a case does with its output and with skips."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(WIDTH, WIDTH), does

    def forward(self, *x: Any, **skips: Any) -> Any:
        return self.does(self.linear, *x, **skips)


def plain(linear: nn.Module, x: torch.Tensor, **skips: torch.Tensor) -> torch.Tensor:
    return sum(skips.values(), linear(x))


def last(linear: nn.Module, x: torch.Tensor, **skips: torch.Tensor) -> torch.Tensor:
    return plain(linear, x, **skips)


def changes_skip(linear: nn.Module, x: torch.Tensor, kept: torch.Tensor) -> Any:
    return linear(x) + kept.mul_(2.0)


def changes_input(linear: nn.Module, x: torch.Tensor, **skips: torch.Tensor) -> Any:
    x.mul_(2.0)
    return x + 1.0 + linear(torch.ones_like(x))


def passes_on(linear: nn.Module, x: torch.Tensor, **skips: torch.Tensor) -> Any:
    return x


def hands_on(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y + 1.0, {"kept": y}


def output_too(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y, {"kept": y}


def view_of_output(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y, {"kept": y[:, 2:6]}


def output_is_view(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y.view(-1, 2, WIDTH // 2).transpose(1, 2), {"kept": y}


def in_a_list(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return (y + 1.0, y), {"kept": [{"inner": y}]}


def two_names(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y + 1.0, {"kept": y, "same": y}


def of_a_mask(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y, {"kept": y.detach() > 0}


def narrow(linear: nn.Module, x: torch.Tensor, kept: torch.Tensor) -> Any:
    return linear(x) + nn.functional.pad(kept, (2, 2))


def back_in_shape(linear: nn.Module, x: torch.Tensor) -> Any:
    x.add_(1.0)
    return x.transpose(1, 2).reshape(-1, WIDTH) + linear(torch.ones(len(x), WIDTH))


def first_of_two(linear: nn.Module, x: torch.Tensor, second: torch.Tensor) -> Any:
    second[:, 0] = 0.5
    return linear(x) + second


def from_list(linear: nn.Module, x: torch.Tensor, kept: Any) -> Any:
    return linear(x) + kept[0]["inner"]


def writes_out(linear: nn.Module, x: torch.Tensor, kept: torch.Tensor) -> Any:
    with torch.no_grad():
        torch.mul(kept, 3.0, out=kept)
    return linear(x) + kept


def relu_in_place(linear: nn.Module, x: torch.Tensor) -> Any:
    return linear(nn.functional.relu(x, inplace=True) * 1.0)


def inverts(linear: nn.Module, x: torch.Tensor, kept: torch.Tensor) -> Any:
    return linear(x) * kept.logical_not_()


def selects(linear: nn.Module, x: torch.Tensor, kept: torch.Tensor) -> Any:
    return linear(x) * kept


def hands_skip_on(linear: nn.Module, x: torch.Tensor, kept: torch.Tensor) -> Any:
    return kept


class Case(NamedTuple):
    """What each of four stages does, and the skips."""

    stages: Sequence[Does]
    skips: Mapping[str, tuple[int, ...]]


KEPT = {"kept": (0, 3)}
CASES = {
    "a user before another one": Case([hands_on, plain, changes_skip, last], {"kept": (0, 2, 3)}),
    "the next stage, which is a user": Case([hands_on, changes_skip, plain, last], {"kept": (0, 1, 3)}),
    "an output that is a skip": Case([output_too, changes_input, plain, last], KEPT),
    "an output of which a skip is a view": Case([view_of_output, changes_input, plain, narrow], KEPT),
    "an output that is a view of a skip": Case([output_is_view, back_in_shape, plain, last], KEPT),
    "an entry of a tuple, and a value in a list": Case([in_a_list, first_of_two, plain, from_list], KEPT),
    "two names of one tensor": Case([two_names, plain, changes_skip, last], {"kept": (0, 2), "same": (0, 3)}),
    "an output that is passed on first": Case([output_too, passes_on, changes_input, last], KEPT),
    "a skip that is passed on as an output": Case([hands_on, hands_skip_on, changes_input, last], {"kept": (0, 1, 3)}),
    "an operation with out=": Case([hands_on, plain, writes_out, last], {"kept": (0, 2, 3)}),
    "an activation in place": Case([output_too, relu_in_place, plain, last], KEPT),
    "a mask, which needs no gradient": Case([of_a_mask, plain, inverts, selects], {"kept": (0, 2, 3)}),
    "made by a later stage": Case([plain, output_too, changes_input, last], {"kept": (1, 3)}),
}


def stages_of(case: Case) -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(does) for does in case.stages]


def batch() -> torch.Tensor:
    return torch.randn(M * 2, WIDTH, generator=torch.Generator().manual_seed(1))


def alone(case: Case) -> list[torch.Tensor | None]:
    """The gradients of a single process, where a value is one tensor."""
    stages, mse = stages_of(case), nn.functional.mse_loss
    for x in batch().chunk(M):
        output: Any = (x,)
        values: dict[str, Any] = {}
        for index, stage in enumerate(stages):
            given = {name: values[name] for name, (_, *users) in case.skips.items() if index in users}
            output = stage(*output, **given)
            if any(source == index for source, *_ in case.skips.values()):
                output, made = output
                values |= made
            output = output if isinstance(output, tuple) else (output,)
        (mse(output[0], x) / M).backward()
    return gradients_of(stages)


def gradients_of(stages: Sequence[nn.Module]) -> list[torch.Tensor | None]:
    return [parameter.grad for stage in stages for parameter in stage.parameters()]


class Pipeline:
    def __init__(self, case: Case, place: str) -> None:
        (rule, p), self.stages = PLACES[place], stages_of(case)
        self.loopback = bpipe.Loopback(p)
        plan = build(rule, 4, M, num_ranks=p, skips=sorted(set(case.skips.values())))
        held = [
            [
                bpipe.PipelineStage(self.stages[i], i, 4, "cpu", self.loopback.rank(rank), skips=case.skips)
                for i in plan.stages_of(rank)
            ]
            for rank in range(p)
        ]
        self.schedules = [bpipe.FromPlan(of_rank, plan, nn.functional.mse_loss) for of_rank in held]

    def step(self) -> list[torch.Tensor | None]:
        self.loopback.step(self.schedules, batch(), target=batch(), return_outputs=False)
        return gradients_of(self.stages)


def assert_alike(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None or not one.any()) if other is None else one is not None
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_a_change_that_a_later_stage_would_see_is_refused(name: str, place: str) -> None:
    with pytest.raises(StageError, match="was changed in place, and another stage"):
        Pipeline(CASES[name], place).step()


@pytest.mark.parametrize("name", CASES)
def test_evaluations_are_refused_alike(name: str) -> None:
    for place in ("a stage a rank", "in a loop"):
        pipeline = Pipeline(CASES[name], place)
        with pytest.raises(StageError, match="was changed in place, and another stage"):
            pipeline.loopback.eval(pipeline.schedules, batch())


def halves(linear: nn.Module, x: torch.Tensor) -> Any:
    """Two parts of one storage, of which rows lie in turns."""
    y = linear(x)
    return y[:, :4], {"kept": y[:, 4:]}


def changes_half(linear: nn.Module, x: torch.Tensor) -> Any:
    x.mul_(2.0)
    return linear(torch.cat([x, x], 1))


def adds_half(linear: nn.Module, x: torch.Tensor, kept: torch.Tensor) -> Any:
    return linear(x) + torch.cat([kept, kept], 1)


def cloned(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y, {"kept": y.clone()}


RIGHT = {
    "the last user": Case([hands_on, plain, plain, changes_skip], {"kept": (0, 2, 3)}),
    "another part of the same storage": Case([halves, changes_half, plain, adds_half], KEPT),
    "a clone": Case([cloned, changes_input, plain, last], KEPT),
    "an output that was passed on behind the last user": Case([output_too, plain, passes_on, changes_input], {"kept": (0, 2)}),
    "an output of a stage before": Case([plain, changes_input, output_too, last], {"kept": (2, 3)}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_nobody_has_later_may_be_changed(name: str) -> None:
    """A refusal would forbid what is right."""
    assert_alike(Pipeline(RIGHT[name], "a stage a rank").step(), alone(RIGHT[name]))
