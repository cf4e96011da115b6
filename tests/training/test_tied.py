"""Weights of several stages: one sum, the same bits on all holders, and never a silent difference."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.errors import BPipeError, ConfigurationError
from tests.operations import Count
from tests.ranks import run_ranks
from tests.training.language import BOUND, LanguageModel, Pipeline, assert_equal, backward_of, groups_of, train_alone

pytestmark = pytest.mark.usefixtures("one_thread")

P, STEPS = 4, 3
NAME = "embedding.weight"
GRADIENTS = (1e8, 1.0, 2.0, -1e8)  # whose sum depends on the order


class Tied(LanguageModel):
    """The whole model has one matrix for both; of the stages each end has a copy."""

    def __init__(self, stage: int = 0, num_stages: int = 1) -> None:
        super().__init__(stage, num_stages)
        if num_stages == 1:
            self.head.weight = self.embedding.weight


def tied_of(pipeline: Pipeline, **options: Any) -> bpipe.TiedWeights:
    ends = {0: "embedding", P - 1: "head"}
    (stage, module), *_ = pipeline.modules.items()
    return bpipe.TiedWeights({NAME: getattr(module, ends[stage]).weight if stage in ends else None}, **options)


def trained(rank: int) -> dict[str, Any]:
    pipeline = Pipeline(rank, P, model=Tied)
    tied = tied_of(pipeline)
    tied.broadcast()
    with Count() as count:
        seen = pipeline.train(range(STEPS), tied)
    return {"seen": seen, "values": pipeline.values(), "copies": len(tied.copies), "count": count.of}


def two_matrices(steps: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """A single process that has the copies, too, and adds up their gradients before each optimizer's step."""
    whole = LanguageModel()
    whole.head.weight.data = whole.embedding.weight.data.clone()
    optimizer, seen = torch.optim.AdamW(groups_of([whole])), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = backward_of(whole, step)
        total = whole.embedding.weight.grad + whole.head.weight.grad
        whole.embedding.weight.grad, whole.head.weight.grad = total, total.clone()
        counted = [p for name, p in whole.named_parameters() if name != "head.weight"]
        norm = torch.nn.utils.get_total_norm([p.grad for p in counted])
        torch.nn.utils.clip_grads_with_norm_(whole.parameters(), BOUND, norm)
        optimizer.step()
        seen.append((loss, norm))
    return seen, dict(whole.state_dict())


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, P)


def everything(rank: int) -> dict[str, Any]:
    return {**trained(rank), "three": three_holders(rank), "refused": {name: told(rank, of) for name, of in REFUSED.items()}}


def test_training_with_copies_is_training_with_one_weight(ranks: list[dict[str, Any]]) -> None:
    """To the bit, where the two uses' gradients are added up in the same order; the copies stay equal to the bit."""
    seen, values = two_matrices(STEPS)
    for of_rank in ranks:
        assert [loss for loss, _ in of_rank["seen"]] == [loss for loss, _ in seen]
        assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(of_rank["seen"], seen))
    assert_equal({name: value for of_rank in ranks for name, value in of_rank["values"].items()}, values)
    assert torch.equal(ranks[0]["values"][NAME], ranks[-1]["values"]["head.weight"])
    assert [of_rank["copies"] for of_rank in ranks] == [0, 0, 0, 1]


def test_and_one_weight_in_a_single_process(ranks: list[dict[str, Any]]) -> None:
    """There every microbatch adds both uses' gradients: another order of the same additions."""
    whole = Tied()
    expected = list(train_alone(whole, range(STEPS)))
    torch.testing.assert_close(ranks[0]["seen"], [(loss, norm) for loss, norm in expected], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ranks[0]["values"][NAME], whole.embedding.weight.detach(), rtol=1e-4, atol=1e-5)


def three_holders(rank: int) -> dict[str, Any]:
    """Ranks 0, 1 and 3 hold one weight, 1 and 2 another; on rank 1 only the first has a gradient."""
    a, b = (nn.Parameter(_value(rank)) if rank in holders else None for holders in ((0, 1, 3), (1, 2)))
    tied = bpipe.TiedWeights({"b": b, "a": a})
    tied.broadcast()
    values = {name: weight.detach().clone() for name, weight in tied.weights.items()}
    for name, weight in tied.weights.items():
        weight.grad = None if (rank, name) == (1, "b") else torch.full((2, 3), GRADIENTS[rank])
    with Count() as count:
        tied.sum_grads()
    grads = {name: weight.grad for name, weight in tied.weights.items()}
    return {"values": values, "grads": grads, "copies": [tuple(copy.shape) for copy in tied.copies], "sends": count.of["send"]}


def _value(rank: int) -> torch.Tensor:
    """Not dense, and another one on each rank."""
    return (torch.arange(6.0) + 10 * rank).view(3, 2).T


def test_more_weights_and_more_holders(ranks: list[dict[str, Any]]) -> None:
    seen = [of_rank["three"] for of_rank in ranks]
    for name, holders in (("a", (0, 1, 3)), ("b", (1, 2))):
        gradient = torch.zeros(2, 3)
        for rank in holders:
            gradient += 0.0 if (rank, name) == (1, "b") else torch.full((2, 3), GRADIENTS[rank])
            assert torch.equal(seen[rank]["values"][name], _value(holders[0]))
        assert all(torch.equal(seen[rank]["grads"][name], gradient) for rank in holders)
    assert [len(one["copies"]) for one in seen] == [0, 1, 1, 1]
    assert [one["sends"] for one in seen] == [2, 2 + 1, 1, 2]  # of each weight, the gradient alone


def one_per_end(rank: int, change: Callable[[int, nn.Parameter], Any] = lambda rank, weight: None) -> bpipe.TiedWeights:
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    change(rank, weight)
    return bpipe.TiedWeights({"w": weight if rank in (0, P - 1) else None})


def drifted(rank: int, weight: nn.Parameter) -> None:
    weight.data[0, 0] += 1e-7 * (rank == 0)


def without_gradient(rank: int, weight: nn.Parameter) -> None:
    weight.grad = None


def sparse(rank: int, weight: nn.Parameter) -> None:
    weight.grad = torch.ones(2, 3).to_sparse() if rank else weight.grad


def swapped(rank: int, weight: nn.Parameter) -> None:
    """Of the same numbers, in another order."""
    weight.data[1] = 2.0
    if rank:
        weight.data = weight.data.flip(0)


def twice(rank: int) -> bpipe.TiedWeights:
    """A second sum adds up what is a sum already, on one holder at least."""
    tied = one_per_end(rank)
    tied.sum_grads()
    if rank == 0:
        tied.weights["w"].grad.add_(1.0)
    return tied


def twice_with_a_step_between(rank: int, *, in_place: bool) -> bpipe.TiedWeights:
    tied = one_per_end(rank)
    tied.sum_grads()
    for weight in tied.weights.values():
        if in_place:
            weight.grad.zero_()
        else:
            weight.grad = torch.ones(2, 3)
    return tied


def added_to(rank: int, *, trains: bool = False, in_bucket: bool = False) -> bpipe.TiedWeights:
    """What another step adds to a sum, before the optimizer's step or after it."""
    bucket = torch.ones(2 * 3 + 1)

    def put_in_bucket(rank: int, weight: nn.Parameter) -> None:
        weight.grad = bucket[:6].view(2, 3)

    tied = one_per_end(rank, put_in_bucket) if in_bucket else one_per_end(rank)
    tied.sum_grads()
    for weight in tied.weights.values():
        if trains:
            torch.optim.SGD([weight], lr=1.0).step()
        weight.grad += 1.0
    return tied


REFUSED: dict[str, Callable[[int], bpipe.TiedWeights]] = {
    "other names": lambda rank: bpipe.TiedWeights({"v" if rank == 2 else "w": None}),
    "other shapes": lambda rank: bpipe.TiedWeights({"w": nn.Parameter(torch.ones(2 + (rank == 3)))}),
    "nowhere": lambda rank: bpipe.TiedWeights({"w": None}),
    "meta": lambda rank: bpipe.TiedWeights({"w": nn.Parameter(torch.ones(2, device="meta" if rank == 1 else "cpu"))}),
    "drifted": lambda rank: one_per_end(rank, drifted),
    "without gradient": lambda rank: one_per_end(rank, without_gradient),
    "sparse": lambda rank: one_per_end(rank, sparse),
    "swapped": lambda rank: one_per_end(rank, swapped),
    "twice": twice,
    "gradients set to zero": lambda rank: twice_with_a_step_between(rank, in_place=True),
    "gradients set to none": lambda rank: twice_with_a_step_between(rank, in_place=False),
    "added to": added_to,
    "added to after the optimizer's step": lambda rank: added_to(rank, trains=True),
    "added to in a bucket": lambda rank: added_to(rank, in_bucket=True),
    "made again in a bucket": lambda rank: added_to(rank, trains=True, in_bucket=True),
    "frozen": lambda rank: one_per_end(rank, lambda rank, weight: weight.requires_grad_(False)),
}


def told(rank: int, make: Callable[[int], bpipe.TiedWeights]) -> str:
    try:
        make(rank).sum_grads()
    except BPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


TWICE = "StageError: the gradient of 'w' on one of the ranks [0, 3] is the sum that it was made before, or has it in it: call"
TOLD = {
    "other names": "AgreementError: the ranks give different names: rank 0 ['w'], rank 1 ['w'], rank 2 ['v']",
    "other shapes": "AgreementError: the copies of 'w' differ: rank 0: [2] torch.float32",
    "nowhere": "AgreementError: no rank has a copy of 'w'",
    "meta": "ConfigurationError: 'w' is on the meta device",
    "drifted": "StageError: the copies of 'w' on ranks [0, 3] of the group have different values: call broadcast()",
    "without gradient": "StageError: 'w' has no gradient on any of its ranks [0, 3]: call sum_grads() between",
    "sparse": "StageError: the gradient of 'w' is sparse on one of the ranks [0, 3]",
    "swapped": "StageError: the copies of 'w' on ranks [0, 3] of the group have different values",
    "twice": TWICE,
    "gradients set to zero": TWICE,  # which nobody can tell from gradients that were added to
    "gradients set to none": "nothing",
    "added to": TWICE,
    "added to after the optimizer's step": TWICE,
    "added to in a bucket": TWICE,
    "made again in a bucket": "nothing",
    "frozen": "nothing",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_on_all_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    """Also on those without a copy: they would wait for the others in what comes next."""
    assert all(of_rank["refused"][name].startswith(TOLD[name]) for of_rank in ranks)


def clipped(rank: int) -> dict[str, Any]:
    """Ranks 0 and 3 have a weight whose gradients are 3 and 1, their sum 4; each rank has another gradient of 1 besides."""
    own = nn.Parameter(torch.zeros(1))
    alone = [dist.new_group([one]) for one in range(P)][rank]

    weights = {"w": nn.Parameter(torch.ones(2)) if rank in (0, P - 1) else None}
    tied = bpipe.TiedWeights(weights)

    def new_gradients() -> list[nn.Parameter]:
        own.grad = torch.ones(1)
        copies = [weight for weight in weights.values() if weight is not None]
        for weight in copies:
            weight.grad = torch.tensor([3.0 if rank == 0 else 1.0, 0.0])
        return [own, *copies]

    def clip(**options: Any) -> Any:
        return told_of(lambda: bpipe.clip_grad_norm_(parameters, 1e9, **options).item())

    parameters = new_gradients()
    found = {"before the sum": clip(copies=tied.copies)}
    tied.sum_grads()
    found |= {"without copies": clip(), "with copies": clip(copies=tied.copies), "its own rank": clip(group=alone)}
    new_gradients()
    found["of another step, before the sum"] = clip(copies=tied.copies)
    pickled = [pickle.loads(pickle.dumps(weight)) for weight in tied.weights.values()]
    for weight in pickled:
        weight.grad = torch.tensor([4.0, 0.0])
    parameters = [own, *pickled]
    found["of a pickled copy"] = clip()
    parameters = new_gradients()
    del tied
    found["of what is tied no longer"] = clip()
    return found


def told_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BPipeError as error:
        return f"{type(error).__name__}: {error}"


COUNTED = "ConfigurationError: rank 0 counts 'w', and this rank has a copy: give copies=tied.copies"
EARLY = "ConfigurationError: the gradient of 'w', a weight of several stages, is not the tensor that sum_grads()"
REFUSED_CLIPS = [("without copies", 3, COUNTED), ("before the sum", 0, EARLY), ("of another step, before the sum", 0, EARLY)]
NUMBERS = {
    "with copies": [20**0.5] * P,
    "its own rank": [17**0.5, 1.0, 1.0, 17**0.5],
    "of a pickled copy": [36**0.5] * P,
    "of what is tied no longer": [14**0.5] * P,
}


def test_clipping_knows_what_is_tied() -> None:
    """A copy counted twice, or a gradient before its sum, would be a wrong norm on all ranks: they all refuse."""
    seen = run_ranks(clipped, P)
    for name, norms in NUMBERS.items():
        assert [of_rank[name] for of_rank in seen] == pytest.approx(norms), name
    for name, rank, text in REFUSED_CLIPS:
        assert seen[rank][name].startswith(text)
        assert all(str(of_rank[name]).startswith("ConfigurationError: ") for of_rank in seen), name


class BothEnds(LanguageModel):
    """A stage at an end, over a matrix that is given to it."""

    weight = nn.Parameter(0.3 * torch.randn(13, 32, generator=torch.Generator().manual_seed(1)))

    def __init__(self, stage: int = 0, num_stages: int = 1) -> None:
        super().__init__(stage, num_stages)
        for end in (self.embedding, self.head):
            if hasattr(end, "weight"):
                end.weight = self.weight


def both_on_one_rank(rank: int) -> dict[str, torch.Tensor]:
    pipeline = Pipeline(rank, 2, 4, bpipe.ZBV, model=BothEnds)
    pipeline.backward(0)
    stats = pipeline.schedule.stats
    assert stats["peak_bytes"] == stats["predicted_peak_bytes"]
    return pipeline.gradients()


def test_ends_on_one_rank_share_the_parameter() -> None:
    """In a V the first rank has the first and the last stage: autograd adds up, and nothing is sent."""
    whole = BothEnds()
    backward_of(whole, 0)
    gradients = {name: value for part in run_ranks(both_on_one_rank, 2) for name, value in part.items()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)  # the two uses' gradients in another order
    assert torch.equal(gradients["head.weight"], gradients["embedding.weight"])


def test_a_loopback_needs_none() -> None:
    with pytest.raises(ConfigurationError, match="let the modules share one parameter"):
        bpipe.TiedWeights({}, group=bpipe.Loopback(2).rank(0))
