"""Random stages and training loops over random modules, in one process and under a schedule."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

from tests.edge_cases import case
from tests.edge_cases.random_modules import KEEPING, RANDOM, WIDTH, Leaf, Spec, build, specs
from tests.tiers import examples

NUM_STAGES = 4
BY_HAND = "BPIPE_RANDOM_LOOPS"  # so many loops, and other ones in each run


def some(number: int, *, are_same: bool = True) -> settings:
    """Settings of a test over so many loops, the same ones in each run."""
    return settings(max_examples=examples(number), derandomize=are_same, suppress_health_check=[*HealthCheck], deadline=None)


def many(number: int) -> settings:
    """Those of a long one, which takes other loops and another number of them where it is told to by hand."""
    given = os.environ.get(BY_HAND)
    return some(int(given or number), are_same=given is None)


class Stage(nn.Module):
    """A stage: a random block that passes on the tensor itself, and what it got beside it or makes.

    Args:
        spec: of the block.
        passes: what it returns: "x"; "pair", with its input beside; "pytree", in a dict with a mask that needs no gradient.
        takes: when it uses what came beside: "always", or "sometimes", which the microbatch decides.
    """

    def __init__(self, spec: Spec, passes: str, takes: str = "always") -> None:
        super().__init__()
        log: list[torch.Tensor] = []
        self.noted = partial(tuple, log)  # what hooks have seen
        self.block, self.passes, self.takes = build(spec, log), passes, takes
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, beside: torch.Tensor | None = None, *, it: int = 0) -> Any:
        if isinstance(x, dict):
            x, beside = x["x"] * x["mask"], x["beside"]
        y = self.head(self.block(x)) * (1 + 0.1 * it)
        if beside is not None and (self.takes == "always" or x.detach().sum() > 0):
            y = y + 0.5 * beside
        if self.passes == "pair":
            return y, x * 1.0
        return {"x": y, "mask": x.detach()[..., :1] > -1, "beside": x * 0.5} if self.passes == "pytree" else y


@dataclass(frozen=True)
class Loop:
    """Stages, and what a training loop does with them."""

    schedule: str
    stages: tuple[tuple[Spec, str, str], ...]
    m: int
    size: int  # of a microbatch
    lengths: tuple[int, ...]  # of the sequences of each step
    optimizer: str  # "none", "sgd", "adam"
    accumulates: bool  # over two steps
    freezes: int | None  # the stage that is frozen after the first step
    evaluates: bool  # between the steps
    counts: bool  # gives each step its number
    hooks: str  # around a step: "none", "cpu" (save_on_cpu), "double" (kept in another precision)
    buckets: bool  # gradients move to one flat tensor as they come

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        shape = (self.size * self.m, self.lengths[step], WIDTH)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@dataclass
class Trained:
    """What a loop leaves behind, stage by stage."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def differences(self, other: Trained) -> list[str]:
        """The names of what has not the same bits."""
        assert self.tensors.keys() == other.tensors.keys(), sorted(self.tensors.keys() ^ other.tensors.keys())
        return [name for name, one in self.tensors.items() if not _are_same(one, other.tensors[name])]


def _are_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(123.0), other.nan_to_num(123.0)) and torch.equal(one.isnan(), other.isnan())


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    schedule = draw(st.sampled_from(sorted(case.SCHEDULES)))
    without = {*(() if schedule in case.ONE_STAGE else RANDOM), *(KEEPING if schedule == "recompute" else ())}
    blocks = specs(without)
    passes = [draw(st.sampled_from(["x", "x", "pair", "pytree"])) for _ in range(NUM_STAGES - 1)]
    stages = tuple((draw(blocks), one, draw(st.sampled_from(["always", "sometimes"]))) for one in [*passes, "x"])
    steps = draw(st.integers(2, 4))
    return Loop(
        schedule=schedule,
        stages=stages,
        m=draw(st.sampled_from([4, 6, 8])),
        size=draw(st.integers(2, 3)),
        lengths=tuple(draw(st.lists(st.sampled_from([2, 5]), min_size=steps, max_size=steps))),
        optimizer=draw(st.sampled_from(["none", "sgd", "adam"])),
        accumulates=draw(st.booleans()),
        freezes=draw(st.none() | st.integers(0, NUM_STAGES - 2)),
        evaluates=draw(st.booleans()),
        counts=draw(st.booleans()),
        hooks=draw(st.sampled_from(["none", "none", "cpu", "double"])),
        buckets=draw(st.booleans()),
    )


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def modules_of(loop: Loop) -> list[Stage]:
    torch.manual_seed(0)
    modules = [Stage(*stage) for stage in loop.stages]
    torch.manual_seed(1)
    return modules


def _around(loop: Loop) -> AbstractContextManager[Any]:
    """The user's own hooks around a step."""
    if loop.hooks == "cpu":
        return save_on_cpu()
    if loop.hooks == "double":
        return saved_tensors_hooks(lambda tensor: (tensor.dtype, _widened(tensor)), lambda packed: packed[1].to(packed[0]))
    return nullcontext()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor.clone()


def _fill_buckets(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Let each new gradient move to its place in one flat tensor."""
    flat, start = torch.zeros(sum(parameter.numel() for parameter in parameters)), 0
    for parameter in (one for one in parameters if one.requires_grad):
        place = flat[start : start + parameter.numel()].view_as(parameter)
        parameter.register_post_accumulate_grad_hook(partial(_move, place=place))
        start += parameter.numel()
    return flat


def _move(parameter: torch.Tensor, place: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.data_ptr() != place.data_ptr():
        parameter.grad = place.copy_(parameter.grad)


def _train(loop: Loop, modules: list[Stage], step: Callable[..., None], evaluate: Callable[..., None]) -> Trained:
    """A training loop around a function for a step."""
    trained = Trained()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    makers: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}
    optimizer = makers[loop.optimizer](parameters, lr=0.01) if loop.optimizer in makers else None
    buckets = _fill_buckets(parameters) if loop.buckets else None
    for index in range(len(loop.lengths)):
        losses: list[torch.Tensor] = []
        given = {"it": index} if loop.counts else {}
        with _around(loop):
            step(*loop.batch(index), losses, given)
        trained.tensors |= {f"loss {i} of step {index}": loss for i, loss in enumerate(losses)}
        if index == 0 and loop.freezes is not None:
            modules[loop.freezes].requires_grad_(False)
        if loop.evaluates and index == 1:
            _in_mode(modules, is_training=False)
            evaluate(loop.batch(index)[0], given)
            _in_mode(modules, is_training=True)
        if optimizer is not None and not (loop.accumulates and index % 2 == 0):
            optimizer.step()
            if index + 1 < len(loop.lengths):
                optimizer.zero_grad()
    for i, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            trained.tensors |= {f"stage {i} {name}": tensor.detach(), f"stage {i} {name}.grad": tensor.grad}
        trained.tensors |= {f"stage {i} hook {j}": noted for j, noted in enumerate(module.noted())}
        kept = [tensor for part in module.modules() if isinstance(part, Leaf) for tensor in part.kept]
        trained.tensors |= {f"stage {i} retained {j}": tensor.grad for j, tensor in enumerate(kept)}
    if buckets is not None:
        trained.tensors["buckets"] = buckets
    return trained


def _in_mode(modules: list[Stage], *, is_training: bool) -> None:
    for module in modules:
        module.train(is_training)


def alone(loop: Loop) -> Trained:
    """In one process, microbatch by microbatch, with a random number state for each stage."""
    modules = modules_of(loop)
    random = [torch.get_rng_state()] * len(modules)

    def forward(x: torch.Tensor, given: dict[str, int]) -> Any:
        value: Any = x
        for i, module in enumerate(modules):
            torch.set_rng_state(random[i])
            value = module(*value, **given) if isinstance(value, tuple) else module(value, **given)
            random[i] = torch.get_rng_state()
        return value

    def step(x: torch.Tensor, y: torch.Tensor, losses: list[torch.Tensor], given: dict[str, int]) -> None:
        for xi, yi in zip(x.chunk(loop.m), y.chunk(loop.m)):
            loss = loss_of(forward(xi, given), yi)
            (loss / loop.m).backward()
            losses.append(loss.detach())

    def evaluate(x: torch.Tensor, given: dict[str, int]) -> None:
        with torch.no_grad():
            for xi in x.chunk(loop.m):
                forward(xi, given)

    return _train(loop, modules, step, evaluate)


def piped(loop: Loop) -> Trained:
    """The same under the loop's schedule."""
    modules = modules_of(loop)
    loopback, schedules = case.pipeline(case.SCHEDULES[loop.schedule], modules, loss_of, loop.m)

    def step(x: torch.Tensor, y: torch.Tensor, losses: list[torch.Tensor], given: dict[str, int]) -> None:
        loopback.step(schedules, x, target=y, losses=losses, return_outputs=False, **given)

    def evaluate(x: torch.Tensor, given: dict[str, int]) -> None:
        loopback.eval(schedules, x, **given)

    trained = _train(loop, modules, step, evaluate)
    for one in schedules:
        one.close()
    return trained
