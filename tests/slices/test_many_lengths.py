"""Microbatches of one step whose sequences have different lengths, and lengths of slices that are a function of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.utils.rnn import pack_sequence

import bpipe
from bpipe import FromPlan, Interleaved1F1B, Loopback, PipelineStage, Seq1F1B, TeraPipe
from bpipe.errors import AgreementError, ConfigurationError, StageError
from bpipe.partition import slice_lengths
from bpipe.schedules import build
from tests.ranks import run_ranks
from tests.slices.models import WIDTH, stages_of
from tests.slices.test_losses import Head, cross_entropy
from tests.slices.test_run import Gradients, furthest, taken

mse = nn.functional.mse_loss
POSITIONS = [12, 7, 20, 4]  # of the microbatches
Sequences = list[torch.Tensor]


def by_cost(positions: int) -> Sequence[int]:
    return slice_lengths(positions, lambda length, context: length * (10 + length + 2 * context), num_stages=2, num_slices=3)


def sequences_of(positions: Sequence[int], seed: int = 1) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, WIDTH, dtype=torch.float64, generator=generator) for n in positions]


def batches(positions: Sequence[int]) -> tuple[Sequences, Sequences]:
    return sequences_of(positions), sequences_of(positions, seed=2)


def whole(modules: Sequence[nn.Module], given: Sequences, targets: Sequences, loss_fn: Any = mse) -> tuple[Gradients, Sequences]:
    """Return the gradients and the losses of whole sequences in a single process."""
    losses = []
    for x, target in zip(given, targets, strict=True):
        for module in modules:
            x, _ = module(x)
        losses.append(loss_fn(x, target))
        (losses[-1] / len(given)).backward()
    return taken(modules), [loss.detach() for loss in losses]


class Pipeline:
    """A schedule of slices in a loopback, one stage per rank unless the schedule takes a list."""

    def __init__(self, modules: Sequence[nn.Module], make: Any = Seq1F1B, **options: Any) -> None:
        each = 2 if make is Interleaved1F1B else 1
        p, count = len(modules) // each, len(modules)
        self.modules, self.loopback = modules, Loopback(p)
        of_ranks = [
            [PipelineStage(modules[s], s, count, "cpu", self.loopback.rank(rank)) for s in range(rank, count, p)]
            for rank in range(p)
        ]
        options = {"loss_fn": mse, "slices": 3, **options}
        self.schedules = [make(stages if each > 1 else stages[0], len(POSITIONS), **options) for stages in of_ranks]

    def step(self, given: Sequences, targets: Sequences, *, return_outputs: bool = False, **options: Any) -> Any:
        microbatches = {"arg_mbs": [(x,) for x in given], "target_mbs": targets}
        return self.loopback.step(self.schedules, **microbatches, return_outputs=return_outputs, **options)


def from_plan(stage: Any, m: int, *, slices: int, **options: Any) -> FromPlan:
    return FromPlan(stage, build("seq_1f1b", 4, m, slices=slices), **options)


def balanced(*args: Any, **options: Any) -> Any:
    return bpipe.Balanced(Seq1F1B(*args, **options))


@pytest.mark.parametrize("kind", ["attention", "lstm"])
@pytest.mark.parametrize(
    "make, options",
    [
        (Seq1F1B, {}),
        (Seq1F1B, {"options": bpipe.Options(slice_lengths=[0.5, 0.25, 0.25])}),
        (Seq1F1B, {"options": bpipe.Options(slice_lengths=by_cost)}),
        (Seq1F1B, {"options": bpipe.Options(slice_lengths=by_cost, slots=5)}),
        (TeraPipe, {"options": bpipe.Options(slice_lengths=by_cost)}),
        (Interleaved1F1B, {"options": bpipe.Options(slice_lengths=by_cost)}),
        (from_plan, {"options": bpipe.Options(slice_lengths=by_cost)}),
    ],
    ids=["equal", "shares", "by cost", "balanced", "TeraPipe", "interleaved", "plan"],
)
def test_gradients_are_those_of_whole_sequences(kind: str, make: Any, options: dict[str, Any]) -> None:
    modules, pipeline_losses = stages_of(kind, 4), list[torch.Tensor]()
    pipeline = Pipeline(modules, make, **options)
    for positions in (POSITIONS, [9, 9, 5, 33]):  # the second step has others
        given, targets = batches(positions)
        expected, losses = whole(modules, given, targets)
        assert pipeline.step(given, targets, losses=pipeline_losses) is None
        assert furthest(taken(modules), expected) < 1e-12
        torch.testing.assert_close(pipeline_losses, losses, rtol=1e-12, atol=0)
        assert all(schedule.stats["peak_bytes"] == schedule.stats["predicted_peak_bytes"] for schedule in pipeline.schedules)
    has_budget = options.get("options", bpipe.Options()).slots is not None
    assert any(schedule.stats["evicted_bytes"] for schedule in pipeline.schedules) == has_budget


def test_balanced_in_bytes_is_plain_to_the_bit() -> None:
    modules = stages_of("attention", 4)
    plain, other = (
        Pipeline(modules, options=bpipe.Options(slice_lengths=by_cost)),
        Pipeline(modules, balanced, options=bpipe.Options(slice_lengths=by_cost)),
    )
    for positions in (POSITIONS, POSITIONS, POSITIONS[::-1]):
        plain.step(*batches(positions))
        expected = taken(modules)
        other.step(*batches(positions))
        assert all(map(torch.equal, taken(modules), expected))


class Seen(nn.Module):
    """Notes the positions of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH).double(), list[int]()

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = (), scale: torch.Tensor | None = None) -> Any:
        self.seen.append(x.shape[1])
        return self.linear(x if scale is None else x * scale), None


@pytest.mark.parametrize(
    "lengths, cut",
    [
        (None, [4, 4, 4, 3, 2, 2, 7, 7, 6, 2, 1, 1]),
        (lambda n: torch.tensor([n - 2, 1, 1]), [10, 1, 1, 5, 1, 1, 18, 1, 1, 2, 1, 1]),
    ],
)
def test_each_microbatch_is_cut_by_its_own_length(lengths: Any, cut: list[int]) -> None:
    module = Seen()
    Pipeline([module], options=bpipe.Options(slice_lengths=lengths)).step(*batches(POSITIONS))
    assert module.seen == cut


def test_the_function_is_asked_for_each_microbatch() -> None:
    asked = []

    def lengths(positions: int) -> list[int]:
        asked.append(positions)
        return [1, positions - 2, 1]

    pipeline = Pipeline([Seen()], options=bpipe.Options(slice_lengths=lengths))
    pipeline.step(*batches(POSITIONS))
    pipeline.step(*batches([5, 5, 6, 5]))
    assert asked == [*POSITIONS, 5, 5, 6, 5]


def test_words_that_count() -> None:
    """Entries of -100 are others in each microbatch."""
    torch.manual_seed(0)
    modules = [*stages_of("attention", 1), Head().double()]
    given, generator = sequences_of(POSITIONS), torch.Generator().manual_seed(3)
    words = [torch.randint(0, 7, (2, n), generator=generator) for n in POSITIONS]
    for i, of_one in enumerate(words):
        of_one[0, i + 1 :] = -100
    expected, losses = whole(modules, given, words, cross_entropy)
    pipeline, found = Pipeline(modules, loss_fn=cross_entropy, options=bpipe.Options(slice_lengths=by_cost)), list[torch.Tensor]()
    pipeline.step(given, words, losses=found)
    assert furthest(taken(modules), expected) < 1e-12
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)


def test_the_mean_over_all_positions() -> None:
    modules, (given, targets) = stages_of("attention", 2), batches(POSITIONS)
    outputs = [modules[1](modules[0](x)[0])[0] for x in given]
    mse(torch.cat(outputs, 1), torch.cat(targets, 1)).backward()
    expected = taken(modules)

    def part(output: torch.Tensor, target: torch.Tensor, *, total: int) -> torch.Tensor:
        return (output - target).square().sum() / total

    pipeline = Pipeline(modules, loss_fn=part, scale_grads=False, options=bpipe.Options(slice_lengths=by_cost))
    pipeline.step(given, targets, loss_kwargs={"total": sum(target.numel() for target in targets)})
    assert furthest(taken(modules), expected) < 1e-12


# Outputs.


def test_outputs_that_can_be_concatenated() -> None:
    modules, (given, targets) = stages_of("lstm", 2), batches(POSITIONS)
    expected = torch.cat([modules[1](modules[0](x)[0])[0] for x in given], 1)
    pipeline = Pipeline(modules, options=bpipe.Options(slice_lengths=by_cost), output_merge_spec=TensorChunkSpec(1))
    torch.testing.assert_close(pipeline.step(given, targets, return_outputs=True), expected, rtol=1e-12, atol=1e-12)


def test_outputs_that_cannot_be_concatenated_are_refused_before_any_gradient_is_added() -> None:
    modules = stages_of("lstm", 2)
    told = (
        r"those of the shapes \[\[2, 12, 16\], \[2, 7, 16\], \[2, 20, 16\], \[2, 4, 16\]\] cannot be concatenated along dimension 0"
        r".* output_merge_spec, or pass return_outputs=False"
    )
    with pytest.raises(StageError, match=told):
        Pipeline(modules).step(*batches(POSITIONS), return_outputs=True)
    assert all(parameter.grad is None for module in modules for parameter in module.parameters())


def test_outputs_without_positions_are_put_together_as_ever() -> None:
    class Summed(Seen):
        def forward(self, x: torch.Tensor, past: tuple[Any, ...] = (), **kwargs: Any) -> Any:
            return super().forward(x, past)[0].sum(1, keepdim=True), None

    module, given = Summed(), sequences_of(POSITIONS)
    spec = torch.distributed.pipelining.microbatch._CustomReducer(torch.zeros(1, dtype=torch.float64), torch.add)
    pipeline = Pipeline([module], loss_fn=None, options=bpipe.Options(output_slice_spec=spec))
    found = pipeline.loopback.eval(pipeline.schedules, arg_mbs=[(x,) for x in given])
    torch.testing.assert_close(found, torch.cat([module.linear(x).sum(1, keepdim=True) for x in given]))


# Processes: only the first rank has the sequences, and only the last one the targets.


def on_rank(rank: int, steps: Sequence[Sequence[int]]) -> list[Gradients]:
    modules, found = stages_of("attention", 2), []
    stage = PipelineStage(modules[rank], rank, 2, "cpu")
    schedule = Seq1F1B(stage, len(POSITIONS), loss_fn=mse, slices=3, options=bpipe.Options(slice_lengths=by_cost))
    for positions in steps:
        given, targets = batches(positions)
        here: dict[str, Any] = {"target_mbs": targets} if rank else {"arg_mbs": [(x,) for x in given]}
        schedule.step(**here, return_outputs=False)
        found.append(taken(modules[rank : rank + 1]))
    return found


def test_processes() -> None:
    modules, steps = stages_of("attention", 2), [POSITIONS, [9, 9, 5, 33], POSITIONS]
    found = run_ranks(on_rank, 2, steps)
    for step, positions in enumerate(steps):
        expected, _ = whole(modules, *batches(positions))
        assert furthest([*found[0][step], *found[1][step]], expected) < 1e-12


def scaled(rank: int) -> Any:
    """The last rank has something of one microbatch alone, and learns the other lengths from the first one."""
    torch.manual_seed(rank)
    stage = PipelineStage(Seen(), rank, 2, "cpu")
    schedule = Seq1F1B(
        stage, len(POSITIONS), slices=3, options=bpipe.Options(slice_lengths=by_cost), output_merge_spec=TensorChunkSpec(1)
    )
    scale = torch.arange(20, dtype=torch.float64).view(1, 20, 1)
    here: dict[str, Any] = {"arg_mbs": [(x,) for x in sequences_of(POSITIONS)]}
    if rank:
        here = {"kwarg_mbs": [{}, {}, {"scale": scale}, {}]}
    return schedule.eval(**here), stage.submod.linear.state_dict()


def test_a_rank_that_has_something_of_one_microbatch_alone() -> None:
    (_, first), (found, last) = run_ranks(scaled, 2)
    modules = [Seen(), Seen()]
    for module, state in zip(modules, (first, last)):
        module.linear.load_state_dict(state)
    scale = torch.arange(20, dtype=torch.float64).view(1, 20, 1)
    given = [modules[0].linear(x) for x in sequences_of(POSITIONS)]
    expected = torch.cat([modules[1].linear(x * scale if i == 2 else x) for i, x in enumerate(given)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# What cannot be.


def failing(positions: int) -> list[int]:
    raise KeyError(positions)


@pytest.mark.parametrize(
    "lengths, told",
    [
        (lambda n: [n - 3, 2], r"microbatch 0: slice_lengths\(12\) returned \[9, 2\]: return 3 whole numbers of at least 1"),
        (lambda n: [4, 4, 4], r"microbatch 1: slice_lengths\(7\) returned \[4, 4, 4\]: .*that add up to 7"),
        (lambda n: [n - 7, 7, 0] if n == 7 else [n - 2, 1, 1], r"microbatch 1: slice_lengths\(7\) returned \[0, 7, 0\]"),
        (lambda n: [n * 0.5, n * 0.25, n * 0.25], r"microbatch 0: slice_lengths\(12\) returned \[6\.0, 3\.0, 3\.0\]"),
        (lambda n: n, r"microbatch 0: slice_lengths\(12\) returned 12: return 3 whole numbers"),
        (failing, r"microbatch 0: slice_lengths\(12\) raised KeyError: 12\. It is called with the number of positions"),
        ([6, 3, 3], r"microbatch 1: slice_lengths=\[6, 3, 3\] .* has 7: .*give shares, or a function of the length"),
        ([0.9, 0.05, 0.05], r"microbatch 0: .* each slice needs at least one"),
    ],
)
def test_lengths_that_do_not_fit(lengths: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Pipeline([Seen()], options=bpipe.Options(slice_lengths=lengths)).step(*batches(POSITIONS))


@pytest.mark.parametrize("lengths", [None, by_cost])
def test_a_sequence_with_fewer_positions_than_slices(lengths: Any) -> None:
    with pytest.raises(ConfigurationError, match="microbatch 2: a sequence of 2 positions cannot be cut into 3 slices"):
        Pipeline([Seen()], options=bpipe.Options(slice_lengths=lengths)).step(*batches([12, 7, 2, 4]))


def test_a_target_of_another_microbatch() -> None:
    given, targets = batches(POSITIONS)
    with pytest.raises(ConfigurationError, match=r"microbatch 0: the target has 4 positions and args\[0\] has 12"):
        Pipeline([Seen()], options=bpipe.Options(loss_of_slices=True)).step(given, targets[::-1])


def test_a_batch_that_is_cut_into_microbatches_here_has_one_length() -> None:
    pipeline = Pipeline([Seen()], options=bpipe.Options(slice_lengths=by_cost))
    x = torch.randn(8, 12, WIDTH, dtype=torch.float64)
    assert pipeline.loopback.step(pipeline.schedules, x, target=x).shape == x.shape


def test_ranks_that_cut_a_microbatch_at_different_places() -> None:
    loopback = Loopback(2)
    stages = [PipelineStage(Seen(), i, 2, "cpu", loopback.rank(i)) for i in range(2)]
    others = (lambda n: [n - 2, 1, 1], lambda n: [n - 2, 1, 1] if n != 20 else [1, 18, 1])
    schedules = [
        Seq1F1B(stage, 4, slices=3, options=bpipe.Options(slice_lengths=lengths)) for stage, lengths in zip(stages, others)
    ]
    told = "ranks 0 and 1 cut microbatch 2 of this step at different places: their slices have 18, 1, 1 and 1, 18, 1 positions"
    with pytest.raises(AgreementError, match=told):
        loopback.eval(schedules, arg_mbs=[(x,) for x in sequences_of(POSITIONS)])


def test_a_microbatch_without_a_sequence() -> None:
    given = sequences_of(POSITIONS)
    pipeline = Pipeline([Seen()], loss_fn=None)
    with pytest.raises(AgreementError, match="microbatch 1 of this step has no sequence that could be cut into slices"):
        pipeline.loopback.eval(pipeline.schedules, arg_mbs=[(given[0],), (given[1][0, 0],), (given[2],), (given[3],)])


RAGGED = [torch.ones(6, WIDTH), torch.ones(4, WIDTH)] * 4


@pytest.mark.parametrize("where", ["args", "the target", "kwargs"])
@pytest.mark.parametrize(
    "make, told",
    [
        (pack_sequence, r"is a torch\.nn\.utils\.rnn\.PackedSequence, which cannot be cut along a sequence: give tensors"),
        (
            lambda tensors: torch.nested.nested_tensor(tensors, layout=torch.jagged),
            "is a nested tensor, .*: pad it, give each sequence as a microbatch of its own",
        ),
    ],
    ids=["packed", "jagged"],
)
def test_sequences_that_lie_one_behind_the_other(make: Any, told: str, where: str) -> None:
    x, ragged = torch.randn(8, 6, WIDTH), make(sorted(RAGGED, key=len, reverse=True))
    pipeline = Pipeline([Seen()], options=bpipe.Options(loss_of_slices=True))
    args, target = (ragged if where == "args" else x), ragged if where == "the target" else x
    kwargs = {"scale": ragged} if where == "kwargs" else {}
    with pytest.raises(ConfigurationError, match=rf"microbatch 0: {where}.* {told}"):
        pipeline.loopback.step(pipeline.schedules, args, target=target, **kwargs)
