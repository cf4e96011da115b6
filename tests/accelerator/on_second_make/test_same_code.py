"""bpipe on a make of device that torch does not know: the bits of the CPU, and nothing that the checker reports."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.accelerator import nccl as transports
from tests.accelerator.device import KIND, MODULE, reports, simulator
from tests.accelerator.mutations import OVER_NCCL
from tests.accelerator.on_device.test_equality import assert_same
from tests.accelerator.on_device.test_mutations import check
from tests.accelerator.on_device.test_mutations import over as with_mutation
from tests.accelerator.work import RULES, Block, as_rank, batch_of, in_loopback, modules_of, results_of
from tests.over import pipeline
from tests.ranks import run_ranks

RANKS, MICROBATCHES, STEPS = 4, 8, 2
MOST_DELAY_US, DELAYED = 500, 0.1
SEED, SHARE = 7, 0.25  # of the random numbers; dropped


@pytest.fixture(autouse=True)
def fresh(one_thread: None) -> Iterator[None]:
    simulator.configure(True, MOST_DELAY_US, DELAYED, 0)
    simulator.synchronize_device(-1)
    simulator.clear_reports()
    yield
    simulator.clear_reports()


@pytest.mark.parametrize("name", ["balanced_1f1b", "bytes", "parts", "host", "recompute"])
def test_loopback(name: str) -> None:
    on_device, on_cpu = in_loopback(name, KIND, steps=STEPS), in_loopback(name, "cpu", steps=STEPS)
    assert_same(on_device, on_cpu)
    assert not reports()


def test_each_rank_has_a_stream_of_its_own() -> None:
    used: list[set[int]] = [set() for _ in range(RANKS)]
    modules = [module.to(KIND) for module in modules_of(RANKS)]
    for module, of_rank in zip(modules, used):
        module.register_forward_pre_hook(lambda *_, of_rank=of_rank: of_rank.add(MODULE.current_stream().stream_id))
    loopback, schedules = pipeline(RULES["balanced_1f1b"], modules, MICROBATCHES, nn.functional.mse_loss, RANKS, KIND)
    x = batch_of(0, MICROBATCHES).to(KIND)
    loopback.step(schedules, x, target=x)
    for schedule in schedules:
        schedule.close()
    assert all(len(of_rank) == 1 for of_rank in used) and len(set.union(*used, {0})) == RANKS + 1  # 0 is the caller's
    assert not reports()


def test_autocast() -> None:
    found = []
    for device in (KIND, "cpu"):
        with torch.autocast(device, torch.bfloat16):
            found.append(in_loopback("recompute", device, steps=STEPS))
    on_device, on_cpu = found
    assert_same(on_device, on_cpu)
    assert not reports()


class Drop(nn.Module):
    """Dropout by the device's random numbers, on the CPU too: there those that a generator of the device would give next."""

    source: torch.Generator | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.source is None:
            return nn.functional.dropout(x, SHARE)
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - SHARE, generator=simulator.next_of(self.source))
        return x * mask * (1 / (1 - SHARE))


def dropping_modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Drop(), Block(), Drop()) for _ in range(RANKS)]


def dropping_in_one_process() -> list[torch.Tensor]:
    """On the CPU, one microbatch after the other: each stage has a generator of its own, as each rank has a device."""
    modules, outputs = dropping_modules(), []
    for module in modules:
        source = torch.Generator(KIND).manual_seed(SEED)
        for part in module.modules():
            if isinstance(part, Drop):
                part.source = source
    for step in range(STEPS):
        for x in batch_of(step, MICROBATCHES).chunk(MICROBATCHES):
            y = x
            for module in modules:
                y = module(y)
            (nn.functional.mse_loss(y, x) / MICROBATCHES).backward()
            outputs.append(y.detach())
    return [*results_of(modules), torch.cat(outputs)]


@pytest.mark.parametrize("name", ["balanced_1f1b", "recompute"])
def test_random_numbers(name: str) -> None:
    modules = [module.to(KIND) for module in dropping_modules()]
    MODULE.manual_seed(SEED)
    before = MODULE.get_rng_state()
    loopback, schedules = pipeline(RULES[name], modules, MICROBATCHES, nn.functional.mse_loss, RANKS, KIND)
    outputs = []
    for step in range(STEPS):
        x = batch_of(step, MICROBATCHES).to(KIND)
        outputs.append(loopback.step(schedules, x, target=x).cpu())
    for schedule in schedules:
        schedule.close()
    assert torch.equal(MODULE.get_rng_state(), before)  # the caller's, which the ranks left alone
    assert_same([*results_of(modules), torch.cat(outputs)], dropping_in_one_process())
    assert not reports()


def over_what_is_registered(rank: int, name: str, nccl: bool) -> Any:
    """One rank: what it computed, what the checker reported, its process group's backends, and the bytes that it has pinned."""
    transports.install(nccl=nccl)
    simulator.configure(True, MOST_DELAY_US, DELAYED, rank)
    found = as_rank(rank, name, KIND, num_ranks=RANKS, steps=STEPS)
    return found, reports(), str(dist.get_backend_config()), simulator.statistics(0)["pinned"]


def on_cpu(rank: int, name: str) -> list[torch.Tensor]:
    return as_rank(rank, name, "cpu", num_ranks=RANKS, steps=STEPS)


@cache
def expected(name: str) -> list[list[torch.Tensor]]:
    return run_ranks(on_cpu, RANKS, name)


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("name", ["balanced_1f1b", "host"])
def test_four_processes(name: str, nccl: bool) -> None:
    for (found, reported, backends, pinned), same in zip(run_ranks(over_what_is_registered, RANKS, name, nccl), expected(name)):
        assert_same(found, same)
        assert not reported
        assert (backends == f"cpu:gloo,{KIND}:simulated") == nccl
        assert bool(pinned) != nccl or name == "host"  # what the device sends by itself is not staged


def test_a_missing_order_is_reported() -> None:
    [mutation] = [one for one in OVER_NCCL if one.name == "use what is received before it has arrived"]
    check(mutation, with_mutation, RANKS, True)
