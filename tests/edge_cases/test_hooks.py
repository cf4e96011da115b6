"""Saved-tensor hooks of the user's around `step`: they see and make what they do in a single process, and bpipe follows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

from bpipe.errors import ConfigurationError
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M, pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
T = torch.Tensor
WHOLE = ["1f1b", "bytes", "parts", "recompute"]


def batch(step: int) -> Batch:
    x, y = torch.randn(2, 2 * M, WIDTH, generator=torch.Generator().manual_seed(step))
    return Batch((x,), y)


def modules() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_STAGES)]


class Hooks(saved_tensors_hooks):
    """Counts its calls."""

    def __init__(self, pack: Callable[[T], Any], unpack: Callable[[Any], T]) -> None:
        self.packed = self.unpacked = 0
        self._of_user = pack, unpack
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: T) -> Any:
        self.packed += 1
        return self._of_user[0](tensor)

    def _unpack(self, value: Any) -> T:
        self.unpacked += 1
        return self._of_user[1](value)


def on_cpu() -> Hooks:
    hooks = save_on_cpu()
    return Hooks(hooks.pack_hook, hooks.unpack_hook)


def quantised(tensor: T) -> dict[str, T]:
    scale = tensor.abs().max().clamp(min=1e-12) / 127
    return {"values": (tensor / scale).round().to(torch.int8), "scale": scale}


def given_back_once() -> Hooks:
    """As an offloading library does that frees its copy when it gives it back."""
    kept: dict[int, T] = {}
    numbers = itertools.count()

    def pack(tensor: T) -> int:
        number = next(numbers)
        kept[number] = tensor.clone()
        return number

    return Hooks(pack, kept.pop)


# Those that lose something show whether they have been called.
HOOKS: dict[str, Callable[[], Hooks]] = {
    "save_on_cpu": on_cpu,
    "given back once": given_back_once,
    "as it is": lambda: Hooks(lambda tensor: tensor, lambda tensor: tensor),
    "alias": lambda: Hooks(torch.Tensor.detach, lambda tensor: tensor * 1),
    "half precision": lambda: Hooks(lambda tensor: tensor.bfloat16(), torch.Tensor.float),
    "8 bits": lambda: Hooks(quantised, lambda saved: saved["values"] * saved["scale"]),
    "with its dtype": lambda: Hooks(lambda tensor: (tensor.dtype, tensor.half()), lambda saved: saved[1].to(saved[0])),
    "no tensor": lambda: Hooks(lambda tensor: tensor.tolist(), torch.tensor),
    "only what is trained": lambda: Hooks(
        lambda tensor: tensor if isinstance(tensor, nn.Parameter) else (tensor.sign(),),
        lambda saved: saved if isinstance(saved, T) else saved[0],
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_around_steps(name: str) -> None:
    case = Case(modules, batch, F.mse_loss, steps=2)
    with (alone := HOOKS[name]()):
        expected = case.alone()
    for schedule in [*WHOLE, "zb_h1"]:
        with (hooks := HOOKS[name]()):
            found = case.piped(SCHEDULES[schedule])
        for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
            assert all(map(torch.equal, ours, theirs)), schedule
        assert all(map(torch.equal, found.losses, expected.losses))
        assert hooks.packed == alone.packed
        assert hooks.unpacked == alone.unpacked


def test_what_hooks_make_moves_if_it_is_a_tensor_and_is_counted_if_not() -> None:
    moved = {}
    for name in ("as it is", "half precision", "with its dtype"):
        loopback, schedules = pipeline(SCHEDULES["balanced_1f1b"], modules(), F.mse_loss)
        for step in range(2):
            x, y = batch(step).args[0], batch(step).target
            with HOOKS[name]():
                loopback.step(schedules, x, target=y)
        moved[name] = schedules[0].stats["evicted_bytes"]
        assert schedules[0].stats["peak_bytes"] == schedules[0].stats["predicted_peak_bytes"]
        reasons = {held.reason for held in schedules[0].ledger.held}
        assert any("packed by a saved-tensor hook" in reason for reason in reasons) is (name == "with its dtype")
    assert moved["as it is"] and moved["half precision"] and not moved["with its dtype"]


@pytest.mark.parametrize("name", ["1f1b", "bytes", "recompute", "zb_h1"])
def test_disabled_hooks_are_refused(name: str) -> None:
    loopback, schedules = pipeline(SCHEDULES[name], modules(), F.mse_loss)
    x, y = torch.randn(2, 2 * M, WIDTH)
    with disable_saved_tensors_hooks("not here"), pytest.raises(ConfigurationError, match=r"disable_saved_tensors_hooks.*not here"):
        loopback.step(schedules, x, target=y)
    loopback.step(schedules, x, target=y)
