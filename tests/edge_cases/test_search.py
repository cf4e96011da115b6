"""What a search of a stage's modules has found holds for later microbatches as long as nothing has changed, and no longer."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bpipe.model.state.reachable import Reachable
from bpipe.recomputation.copies import Copies
from bpipe.recomputation.restorable import Restorable
from tests.edge_cases.case import NUM_STAGES, Case, M, pipeline
from tests.edge_cases.test_recompute import Stage, assert_restored, batch, make, of_torch, seeded
from tests.test_recompute import AllTwice

pytestmark = pytest.mark.usefixtures("one_thread")


class Slotted:
    __slots__ = ("generator",)


class Other(nn.Linear):
    pass


def closure() -> Callable[..., Any]:
    generator = None

    def draw(new: Any = None) -> Any:
        nonlocal generator
        generator = new or generator
        return generator

    return draw


class Kept(nn.Module):
    """A module that keeps something of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.gone, self.norm = nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)
        self.number, self.list, self.dict, self.tuple = 0, [1, [2]], {"a": {"b": 1}, "c": 1}, (1, [2])
        self.ordered, self.deque, self.set, self.array = OrderedDict(a=1, b=2), deque([1]), {1}, np.zeros(2)
        self.space, self.slotted, self.tensor = types.SimpleNamespace(a=1), Slotted(), torch.zeros(2)
        self.draw, self.partial, self.function = closure(), partial(of_torch, generator=[]), lambda x=[]: x
        self.child.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Kept], Any]] = {
    "a number": lambda m: setattr(m, "number", 1),
    "a number of the same value": lambda m: setattr(m, "number", 0.0),
    "an attribute more": lambda m: setattr(m, "late", seeded()),
    "an attribute less": lambda m: delattr(m, "number"),
    "a generator in a list": lambda m: m.list.append(seeded()),
    "in a list in a list": lambda m: m.list[1].append(seeded()),
    "in a dict in a dict": lambda m: m.dict["a"].update(b=seeded()),
    "in a list in a tuple": lambda m: m.tuple[1].append(seeded()),
    "the order of a dict": lambda m: m.dict.update(a=m.dict.pop("a")),
    "the order of an ordered dict": lambda m: m.ordered.move_to_end("a"),
    "in a deque": lambda m: m.deque.append(seeded()),
    "in a set": lambda m: m.set.add(2),
    "in an array": lambda m: m.array.__setitem__(0, 1),
    "in a namespace": lambda m: setattr(m.space, "a", seeded()),
    "a namespace's dict": lambda m: setattr(m.slotted, "generator", types.SimpleNamespace()),
    "in a slot": lambda m: setattr(m.slotted, "generator", seeded()),
    "in a closure": lambda m: m.draw(seeded()),
    "in a list in a partial": lambda m: m.partial.keywords["generator"].append(seeded()),
    "a partial's keyword": lambda m: m.partial.keywords.update(generator=seeded()),
    "in a default": lambda m: m.function.__defaults__[0].append(seeded()),
    "a default": lambda m: setattr(m.function, "__defaults__", (seeded(),)),
    "a child more": lambda m: m.add_module("late", nn.Dropout(0.1)),
    "a child less": lambda m: m.__delattr__("gone"),
    "another child": lambda m: setattr(m, "child", nn.Linear(2, 2)),
    "a child's class": lambda m: setattr(m.child, "__class__", Other),
    "a child's dict": lambda m: object.__setattr__(m.child, "__dict__", dict(m.child.__dict__)),
    "a child's mode": lambda m: m.gone.eval(),
    "a hook": lambda m: m.gone.register_forward_pre_hook(partial(of_torch, seeded())),
    "a hook less": lambda m: m.child._forward_hooks.clear(),
    "another parameter": lambda m: setattr(m.child, "weight", nn.Parameter(torch.zeros(2, 2))),
    "a buffer more": lambda m: m.register_buffer("late", torch.zeros(1)),
    "another buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(2)),
    "another tensor": lambda m: setattr(m, "tensor", torch.zeros(2)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen(kind):
    module = Kept()
    found = Reachable([module])
    torch.manual_seed(0)  # what draws, computes and writes in place changes nothing of this
    module.norm(module.child(torch.randn(3, 2)))
    assert found.is_current() and found.is_current()
    CHANGES[kind](module)
    assert not found.is_current()
    assert Reachable([module]).is_current()


TENSORS: dict[str, Callable[[Kept], Any]] = {
    "its memory": lambda m: setattr(m.tensor, "data", torch.zeros(2)),
    "its dtype": lambda m: setattr(m.tensor, "data", m.tensor.double()),
    "its size": lambda m: m.tensor.untyped_storage().resize_(1024),
    "that it is trained": lambda m: m.tensor.requires_grad_(),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_is_made_another_one_is_seen(kind):
    module = Kept()
    found = Reachable([module])
    restorable = Restorable("it", found, None, {}, Copies)
    module.tensor += 1
    assert restorable.is_of(found, None) and not restorable.is_of(found, set())
    TENSORS[kind](module)
    assert not restorable.is_of(found, None)


# In the middle of a step, decided by the data, so that both forwards of a microbatch do the same.


def in_a_list(stage: Any, x: torch.Tensor) -> Any:
    if not stage.held and x.sum() > 0:
        stage.held = [seeded()]
    return of_torch(stage.held[0], x) if stage.held else 1


def in_a_namespace(stage: Any, x: torch.Tensor) -> Any:
    if stage.held is None and x.sum() > 0:
        stage.held = types.SimpleNamespace(calls=0)
    if stage.held is None:
        return 1
    stage.held.calls += 1
    return 1 / stage.held.calls


def in_a_buffer(stage: Any, x: torch.Tensor) -> Any:
    if stage.total.numel() == 1 and x.sum() > 0:
        stage.total = torch.zeros(x.shape[-1])
    stage.total += x.detach().mean()
    return stage.total.clone()


LATE: dict[str, Any] = {
    "a generator": (in_a_list, lambda s: setattr(s, "held", [])),
    "a counter": (in_a_namespace, lambda s: setattr(s, "held", None)),
    "a larger buffer": (in_a_buffer, lambda s: s.register_buffer("total", torch.zeros(1))),
}


@pytest.mark.parametrize("kind", LATE)
def test_what_appears_in_the_middle_of_a_step_is_restored(kind):
    assert_restored(Case(lambda: make(lambda: Stage(*LATE[kind])), batch, F.mse_loss))


def test_a_module_that_takes_a_stages_place_is_restored():
    """Its statistics are updated once for each microbatch, and not twice."""

    def modules() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(NUM_STAGES)]

    loopback, schedules = pipeline(AllTwice, modules(), F.mse_loss)
    one, other = batch(0), modules()
    loopback.step(schedules, *one.args, target=one.target, return_outputs=False)
    for schedule, module in zip(schedules, other, strict=True):
        next(iter(schedule.session.context.stages.values())).submod = module
    loopback.step(schedules, *one.args, target=one.target, return_outputs=False)
    assert [int(module[1].num_batches_tracked) for module in other] == [M] * NUM_STAGES


def test_tensors_are_named_by_the_way_to_them() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(1))
    module.cache, module.deep = [0, torch.zeros(2)], {"a": (1, [torch.zeros(3)])}
    module.space = types.SimpleNamespace(k=torch.zeros(4), many=deque([torch.zeros(5)]))
    found = Reachable([nn.Sequential(module)])
    names = {one.numel(): found.name(key) for key, one in found.tensors.items()}
    ways = ["mean", "cache[1]", "deep['a'][1][0]", "space['k']", "space['many'][0]"]
    assert names == dict(enumerate(ways, 1))
