"""What belongs to a process refuses to be copied, and says what to copy; what does not is equal to its copy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError, CopyError
from bpipe.schedules import Costs, simulate

X = torch.ones(4, 4)
mse = nn.functional.mse_loss


def stage_of(module: nn.Module) -> bpipe.PipelineStage:
    return bpipe.PipelineStage(module, 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))


def stepped(module: nn.Module, kind: Any = bpipe.OneFOneB) -> Any:
    schedule = kind(stage_of(module), 2, mse)
    schedule.step(X, target=X)
    return schedule


def traced(module: nn.Module) -> Any:
    schedule = bpipe.OneFOneB(stage_of(module), 2, mse)
    with bpipe.trace(schedule) as trace:
        schedule.step(X, target=X)
    return trace


def in_a_module(module: nn.Module) -> nn.Module:
    holder = nn.Linear(2, 2)
    holder.schedule = stepped(module)
    return holder


HELD: dict[str, Callable[[nn.Module], Any]] = {
    "a stage": stage_of,
    "a schedule": stepped,
    "a schedule that has not run": lambda module: bpipe.GPipe(stage_of(module), 2, mse),
    "a schedule in a module": in_a_module,
    "a balanced schedule": lambda module: bpipe.Balanced(bpipe.OneFOneB(stage_of(module), 2, mse), budget="lowest"),
    "an automatic schedule": lambda module: bpipe.auto(stage_of(module), 2, mse),
    "a schedule without its CSV": lambda module: bpipe.FromCSV([stage_of(module)], 2, mse),
    "a loopback": lambda module: bpipe.Loopback(2),
    "a place in a loopback": lambda module: bpipe.Loopback(2).rank(1),
    "a trace": traced,
    "a stream": lambda module: bpipe.Stream(stage_of(module), mse, torch.optim.SGD(module.parameters())),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda one: torch.save(one, io.BytesIO()),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", HELD)
def test_what_belongs_to_a_process_says_what_to_copy(what: str, how: str) -> None:
    held = HELD[what](nn.Linear(4, 4))
    said = r"a \w+ cannot be copied or pickled: it.*(bpipe.training_state, and make a new one|make another one|Copy its timelines)"
    with pytest.raises(CopyError, match=said) as caught:
        COPIES[how](held)
    assert isinstance(caught.value, (ConfigurationError, TypeError)) and "lock" not in str(caught.value)


def test_a_schedule_has_no_shallow_copy_that_would_share_its_session() -> None:
    with pytest.raises(CopyError, match="a OneFOneB cannot be copied"):
        copy.copy(stepped(nn.Linear(4, 4)))


@pytest.mark.parametrize("what", ["plan", "timeline", "measured", "choice", "state", "module"])
def test_what_belongs_to_no_process_is_equal_to_its_copy(what: str) -> None:
    schedule, module = stepped(nn.Linear(4, 4)), nn.Linear(4, 4)
    automatic = bpipe.auto(stage_of(nn.Linear(4, 4)), 2, mse, options=bpipe.Options(effort=0))
    for _ in range(2):
        automatic.step(X, target=X)
    made = {
        "plan": schedule.plan,
        "timeline": simulate(schedule.plan, Costs()),
        "measured": traced(module).timelines,
        "choice": automatic.choice,
        "state": bpipe.training_state(module)["model"].state_dict(),
        "module": schedule.session.context.modules()[0].state_dict(),
    }[what]
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert str(again) == str(made) and type(again) is type(made)
    if what == "plan":
        copied = bpipe.FromPlan(stage_of(module), copy.deepcopy(made), mse)
        assert copied.step(X, target=X).shape == X.shape


def test_after_a_refused_copy_the_schedule_trains_on() -> None:
    module = nn.Linear(4, 4)
    schedule = stepped(module)
    first = module.weight.grad.clone()
    with pytest.raises(CopyError):
        copy.deepcopy(schedule)
    schedule.step(X, target=X)
    assert torch.equal(module.weight.grad, first + first)
