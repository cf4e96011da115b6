"""Clipping over stages: the norm and the gradients of a single process, to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import AgreementError, ConfigurationError, StageError
from tests.ranks import run_ranks
from tests.training.language import BOUND, LanguageModel, Pipeline, assert_equal, backward_of, groups_of, train_alone

pytestmark = pytest.mark.usefixtures("one_thread")

P = 4
SINGLES = 5  # gradients of one number on each rank
NORMS = [2.0, 1.0, 3.0, float("inf"), float("-inf"), 0.5]


def merged(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def trained(rank: int, num_ranks: int, ways: list[tuple[int, type[bpipe.Schedule]]]) -> list[Any]:
    pipelines = [Pipeline(rank, num_ranks, num_stages, schedule) for num_stages, schedule in ways]
    return [(pipeline.train(range(3)), pipeline.values()) for pipeline in pipelines]


@pytest.mark.parametrize(
    "num_ranks, ways",
    [
        (4, [(4, bpipe.BalancedOneFOneB)]),
        (2, [(4, bpipe.ZBV), (4, bpipe.Interleaved1F1B), (2, bpipe.ZBH1)]),
        (1, [(1, bpipe.OneFOneB)]),
    ],
)
def test_training_equals_a_single_process(num_ranks: int, ways: list[tuple[int, type[bpipe.Schedule]]]) -> None:
    """Losses, norms and what AdamW with groups by name makes of the clipped gradients, over several steps."""
    whole = LanguageModel()
    expected = list(train_alone(whole, range(3)))
    ranks = run_ranks(trained, num_ranks, num_ranks, ways) if num_ranks > 1 else [trained(0, 1, ways)]
    for of_way in zip(*ranks, strict=True):
        seen, values = zip(*of_way)
        for of_rank in seen:
            assert [loss for loss, _ in of_rank] == [loss for loss, _ in expected]
            assert all(torch.equal(ours, theirs) and theirs > BOUND for (_, ours), (_, theirs) in zip(of_rank, expected))
        assert_equal(merged(list(values)), dict(whole.state_dict()))


def test_groups_by_name_are_the_whole_s() -> None:
    """What decays on a stage decays in the single process, and nothing else does."""

    def decays(modules: list[nn.Module]) -> dict[str, float]:
        named = {p: name for module in modules for name, p in module.named_parameters()}
        return {named[p]: group["weight_decay"] for group in groups_of(modules) for p in group["params"]}

    whole = decays([LanguageModel()])
    assert decays([LanguageModel(stage, P) for stage in range(P)]) == whole
    assert whole["embedding.weight"] == 0.1 and whole["blocks.0.mlp.0.bias"] == whole["norm.weight"] == 0.0


def error_of(call: Any) -> str:
    try:
        call()
    except (AgreementError, ConfigurationError, StageError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def singles_of(rank: int) -> list[nn.Parameter]:
    """Parameters with gradients of very different size, whose sum of squares depends on the order."""
    singles = [nn.Parameter(torch.zeros(1)) for _ in range(SINGLES)]
    for i, single in enumerate(singles):
        single.grad = torch.full((1,), 1 / (1 + (7 * (SINGLES * rank + i)) % 17))
    return singles


REFUSED = {
    "nan": {"max_norm": float("nan")},
    "negative": {"max_norm": -1.0},
    "no order": {"norm_type": float("nan")},
    "nonsense": {"norm_type": "largest"},
    "none": {"max_norm": None},
}


def empty() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(0, 3))
    parameter.grad = torch.zeros(0, 3)
    return parameter


def with_empty_ones(rank: int) -> list[nn.Parameter]:
    """Rank 0 has one among others, rank 1 nothing else, rank 2 none at all."""
    return [[empty(), *singles_of(rank)], [empty(), empty()], [], singles_of(rank)][rank]


def checked(rank: int) -> dict[str, Any]:
    """Many ways to clip, over one backward."""
    pipeline, found = Pipeline(rank, P), {}
    pipeline.backward(0)
    parameters = [p for module in pipeline.modules.values() for p in module.parameters()]
    before = [p.grad.clone() for p in parameters]

    def again() -> None:
        for parameter, gradient in zip(parameters, before):
            parameter.grad = gradient.clone()

    for order in NORMS:
        again()
        found[f"norm {order}"] = bpipe.clip_grad_norm_(parameters, 0.01, order), pipeline.gradients()
    for foreach in (True, False):
        again()
        found[f"foreach {foreach}"] = bpipe.clip_grad_norm_(parameters, 0.01, foreach=foreach), pipeline.gradients()
    again()
    found["generator"] = bpipe.clip_grad_norm_((p for p in parameters), 0.01)
    again()
    found["one tensor"] = bpipe.clip_grad_norm_(parameters[0], 0.01)
    again()
    found["copies"] = bpipe.clip_grad_norm_(parameters, 0.01, copies=parameters if rank == 3 else ()), pipeline.gradients()
    again()
    found["nothing on rank 1"] = bpipe.clip_grad_norm_(parameters if rank != 1 else [], 0.01)
    found["unlike bounds"] = error_of(lambda: bpipe.clip_grad_norm_(parameters, 1.0 + (rank == 2)))
    found["one raises"] = error_of(lambda: bpipe.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=rank == 1))
    if rank == 2:
        parameters[0].grad = parameters[0].grad.to_sparse()
    found["sparse"] = error_of(lambda: bpipe.clip_grad_norm_(parameters, 1.0))
    again()
    parameters[0].grad.view(-1)[0] = float("nan") if rank == 2 else 0.0
    found["not finite, refused"] = error_of(lambda: bpipe.clip_grad_norm_(parameters, 0.01, error_if_nonfinite=True))
    found["left alone"] = all(map(torch.equal, before[1:], [p.grad for p in parameters][1:]))
    found["not finite"] = bpipe.clip_grad_norm_(parameters, 0.01)
    again()
    for parameter in parameters:
        parameter.grad = None
    found["no gradients"] = bpipe.clip_grad_norm_(parameters, 0.01)
    halves = [nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(3)]
    for i, half in enumerate(halves):
        half.grad = torch.full_like(half, 1 / (3 + i + 3 * rank))
    found["bfloat16"] = bpipe.clip_grad_norm_(halves, 0.01), [half.grad.clone() for half in halves]
    found["reversed"] = bpipe.clip_grad_norm_({P - 1 - rank: singles_of(rank)}, 0.01)
    again()
    again()
    found["norm in words"] = bpipe.clip_grad_norm_(parameters, 0.01, "inf"), pipeline.gradients()
    for name, options in REFUSED.items():
        again()
        given = {"max_norm": 1.0, **(options if rank == 1 or name == "nonsense" else {})}
        found[name] = error_of(partial(bpipe.clip_grad_norm_, parameters, **given))
        assert all(map(torch.equal, before, [p.grad for p in parameters]))
    eighths = [nn.Parameter(torch.ones(2, dtype=torch.float8_e4m3fn))] if rank == 1 else parameters
    eighths[0].grad = torch.ones_like(eighths[0])
    found["no norm"] = error_of(lambda: bpipe.clip_grad_norm_(eighths, 1.0))
    for order in (float("inf"), float("-inf"), 2.0, 0.5):
        found[f"empty, {order}"] = bpipe.clip_grad_norm_(with_empty_ones(rank), 0.01, order)
        found[f"all empty, {order}"] = bpipe.clip_grad_norm_([] if rank == 1 else [empty()], 0.01, order)
    again()
    found["two dtypes"] = bpipe.clip_grad_norm_(parameters if rank else halves, 0.01)
    return found


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    ranks = run_ranks(checked, P)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


def single_process() -> LanguageModel:
    whole = LanguageModel()
    backward_of(whole, 0)
    return whole


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("how", [*(f"norm {order}" for order in NORMS), "foreach True", "foreach False"])
def test_every_norm_is_the_single_process_s(seen: dict[str, list[Any]], how: str) -> None:
    whole = single_process()
    order = float(how.removeprefix("norm ")) if how.startswith("norm") else 2.0
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, order)
    totals, gradients = zip(*seen[how])
    assert all(torch.equal(total, expected) for total in totals)
    assert_equal(merged(list(gradients)), gradients_of(whole))


def test_what_is_counted(seen: dict[str, list[Any]]) -> None:
    whole = single_process()
    own = [
        [p for name, p in whole.named_parameters() if any(name == n for n, _ in LanguageModel(stage, P).named_parameters())]
        for stage in range(P)
    ]
    firsts = [p.grad for p in (part[0] for part in own)]
    total = torch.nn.utils.get_total_norm
    expected = {
        "generator": total([p.grad for p in whole.parameters()]),
        "one tensor": total(firsts),
        "nothing on rank 1": total([p.grad for stage in (0, 2, 3) for p in own[stage]]),
        "no gradients": torch.tensor(0.0),
    }
    for name, value in expected.items():
        assert all(torch.equal(found, value) for found in seen[name]), name


def test_copies_are_clipped_and_not_counted_again(seen: dict[str, list[Any]]) -> None:
    whole = single_process()
    counted = [p for name, p in whole.named_parameters() if name not in dict(LanguageModel(3, P).named_parameters())]
    expected = torch.nn.utils.get_total_norm([p.grad for p in counted])
    torch.nn.utils.clip_grads_with_norm_(whole.parameters(), 0.01, expected)
    totals, gradients = zip(*seen["copies"])
    assert all(torch.equal(total, expected) for total in totals)
    assert_equal(merged(list(gradients)), gradients_of(whole))


def test_norms_are_put_together_in_the_order_of_the_stages(seen: dict[str, list[Any]]) -> None:
    by_rank = [[single.grad for single in singles_of(rank)] for rank in range(P)]
    forwards, backwards = (torch.nn.utils.get_total_norm([g for part in order for g in part]) for order in (by_rank, by_rank[::-1]))
    assert not torch.equal(forwards, backwards)
    assert all(torch.equal(total, backwards) for total in seen["reversed"])


def test_dtypes(seen: dict[str, list[Any]]) -> None:
    halves = [nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(3 * P)]
    for i, half in enumerate(halves):
        half.grad = torch.full_like(half, 1 / (3 + i))
    expected = torch.nn.utils.clip_grad_norm_(halves, 0.01)
    totals, gradients = zip(*seen["bfloat16"])
    assert all(total.dtype == torch.bfloat16 and torch.equal(total, expected) for total in totals)
    assert all(map(torch.equal, [g for part in gradients for g in part], [half.grad for half in halves]))
    assert len({total.item() for total in seen["two dtypes"]}) == 1
    assert {total.dtype for total in seen["two dtypes"]} == {torch.float32}


def test_refusals_and_overflows_are_every_rank_s(seen: dict[str, list[Any]]) -> None:
    text = "AgreementError: the ranks clip by different (max_norm, norm_type, error_if_nonfinite): rank 0 (1.0, 2.0, 0.0), rank 1 "
    assert all(error.startswith(f"{text}(1.0, 2.0, 0.0), rank 2 (2.0, 2.0, 0.0)") for error in seen["unlike bounds"])
    assert all(error.startswith(f"{text}(1.0, 2.0, 1.0), rank 2 (1.0, 2.0, 0.0)") for error in seen["one raises"])
    assert seen["sparse"][2].startswith("ConfigurationError: a gradient is sparse, and torch has no norm of it")
    assert {seen["sparse"][rank] for rank in (0, 1, 3)} == {"ConfigurationError: rank 2 of the group cannot clip: it says why"}
    text = "StageError: the total norm of order 2.0 of the gradients is nan"
    assert all(error.startswith(text) for error in seen["not finite, refused"])
    assert all(seen["left alone"])
    assert all(total.isnan() for total in seen["not finite"])


@pytest.mark.parametrize("order", [float("inf"), float("-inf"), 2.0, 0.5])
def test_empty_gradients_and_none(seen: dict[str, list[Any]], order: float) -> None:
    """Torch's own has no infinite norm where one gradient is empty."""
    gradients = [single.grad for rank in (0, 3) for single in singles_of(rank)]
    expected = torch.nn.utils.get_total_norm(gradients, order)
    for found in seen[f"empty, {order}"]:
        torch.testing.assert_close(found, expected)
    assert all(found == 0 for found in seen[f"all empty, {order}"])


def test_the_largest_in_words(seen: dict[str, list[Any]]) -> None:
    whole = single_process()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, "inf")
    totals, gradients = zip(*seen["norm in words"])
    assert all(torch.equal(total, expected) for total in totals)
    assert_equal(merged(list(gradients)), gradients_of(whole))


def test_what_cannot_be_meant_is_refused_on_all_ranks(seen: dict[str, list[Any]]) -> None:
    """Where one rank alone means it, too; no gradient is changed."""
    texts = {
        "nan": "max_norm=nan: a NaN would spoil every gradient",
        "negative": "max_norm=-1.0: a NaN would spoil every gradient, a negative one would turn them round: give at least 0",
        "no order": "norm_type=nan: give the p of a p-norm",
        "nonsense": "max_norm=1.0, norm_type='largest': give numbers; norm_type may be 'inf'",
        "none": "max_norm=None, norm_type=2.0: give numbers",
        "no norm": "torch has no norm of order 2.0 of the gradients: ",
    }
    for name, text in texts.items():
        assert seen[name][1].startswith(f"ConfigurationError: {text}")
        everywhere = name == "nonsense"
        assert all(found == seen[name][1] or (not everywhere and "rank 1 of the group" in found) for found in seen[name])


def test_a_weight_that_stages_on_one_rank_share_counts_and_is_clipped_once() -> None:
    """In a V the first rank has both ends of the model, which may be one matrix."""
    ours, theirs = singles_of(0), singles_of(0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.01)
    shared_by = {3: [ours[0], *ours[3:]], 0: [*ours[:3], ours[1]]}
    assert torch.equal(bpipe.clip_grad_norm_(shared_by, 0.01), expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs))


def test_a_loopback_has_torch_s_own() -> None:
    with pytest.raises(ConfigurationError, match=r"on a Loopback .* torch\.nn\.utils\.clip_grad_norm_ over the parameters of all"):
        bpipe.clip_grad_norm_([], 1.0, group=bpipe.Loopback(2).rank(0))
