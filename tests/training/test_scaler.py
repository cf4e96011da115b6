"""Loss scaling over stages: all take the same step, or none; what is trained is a single process's, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bpipe
from bpipe.errors import ConfigurationError
from tests.ranks import run_ranks
from tests.training.language import BOUND, LanguageModel, Pipeline, assert_equal, backward_of, cross_entropy, groups_of

pytestmark = pytest.mark.usefixtures("one_thread")

P, STEPS = 4, 5
OVERFLOWS = {1: 2, 3: 0}  # step: stage on which a gradient is not finite


ORDERS = "unscale all, then step", "one by one", "step alone"


def spoil(module: torch.nn.Module) -> None:
    next(p for name, p in module.named_parameters() if "norm1" in name).grad[3] = float("inf")


def alone(optimizer_options: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    whole, scaler = LanguageModel(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer, seen = torch.optim.AdamW(groups_of([whole]), **optimizer_options), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = backward_of(whole, step, lambda y, target: scaler.scale(cross_entropy(y, target)))
        if step in OVERFLOWS:
            spoil(whole.blocks[str(OVERFLOWS[step])])
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), BOUND)
        scaler.step(optimizer)
        scaler.update()
        seen.append((loss, norm, scaler.get_scale()))
    return seen, dict(whole.state_dict())


def trained(rank: int, optimizer_options: dict[str, Any], *, clips: bool = True) -> tuple[list[Any], dict[str, torch.Tensor]]:
    scaler = bpipe.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    pipeline, seen = Pipeline(rank, P, loss_fn=lambda y, target: scaler.scale(cross_entropy(y, target))), []
    optimizer = torch.optim.AdamW(groups_of(pipeline.modules.values()), **optimizer_options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipeline.backward(step)
        assert pipeline.schedule.stats["peak_bytes"] == pipeline.schedule.stats["predicted_peak_bytes"]
        if OVERFLOWS.get(step) == rank:
            spoil(pipeline.modules[rank])
        norm = None
        if clips:
            scaler.unscale_(optimizer)
            norm = pipeline.clip()
        scaler.step(optimizer)
        scaler.update()
        seen.append((loss, norm, scaler.get_scale()))
    return seen, pipeline.values()


def frozen_on_rank_0(rank: int) -> tuple[bool, float]:
    """A rank without a single gradient takes part: whether it stepped, and its scale."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scaler, steps = bpipe.GradScaler("cpu", init_scale=8.0), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    if rank:
        module.weight.grad = torch.full((2, 2), float("nan") if rank == 2 else 1.0)
    scaler.step(optimizer)
    scaler.update()
    return bool(steps), scaler.get_scale()


def nothing_to_train_on_rank_0(rank: int) -> list[tuple[float, float]]:
    """A rank without an optimizer gives None; one overflow, and one step. The scale and a weight after each."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0) if rank else None  # torch refuses one of no parameters
    scaler, seen = bpipe.GradScaler("cpu", init_scale=8.0), []
    for step, unscales in enumerate((True, False)):
        weight.grad = torch.full((2,), float("inf") if (rank, step) == (2, 0) else 8.0)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), weight[0].item()))
    return seen


def halves_on_rank_1(rank: int) -> list[str]:
    """What torch refuses to unscale, and a second call, which communicates nothing."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16 if rank == 1 else torch.float32))
    weight.grad = torch.ones_like(weight)
    scaler, other = bpipe.GradScaler("cpu"), torch.nn.Parameter(torch.ones(2))
    optimizers, seen = [torch.optim.SGD([weight]), torch.optim.SGD([other])], []
    for optimizer in (optimizers[0], optimizers[1], optimizers[1]):
        try:
            scaler.unscale_(optimizer)
            seen.append("nothing")
        except (ConfigurationError, ValueError, RuntimeError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def two_optimizers_elsewhere(rank: int, order: str) -> list[tuple[float, list[float]]]:
    """Rank 0 has no optimizer, rank 1 one, the others two, of which one has an overflow in two of the steps."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) if rank > place else None for place, weight in enumerate(weights)]
    scaler, seen = bpipe.GradScaler("cpu", init_scale=8.0), []
    for step in range(4):
        for place, weight in enumerate(weights):
            weight.grad = torch.full((2,), float("inf") if (rank, step) == (2, place + 1) else scaler.get_scale())
        for optimizer in optimizers if order != "step alone" else ():
            scaler.unscale_(optimizer)
            if order == "one by one":
                scaler.step(optimizer)
        for optimizer in optimizers if order != "one by one" else ():
            scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), [weight[0].item() for weight in weights[:rank]]))
    return seen


def updates_alone_on_rank_0(rank: int) -> list[str]:
    """A rank leaves its calls out, or gives what is no optimizer: all optimizers at once, or a text."""
    weights, seen = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)], []
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    for case in ("left out", "all at once", "a text"):
        scaler = bpipe.GradScaler("cpu", init_scale=8.0)
        for weight in weights:
            weight.grad = torch.full((2,), 8.0)
        ways: dict[str, Any] = {
            "left out": scaler.update,
            "all at once": lambda scaler=scaler: scaler.step(optimizers),
            "a text": lambda scaler=scaler: scaler.unscale_("none"),
        }
        try:
            if rank == 0:
                ways[case]()
            else:
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            seen.append("nothing")
        except ConfigurationError as error:
            seen.append(str(error))
    return seen


def switched_off(rank: int) -> list[float]:
    """Two steps, the first one unscaled by hand; the second rank has no optimizer. It scales nothing and keeps nobody waiting."""
    scaler, weight = bpipe.GradScaler("cpu", enabled=False), torch.nn.Parameter(torch.tensor(3.0))
    optimizer = None if rank == 1 else torch.optim.SGD([weight], lr=1.0)
    for unscales in (True, False):
        weight.grad = None
        scaler.scale(2 * weight).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [weight.item(), scaler.get_scale()]


def everything(rank: int) -> dict[str, Any]:
    return {
        "plain": trained(rank, {}),
        "fused": trained(rank, {"fused": True}),
        "fused, not clipped": trained(rank, {"fused": True}, clips=False),
        "frozen": frozen_on_rank_0(rank),
        "nothing to train": nothing_to_train_on_rank_0(rank),
        **{order: two_optimizers_elsewhere(rank, order) for order in ORDERS},
        "updates alone": updates_alone_on_rank_0(rank),
        "halves": halves_on_rank_1(rank),
        "switched off": switched_off(rank),
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    ranks = run_ranks(everything, P)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", ["plain", "fused"])
def test_training_equals_a_single_process(seen: dict[str, list[Any]], name: str) -> None:
    """An overflow on one stage skips the step on all; the scale takes the same course."""
    expected, values = alone({"fused": True} if name == "fused" else {})
    assert [scale for _, _, scale in expected] == [8.0, 4.0, 4.0, 2.0, 2.0]
    for of_rank, _ in seen[name]:
        for (loss, norm, scale), (loss_alone, norm_alone, scale_alone) in zip(of_rank, expected, strict=True):
            assert (loss, scale) == (loss_alone, scale_alone)
            assert torch.equal(norm, norm_alone) or not (norm.isfinite() or norm_alone.isfinite())
    assert_equal({name: value for _, part in seen[name] for name, value in part.items()}, values)


def test_a_fused_optimizer_does_not_decide_alone(seen: dict[str, list[Any]]) -> None:
    courses = [[scale for _, _, scale in of_rank] for of_rank, _ in seen["fused, not clipped"]]
    assert courses == [[8.0, 4.0, 4.0, 2.0, 2.0]] * P


def test_a_rank_without_gradients_takes_part(seen: dict[str, list[Any]]) -> None:
    assert seen["frozen"] == [(False, 4.0)] * P


def test_a_rank_without_an_optimizer_takes_part(seen: dict[str, list[Any]]) -> None:
    assert seen["nothing to train"] == [[(4.0, 1.0), (4.0, 1.0)], *[[(4.0, 1.0), (4.0, -1.0)]] * (P - 1)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_gives_none_for_each_optimizer_that_it_lacks(seen: dict[str, list[Any]], order: str) -> None:
    """The optimizer with an overflow is skipped on all ranks, the other one steps, and the scale halves on all."""
    scales, first, second = [8.0, 4.0, 2.0, 2.0], [0.0, 0.0, -1.0, -2.0], [0.0, -1.0, -1.0, -2.0]
    for rank, of_rank in enumerate(seen[order]):
        assert of_rank == [(scale, [one, other][:rank]) for scale, one, other in zip(scales, first, second)]


def test_a_rank_that_leaves_its_calls_out_is_told_and_nobody_waits(seen: dict[str, list[Any]]) -> None:
    own, *others = seen["updates alone"]
    assert own[0].startswith("rank 0 of the group updates the scale without a step, for which the other ranks wait: a rank that")
    assert all("is no optimizer: unscale and step one after the other, or give None" in text for text in own[1:])
    assert all(text.startswith("another rank of the pipeline cannot unscale") for of_rank in others for text in of_rank)


def test_what_one_rank_cannot_unscale_is_refused_on_all(seen: dict[str, list[Any]]) -> None:
    for rank, (refused, others, again) in enumerate(seen["halves"]):
        own, heard = "ValueError: Attempting to unscale FP16 gradients.", "ConfigurationError: another rank of the pipeline cannot"
        assert refused.startswith(own if rank == 1 else heard)
        assert others == "nothing" and again.startswith("RuntimeError: unscale_() has already been called")


def test_switched_off_and_on_a_loopback(seen: dict[str, list[Any]]) -> None:
    assert seen["switched off"] == [[3.0 if rank == 1 else -1.0, 1.0] for rank in range(P)]
    with pytest.raises(ConfigurationError, match=r"torch\.amp\.GradScaler with one optimizer over all stages"):
        bpipe.GradScaler("cpu", group=bpipe.Loopback(2).rank(0))
