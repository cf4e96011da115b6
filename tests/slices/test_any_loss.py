"""Any loss over slices: the gradients and losses of whole sequences, whatever the loss and its target are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer

import bpipe
from bpipe import FromPlan, Loopback, Options, PipelineStage, Seq1F1B, TeraPipe
from bpipe.errors import StageError
from bpipe.schedules import build
from tests.ranks import run_ranks
from tests.slices.models import Stage, batch_of
from tests.slices.test_losses import Head, cross_entropy
from tests.slices.test_run import furthest, taken

pytestmark = pytest.mark.usefixtures("one_thread")

M, ROWS, LENGTH, WORDS, PADDING = 2, 2, 12, 7, 6
F = nn.functional


def words(*, padding: int | None = -100, rows: tuple[int, ...] = (0, 5, 3, 9)) -> torch.Tensor:
    """Words of four sequences, of which so many positions at the end are padding; the word for it is in no other place."""
    found = torch.randint(0, PADDING, (M * ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    for row, count in enumerate(rows):
        if padding is not None and count:
            found[row, LENGTH - count :] = padding
    return found


def tokens(logits: torch.Tensor, target: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(logits.mT, target, reduction="none", **how)


def masked(logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    labels, mask = target
    return (tokens(logits, labels) * mask).sum() / mask.sum()


def mean_of_sequences(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counts = (target != -100).sum(1)
    return (tokens(logits, target).sum(1) / counts).mean()


def sequences_with_words(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum over positions, by how many sequences have any that count."""
    return tokens(logits, target).sum() / (target != -100).any(1).sum()


def of_positives(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As detectors do: a sum over everything, by the number of positive entries."""
    return F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / target.sum().clamp(min=1)


def regularised(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, target) + 0.1 * logits.pow(2).mean()


def with_z_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, target) + 0.1 * logits.logsumexp(-1).pow(2).mean()


def largest_of_sequences(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Part of it is of one position in each sequence."""
    return cross_entropy(logits, target) + 0.1 * tokens(logits, target).amax(1).mean()


def ignoring(index: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda logits, target: F.cross_entropy(logits.mT, target, ignore_index=index)


def shifted(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that shifts by itself, across the ends of slices."""
    return F.cross_entropy(logits[:, :-1].mT, target[:, 1:])


def dropped(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that draws random numbers, once for a sequence."""
    return cross_entropy(F.dropout(logits, 0.3), target)


def of_one_class(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A target without positions, and an output that all positions make."""
    return F.cross_entropy(logits.mean(1), target)


def from_the_end(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A recurrence over positions, from the last to the first: discounted returns."""
    total = torch.zeros_like(logits[:, 0, 0])
    for loss in reversed(tokens(logits, target).unbind(1)):
        total = loss + 0.9 * total * loss
    return total.mean()


def of_chunks(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A backward of its own, for a part of the loss, beside the one that the pipeline runs."""
    penalty = 0.1 * logits.pow(2).mean()
    (penalty * bpipe.loss_scale()).backward(retain_graph=True)
    return cross_entropy(logits, target) + penalty.detach()


def mask() -> torch.Tensor:
    found = torch.ones(M * ROWS, LENGTH, dtype=torch.bool)
    found[0, 5:], found[1, 9:], found[3, :6] = False, False, False
    return found


def positives() -> torch.Tensor:
    found = torch.zeros(M * ROWS, LENGTH, WORDS, dtype=torch.float64)
    found[:, ::5, 2] = 1.0
    found[1, 7:9, 1] = 1.0
    return found


class Case(NamedTuple):
    """A loss, and a target with which it shows what it is."""

    loss: Callable[..., Any]
    target: Any
    whole: Callable[..., torch.Tensor] | None = None  # the same loss of whole sequences, if it is another function


CASES = {
    "a mask": Case(masked, (words(padding=None), mask())),
    "weights of positions": Case(masked, (words(padding=None), mask().double() + 0.5)),
    "ignore_index, with padding": Case(ignoring(PADDING), words(padding=PADDING)),
    "ignore_index, with padding before the words": Case(ignoring(PADDING), words(padding=PADDING).flip(1)),
    "means of sequences": Case(mean_of_sequences, words()),
    "the number of sequences that count": Case(sequences_with_words, words(rows=(0, 12, 3, 12))),
    "the number of positive entries": Case(of_positives, positives()),
    "a regulariser": Case(regularised, words()),
    "a regulariser, and slices in which nothing counts": Case(regularised, words(rows=(8, 8, 8, 8))),
    "a z-loss of all positions": Case(with_z_loss, words()),
    "the largest of each sequence": Case(largest_of_sequences, words()),
    "a shift": Case(shifted, words()),
    "dropout": Case(dropped, words()),
    "a class of the whole sequence": Case(of_one_class, torch.arange(M * ROWS)),
    "a recurrence from the end": Case(from_the_end, words()),
    "a backward of its own": Case(of_chunks, words(), regularised),
    "a sum of squares": Case(lambda y, t: (y - t).square().sum(), positives()),
    "a root of a mean": Case(lambda y, t: (y - t).square().mean().sqrt(), positives()),
}


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Stage("attention").double(), Head().double()]


def part(value: Any, index: int) -> Any:
    return tuple(one.chunk(M)[index] for one in value) if isinstance(value, tuple) else value.chunk(M)[index]


def whole(case: Case, scale: float = 1 / M) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients and the losses of a loop over whole sequences."""
    first, last = both = modules()
    (x, _), losses = batch_of(M), list[torch.Tensor]()
    for index in range(M):
        loss = (case.whole or case.loss)(last(first(x.chunk(M)[index])[0])[0], part(case.target, index))
        (loss * scale).backward()
        losses.append(loss.detach())
    return taken(both), losses


def stages_in(loopback: Loopback, parts: list[nn.Module]) -> list[PipelineStage]:
    return [PipelineStage(one, i, 2, "cpu", loopback.rank(i)) for i, one in enumerate(parts)]


def in_slices(case: Case, rule: Any = Seq1F1B, **how: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same of two stages in a loopback, in slices."""
    parts, loopback, losses, (x, _) = modules(), Loopback(2), list[torch.Tensor](), batch_of(M)
    schedules = [rule(stage, M, loss_fn=case.loss, **how) for stage in stages_in(loopback, parts)]
    loopback.step(schedules, x, target=case.target, losses=losses, return_outputs=False)
    return taken(parts), losses


def assert_alike(found: Any, expected: Any) -> None:
    assert furthest(found[0], expected[0]) < 1e-12
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_slices_give_the_gradients_of_whole_sequences(name: str) -> None:
    expected = whole(CASES[name])
    assert_alike(in_slices(CASES[name], slices=3), expected)


# Losses of trainers, as they are written there.


def completion_only(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """TRL's SFTTrainer with completion_only_loss: labels of prompts are -100, and the loss shifts by itself."""
    labels = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), ignore_index=-100)


def of_transformers(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Transformers' own, by the number of items in all microbatches, as its Trainer gives it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = ForCausalLMLoss(logits, target, vocab_size=WORDS, num_items_in_batch=torch.tensor(31))
    return loss


def of_preferences(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """DPO and IPO: means of log-probabilities by sequence, of pairs of a chosen and a rejected one."""
    keeps = target[:, 1:] != -100
    labels = target[:, 1:].clamp(min=0)
    of_tokens = logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    chosen, rejected = ((of_tokens * keeps).sum(-1) / keeps.sum(-1)).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


TRAINERS = {
    "TRL's completions": Case(completion_only, words().flip(1)),
    "ForCausalLMLoss with num_items_in_batch": Case(of_transformers, words()),
    "DPO": Case(of_preferences, words()),
    "a z-loss": Case(with_z_loss, words()),
    "label smoothing with ignored targets": Case(lambda y, t: F.cross_entropy(y.mT, t, label_smoothing=0.1), words()),
    "a regulariser": Case(regularised, words()),
}
SCHEDULES = {
    "TeraPipe": partial(TeraPipe, slices=4),
    "Seq1F1B": partial(Seq1F1B, slices=4),
    "unequal slices": partial(Seq1F1B, slices=3, options=Options(slice_lengths=[6, 5, 1])),
}


@pytest.mark.parametrize("rule", SCHEDULES)
@pytest.mark.parametrize("name", TRAINERS)
def test_losses_of_trainers(name: str, rule: str) -> None:
    pytest.importorskip("transformers")
    assert_alike(in_slices(TRAINERS[name], SCHEDULES[rule]), whole(TRAINERS[name]))


def on_rank(rank: int, names: list[str]) -> list[list[torch.Tensor]]:
    found, module = [], modules()[rank]
    stage, (x, _) = PipelineStage(module, rank, 2, "cpu"), batch_of(M)
    for name in names:
        schedule = SCHEDULES["unequal slices"](stage, M, loss_fn=TRAINERS[name].loss)
        schedule.step(x, target=TRAINERS[name].target, return_outputs=False)
        found.append(taken([module]))
    return found


def test_losses_of_trainers_over_gloo() -> None:
    """The last rank learns from the first one where sequences are cut: its target is whole."""
    pytest.importorskip("transformers")
    names = list(TRAINERS)
    for name, first, last in zip(names, *run_ranks(on_rank, 2, names), strict=True):
        assert furthest([*first, *last], whole(TRAINERS[name])[0]) < 1e-12, name


@pytest.mark.parametrize("how", ["recomputed", "evicted", "summed"])
@pytest.mark.parametrize("case", [CASES["a regulariser"], TRAINERS["DPO"]])
def test_ways_to_run_it(case: Case, how: str) -> None:
    if how == "summed":
        return assert_alike(in_slices(case, slices=3, scale_grads=False), whole(case, 1.0))
    kwargs: dict[str, Any] = {"by": "recompute"} if how == "recomputed" else {"options": Options(parts=3)}
    parts, loopback, losses, (x, _) = modules(), Loopback(2), list[torch.Tensor](), batch_of(M)
    schedules = [
        bpipe.Balanced(Seq1F1B(stage, M, loss_fn=case.loss, slices=3), "lowest", **kwargs) for stage in stages_in(loopback, parts)
    ]
    for _ in range(3):
        parts[0].zero_grad()
        parts[1].zero_grad()
        loopback.step(schedules, x, target=case.target, losses=losses, return_outputs=False)
    assert any(schedules[0].plan.recomputed(rank) or schedules[0].plan.evicted(rank) for rank in range(2))
    assert_alike((taken(parts), losses), whole(case))


def test_the_loss_of_an_evaluation() -> None:
    case, losses, (x, _), loopback = TRAINERS["DPO"], list[torch.Tensor](), batch_of(M), Loopback(2)
    schedules = [Seq1F1B(stage, M, loss_fn=case.loss, slices=3) for stage in stages_in(loopback, modules())]
    loopback.eval(schedules, x, target=case.target, losses=losses)
    torch.testing.assert_close(losses, whole(case)[1], rtol=1e-12, atol=0)


class Weighing(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WORDS, dtype=torch.float64))

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((logits * self.weight).mT, target)


def test_a_parameter_of_the_loss_is_trained() -> None:
    found, expected = Weighing(), Weighing()
    assert_alike(in_slices(Case(found, words()), slices=3), whole(Case(expected, words())))
    assert found.weight.grad is not None and expected.weight.grad is not None
    assert furthest([found.weight.grad], [expected.weight.grad]) < 1e-12


# Losses of slices, one by one.


def sum_of(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens(logits, target).sum(), (target != -100).sum()


def sum_of_masked(logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
    labels, mask = target
    return (tokens(logits, labels) * mask).sum(), float(mask.sum())


def of_nothing(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.sum() * 0


OF_SLICES = {
    "words that count": Case(sum_of, words(), cross_entropy),
    "slices in which nothing counts": Case(sum_of, words(rows=(8, 12, 9, 10)), cross_entropy),
    "a mask, counted as a number": Case(sum_of_masked, (words(padding=None), mask()), masked),
    "nothing at all": Case(sum_of, words(rows=(12, 12, 12, 12)), of_nothing),
    "a number that is known": Case(
        lambda y, t: (tokens(y, t).sum(), 31 / 3), words(), lambda y, t: tokens(y, t).sum() / 31
    ),
}


@pytest.mark.parametrize("options", [{}, {"scale_grads": False}], ids=["mean", "sum"])
@pytest.mark.parametrize("name", OF_SLICES)
def test_sums_and_counts_of_slices(name: str, options: Any) -> None:
    found = in_slices(OF_SLICES[name], slices=3, options=Options(loss_of_slices=True), **options)
    expected = whole(OF_SLICES[name], 1.0 if options else 1 / M)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_no_more_than_a_slice_s_logits_is_seen() -> None:
    """The one case in which a target is cut."""
    seen = []

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.append((logits.shape[1], target.shape[1]))
        return tokens(logits, target).sum(), target.numel()

    case = Case(loss_fn, words(padding=None), cross_entropy)
    plan = build("seq_1f1b", 2, M, slices=3)
    found = in_slices(case, lambda stage, m, **how: FromPlan(stage, plan, **how), options=Options(loss_of_slices=True))
    assert_alike(found, whole(case))
    assert seen == [(4, 4)] * 3 * M


def refused(loss: Callable[..., Any], told: str, change: Any = None, **options: Any) -> None:
    """Run a step that is refused before any gradient is added, in the loss of the first sequence."""
    parts, loopback, (x, _) = modules(), Loopback(2), batch_of(M)
    if change is not None:
        parts[1].register_forward_hook(lambda module, args, result: (change(result[0]), result[1]))
    schedules = [Seq1F1B(stage, M, loss_fn=loss, slices=3, options=Options(**options)) for stage in stages_in(loopback, parts)]
    with pytest.raises(StageError, match=told):
        loopback.step(schedules, x, target=words(), return_outputs=False)
    assert all(parameter.grad is None for one in parts for parameter in one.parameters())


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: (loss,), lambda loss: (loss, loss), lambda loss: (loss, "3")])
def test_what_is_no_sum_and_count(returned: Callable[[torch.Tensor], Any]) -> None:
    told = r"loss_fn returned a (Tensor|tuple) for slice 0 of microbatch 0: with loss_of_slices=True it returns two numbers"
    refused(lambda y, t: returned(cross_entropy(y, t)), told, loss_of_slices=True)


def test_a_sum_and_a_count_without_the_option() -> None:
    refused(sum_of, r"loss_fn returned a tuple: .* options=bpipe\.Options\(loss_of_slices=True\)")


def test_a_loss_of_slices_that_draws() -> None:
    """Each slice would draw other numbers than the whole sequence."""
    told = "the loss of slice 0 of microbatch 0 drew random numbers"
    refused(lambda y, t: (F.dropout(y).sum(), 1), told, loss_of_slices=True)


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda y: (y, y.shape[1]), r"output\[1\]: slices returned the numbers \[4, 4, 4\]"),
        (lambda y: (y, y.mean()), r"output\[1\]: slices returned tensors of the shapes .*, which have no dimension 1 of positions"),
        (lambda y: y.sum(1).sum(1), r"slices returned tensors of the shapes .*, which have no dimension 1 of positions"),
        (lambda y: y.mT, r"slices of \[4, 4, 4\] positions returned tensors of the shapes .*, not with these in dimension 1"),
    ],
)
def test_outputs_that_cannot_be_joined(change: Callable[[torch.Tensor], Any], told: str) -> None:
    way_out = r".* give an output_slice_spec that says how they are joined, or compute the losses of slices one by one"
    refused(lambda y, t: tokens(y[0], t).sum(), told + way_out, change)


def test_outputs_that_a_spec_joins() -> None:
    """A reducer adds up what slices return beside their logits, such as auxiliary losses."""
    spec = (TensorChunkSpec(1), _CustomReducer(torch.zeros((), dtype=torch.float64), torch.add))

    class WithAuxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = Head().double()

        def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> Any:
            y, state = self.head(x, past)
            return (y, y.pow(2).sum()), state

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output[0], target) + 0.1 * output[1] / output[0].numel()

    torch.manual_seed(0)
    module, (x, _) = WithAuxiliary(), batch_of(M)
    for index in range(M):
        (loss_fn(module(x.chunk(M)[index])[0], part(words(), index)) / M).backward()
    expected = taken([module])
    stage = PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0))
    schedule = Seq1F1B(stage, M, loss_fn=loss_fn, slices=3, options=Options(output_slice_spec=spec))
    schedule.step(x, target=words(), return_outputs=False)
    assert furthest(taken([module]), expected) < 1e-12
