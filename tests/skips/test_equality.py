"""Models with skips train as in a single process, under every schedule, and each value crosses each boundary of ranks once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.comm.transport.in_process import LoopbackTransport
from bpipe.schedules import Channel, Op, Plan, Purpose, build
from tests.skips.models import KINDS, Model, by_itself, gradients_by_itself, model_of

pytestmark = pytest.mark.usefixtures("one_thread")

M = 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "balanced_1f1b": 1, "interleaved_1f1b": 2, "zbv": 2, "zb_h1": 1}  # with the stages of a rank
mse = nn.functional.mse_loss


def schedules_of(model: Model, plan: Plan) -> tuple[bpipe.Loopback, list[bpipe.Schedule]]:
    loopback, num_stages = bpipe.Loopback(plan.num_ranks), len(model.stages)
    schedules: list[bpipe.Schedule] = []
    for rank in range(plan.num_ranks):
        stages = [
            bpipe.PipelineStage(deepcopy(model.stages[i]), i, num_stages, "cpu", loopback.rank(rank), skips=model.skips)
            for i in plan.stages_of(rank)
        ]
        schedules.append(bpipe.FromPlan(stages, plan, loss_fn=mse))
    return loopback, schedules


def gradients_of(schedules: Sequence[bpipe.Schedule]) -> list[torch.Tensor | None]:
    stages = dict(item for schedule in schedules for item in schedule.session.context.stages.items())
    return [parameter.grad for index in sorted(stages) for parameter in stages[index].submod.parameters()]


def assert_close(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        if other is None:
            assert one is None or not one.any()
        else:
            assert one is not None
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[Channel]:
    """The bytes that were sent, by channel."""
    counted: Counter[Channel] = Counter()
    plain = LoopbackTransport.send

    def send(self: Any, channel: Channel, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        counted[channel] += sum(tensor.nbytes for tensor in tensors)
        return plain(self, channel, tensors, *args, **kwargs)

    monkeypatch.setattr(LoopbackTransport, "send", send)
    return counted


def crossing(model: Model, plan: Plan) -> Counter[tuple[int, int]]:
    """The bytes of a step's forwards from rank to rank, each tensor once: what stages return, and what they hand on."""
    kept: dict[str, torch.Tensor] = {}
    counted: Counter[tuple[int, int]] = Counter()
    x, kwargs = model.x[: len(model.x) // M], {name: one[: len(one) // M] for name, one in model.kwargs.items()}
    ranks = plan.stage_ranks
    for index, stage in enumerate(model.stages):
        used = {name: kept[name] for name, (_, *users) in model.skips.items() if index in users}
        result = stage(x, **used, **kwargs)
        x, made = result if isinstance(result, tuple) else (result, {})
        kept |= made
        for rank in set(ranks) - {ranks[index]}:
            messages: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)  # by the first stage on the rank that gets one
            for name, value in made.items():
                if users := [user for user in model.skips[name][1:] if ranks[user] == rank]:
                    messages[users[0]][id(value)] = value
            if index + 1 < len(ranks) and ranks[index + 1] == rank:
                messages[index + 1][id(x)] = x
            counted[ranks[index], rank] += M * sum(one.nbytes for of_message in messages.values() for one in of_message.values())
    return counted


CASES = [(kind, num_stages, name) for kind, num_stages, name in product(KINDS, (2, 4, 8), SCHEDULES)]


@pytest.mark.parametrize(("kind", "num_stages", "name"), CASES)
def test_training_is_that_of_a_single_process(kind: str, num_stages: int, name: str, sent: Counter[Channel]) -> None:
    model = model_of(kind, num_stages, 2 * M)
    plan = build(name, num_stages, M, num_ranks=num_stages // SCHEDULES[name], skips=model.skips.values())
    loopback, schedules = schedules_of(model, plan)
    output = loopback.step(schedules, model.x, target=model.target, **model.kwargs)
    forwards = Counter({(channel.src, channel.dst): n for channel, n in sent.items() if channel.purpose is Purpose.FORWARD})
    assert forwards == +crossing(model, plan)
    expected = by_itself(model.stages, model.skips, model.x, model.kwargs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert_close(gradients_of(schedules), gradients_by_itself(model, M))
    evaluated = loopback.eval(schedules, model.x, **model.kwargs)
    torch.testing.assert_close(evaluated, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_balanced_gradients_are_the_plain_ones_to_the_bit(kind: str) -> None:
    """Activations leave and return, and with them what other stages handed on."""
    found = []
    for slots in (None, 5):
        model = model_of(kind, 8, 16)
        plan = build("1f1b", 8, 8, slots=slots, skips=model.skips.values())
        assert (slots is not None) == any(action.op is Op.EVICT for lane in plan.actions for action in lane)
        loopback, schedules = schedules_of(model, plan)
        for _ in range(2):
            loopback.step(schedules, model.x, target=model.target, return_outputs=False, **model.kwargs)
        found.append(gradients_of(schedules))
        if slots:
            assert sum(schedule.stats["evicted_bytes"] for schedule in schedules) > 0
    assert all(torch.equal(one, other) for one, other in zip(*found) if one is not None and other is not None)
    assert [one is None for one in found[0]] == [one is None for one in found[1]]
