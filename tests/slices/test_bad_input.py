"""What cannot be cut into slices, or computes something else in slices, is refused with the way out."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer

from bpipe import Interleaved1F1B, Loopback, PipelineStage, Seq1F1B, logs
from bpipe.api.options import Options
from bpipe.errors import AgreementError, ConfigurationError, SavedTensorError, StageError
from bpipe.slices import UpTo
from tests.patience import PATIENCE_S
from tests.slices.models import WIDTH, Stage

mse = nn.functional.mse_loss


class Changed(nn.Module):
    """A stage that does something else with a slice."""

    def __init__(self, how: Any = lambda x, past: x) -> None:
        super().__init__()
        self.linear, self._how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> Any:
        y = self.linear(x)
        return self._how(y, past)


class Normed(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(4))


class Grouped(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GroupNorm(2, 4)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []
        self.lengths: list[int] = []

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        self.lengths.append(x.shape[1])
        self.seen.append({name: tuple(value.shape) for name, value in kwargs.items()})
        return self.linear(x), None


def schedule_of(module: nn.Module, m: int = 1, **options: Any) -> Any:
    return Seq1F1B(PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0)), m, loss_fn=mse, **{"slices": 3, **options})


def step(module: nn.Module, positions: int = 6, target: torch.Tensor | None = None, kwargs: Any = None, **options: Any) -> None:
    x = torch.randn(2, positions, WIDTH)
    schedule_of(module, **options).step(x, target=x if target is None else target, **(kwargs or {}))


@pytest.mark.parametrize(
    "module, told",
    [
        (nn.Linear(WIDTH, WIDTH), r"stage 0 does not take slices: the forward of its Linear has no argument `past`"),
        (Grouped(), r"inner is a GroupNorm"),
        (Normed(), r"inner\.0 is a BatchNorm1d, whose statistics would be those of a slice"),
    ],
)
def test_modules_that_take_no_slices(module: nn.Module, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        schedule_of(module)


@pytest.mark.parametrize(
    "how, told",
    [
        (lambda y, past: y, r"returns \(output, state\).*this one returned a Tensor"),
        (lambda y, past: (y, object()), r"the state of slice 0 of microbatch 0 of stage 0 returned a builtins\.object"),
        (lambda y, past: (nn.functional.dropout(y, 0.5), None), r"drew random numbers in its forward \(dropout\?\)"),
    ],
)
def test_forwards_that_do_something_else(how: Any, told: str) -> None:
    with pytest.raises(StageError, match=told):
        step(Changed(how))


def test_a_state_that_a_later_slice_changes_in_place() -> None:
    def changed(y: torch.Tensor, past: tuple[Any, ...]) -> Any:
        for state in past:
            state.mul_(2)
        state = y * 1
        return (y * state).exp(), state

    with pytest.raises((SavedTensorError, RuntimeError, StageError), match=r"modified in place|inplace operation|changed in place"):
        step(Changed(changed))


def test_a_saved_result_that_its_slice_changes_in_place() -> None:
    steps = []

    def changed(y: torch.Tensor, past: tuple[Any, ...]) -> Any:
        made = y.exp()
        return made.sin_() if steps else made, None

    schedule, x = schedule_of(Changed(changed)), torch.randn(2, 6, WIDTH)
    schedule.step(x, target=x)
    steps.append(1)  # whose slices no stash follows
    with pytest.raises(SavedTensorError, match=r"for the backward of a slice was modified in place: shape \(2, 2, 16\)"):
        schedule.step(x, target=x)


def test_examples_of_a_microbatch_are_not_compared_with_slices() -> None:
    example = torch.randn(2, 6, WIDTH)
    whole = Changed(lambda y, past: (y, None))
    stage = PipelineStage(whole, 0, 1, "cpu", group=Loopback(1).rank(0), input_args=example, output_args=example)
    output = Seq1F1B(stage, 1, loss_fn=mse, slices=3).step(example, target=example)
    assert output is not None and output.shape == example.shape


GENERATOR = torch.Generator()


def restored(y: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    mask = torch.rand(y.shape) > 0.5
    torch.set_rng_state(state)
    return mask


DRAWS: dict[str, Any] = {
    "a generator of one's own": lambda y: torch.rand(y.shape, generator=GENERATOR) > 0.5,
    "numpy": lambda y: torch.from_numpy(np.random.rand(*y.shape)) > 0.5,
    "random": lambda y: torch.tensor([random.random() > 0.5 for _ in range(y.shape[1])])[:, None],
    "a restored state": restored,
}


@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.usefixtures("no_other_threads")
def test_random_numbers_from_elsewhere(how: str) -> None:
    module = Changed(lambda y, past: (y * DRAWS[how](y), None))
    with pytest.raises(StageError, match=r"drew random numbers in its forward \(dropout\?\)"):
        step(module)


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["Python", "NumPy"])
def test_another_thread_that_draws_ends_no_training(
    draw: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that loads and changes data: nobody can tell whose numbers these were, so that it is said once."""
    monkeypatch.setattr(logs, "_SAID", set())
    free = threading.Event()
    waiting = threading.Thread(target=free.wait, args=(PATIENCE_S,), name="waiting")

    def slow(y: torch.Tensor, past: tuple[Any, ...]) -> Any:
        loader = threading.Thread(target=draw)
        loader.start()
        loader.join(PATIENCE_S)
        return y, None

    waiting.start()
    step(Changed(slow))
    free.set()
    waiting.join(PATIENCE_S)
    (record,) = caplog.records
    assert "by it or by another thread of this process (" in record.getMessage() and "waiting" in record.getMessage()


def test_generators_of_a_compiled_module() -> None:
    """Where operations cannot be looked at, those that modules hold are."""
    module: Any = Changed(lambda y, past: (y * float(module.own.random()), None))
    module.own = np.random.default_rng(0)
    module._compiled_call_impl = module._call_impl
    with pytest.raises(StageError, match=r"drew random numbers"):
        step(module)


def test_one_slice_may_draw_random_numbers() -> None:
    """It is the whole sequence."""
    dropping = Changed(lambda y, past: (nn.functional.dropout(y, 0.5), None))
    step(dropping, slices=1)
    assert all(parameter.grad is not None for parameter in dropping.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_state_that_is_changed_in_place_in_an_evaluation(mode: Any) -> None:
    def summed(y: torch.Tensor, past: tuple[Any, ...]) -> Any:
        return y + past[0] if past else y, past[0].add_(1.0) if past else y.sum(1, keepdim=True)

    schedule = schedule_of(Changed(summed))
    with mode(), pytest.raises(StageError, match="was changed in place, so it is not what that slice has left"):
        schedule.eval(torch.randn(2, 6, WIDTH))


def test_a_running_sum_in_place() -> None:
    """The third slice would get the sum, and its gradient would go to the first slice alone."""

    def summed(y: torch.Tensor, past: tuple[Any, ...]) -> Any:
        total = past[0] if past else torch.zeros(2, 1, WIDTH)
        total = total.add_(y.sum(1, keepdim=True)) if past else y.sum(1, keepdim=True)
        return y + total, total

    with pytest.raises(StageError, match="the state of an earlier slice was changed in place, so gradients would be wrong"):
        step(Changed(summed))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"options": Options(slice_lengths=[3, 2, 2])}, r"makes slices of \[3, 2, 2\] positions, but the sequence has 6"),
        ({"options": Options(slice_lengths=[0.5, 0.4, 0.2])}, r"shares of a sequence must add up to 1, not 1\.1"),
        ({"options": Options(slice_lengths=[0.9, 0.05, 0.05])}, r"each slice needs at least one"),
        ({"slices": 7}, r"a sequence of 6 positions cannot be cut into 7 slices: give fewer slices"),
        (
            {"target": torch.randn(2, 5, WIDTH), "options": Options(loss_of_slices=True)},
            r"the target has 5 positions and args\[0\] has 6",
        ),
        ({"options": Options(target_slice_spec=TensorChunkSpec(1))}, "target_slice_spec cuts targets for losses of slices"),
        ({"kwargs": {"mask": torch.ones(6, 6)}}, r"kwargs\['mask'\] .* may be a mask of queries and keys, which may look ahead"),
        ({"options": Options(target_slice_spec="x")}, r"target_slice_spec contains a str"),
        ({"kwargs": {"mask": torch.ones(2, 6, 6)}}, r"kwargs\['mask'\] .* may be a mask of queries and keys, which may look ahead"),
        ({"kwargs": {"mask": torch.ones(2, 1, 6, 6)}}, r"kwargs\['mask'\] has 1 positions"),
        ({"options": Options(args_slice_spec=(TensorChunkSpec(5),))}, r"args\[0\] has the shape .* and no dimension 5"),
        (
            {"kwargs": {"ids": np.zeros((2, 6))}},
            r"kwargs\['ids'\] is a numpy\.ndarray, which cannot be cut along a sequence: give tensors",
        ),
        (
            {"kwargs": {"rows": torch.nested.nested_tensor([torch.ones(6, 2)] * 2, layout=torch.jagged)}},
            r"kwargs\['rows'\] is a nested tensor",
        ),
        ({"options": Options(output_slice_spec="x")}, r"output_slice_spec contains a str"),
    ],
)
def test_values_that_do_not_fit(options: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        step(Masked(), **options)


@pytest.mark.parametrize(
    "lengths", [[1.0], [3, 3], [4, 3, -1], 3, "333", torch.tensor(3), torch.ones(3, 2), [None, 1, 2], torch.tensor([4, 3, -1])]
)
def test_lengths_that_are_none(lengths: Any) -> None:
    with pytest.raises(ConfigurationError, match="give 3 positive numbers, one for each slice"):
        schedule_of(Masked(), options=Options(slice_lengths=lengths))


def test_what_each_slice_gets() -> None:
    module = Masked()
    kwargs = {"ids": torch.arange(12).view(2, 6), "padding": torch.ones(2, 6), "scale": torch.ones(2), "table": torch.ones(2, 9)}
    step(
        module,
        kwargs=kwargs,
        options=Options(kwargs_slice_spec={"ids": TensorChunkSpec(1), "padding": UpTo(), "scale": None, "table": None}),
    )
    assert module.seen == [{"ids": (2, 2), "padding": (2, end), "scale": (2,), "table": (2, 9)} for end in (2, 4, 6)]


def test_what_there_is_no_slice_for() -> None:
    with pytest.raises(ConfigurationError, match="take no slices, but slice_lengths, a slice spec or loss_of_slices was given"):
        schedule_of(nn.Linear(WIDTH, WIDTH), slices=1, options=Options(loss_of_slices=True))
    with pytest.raises(StageError, match=r"step\(past=\.\.\.\)"):
        step(Masked(), kwargs={"past": torch.ones(2, 6)})


@pytest.mark.parametrize(
    "how, told",
    [
        (
            lambda y, past: (y.transpose(1, 2), None),
            r"slices of \[2\] positions .*, not with these in dimension 1.*output_slice_spec",
        ),
        (
            lambda y, past: (y.sum((1, 2)) + 0 * y.sum(), None),
            r"slices returned tensors of the shapes \[\[4\]\], which have no dimension 1 of positions",
        ),
        (lambda y, past: (y[:, :1], None), r"slices of \[2\] positions returned tensors of the shapes \[\[4, 1, 16\]\]"),
    ],
)
def test_outputs_without_the_positions_of_their_slice(how: Any, told: str) -> None:
    """They are refused before any gradient is added."""
    module = Changed(how)
    schedule = Seq1F1B(PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0)), 1, loss_fn=lambda output, _: output.sum(), slices=3)
    with pytest.raises(StageError, match=told):
        schedule.step(torch.randn(4, 6, WIDTH), target=torch.randn(4, 6))
    assert module.linear.weight.grad is None


@pytest.mark.parametrize("how", [lambda y: y.transpose(1, 2), lambda y: y.sum(1), lambda y: y.sum((0, 1, 2))])
def test_outputs_of_evaluations_without_a_target(how: Any) -> None:
    """The last rank learns from the first one how long slices are."""
    loopback = Loopback(2)
    modules = [Changed(lambda y, past: (y, None)), Changed(lambda y, past: (how(y), None))]
    stages = [PipelineStage(one, i, 2, "cpu", loopback.rank(i)) for i, one in enumerate(modules)]
    schedules = [Seq1F1B(stage, 1, slices=3) for stage in stages]
    with pytest.raises(StageError, match=r"positions.*output_slice_spec"):
        loopback.eval(schedules, torch.randn(2, 6, WIDTH))


def test_outputs_with_a_spec() -> None:
    loopback = Loopback(1)
    module = Changed(lambda y, past: ({"turned": y.transpose(1, 2), "sum": y.sum((0, 1))}, None))
    stage = PipelineStage(module, 0, 1, "cpu", loopback.rank(0))
    spec = {"turned": TensorChunkSpec(2), "sum": _CustomReducer(torch.zeros(WIDTH), torch.add)}
    schedule = Seq1F1B(
        stage,
        2,
        slices=3,
        options=Options(output_slice_spec=spec),
        output_merge_spec={"turned": TensorChunkSpec(0), "sum": spec["sum"]},
    )
    x = torch.randn(2, 6, WIDTH)
    found, expected = schedule.eval(x), module.linear(x)
    torch.testing.assert_close(found["turned"], expected.transpose(1, 2))
    torch.testing.assert_close(found["sum"], expected.sum((0, 1)))


def test_ranks_that_cut_at_different_places() -> None:
    """Without a loss nothing else would show it."""
    loopback, x = Loopback(2), torch.randn(2, 6, WIDTH)
    stages = [PipelineStage(Masked(), i, 2, "cpu", loopback.rank(i)) for i in range(2)]
    schedules = [
        Seq1F1B(stage, 1, slices=3, options=Options(slice_lengths=lengths))
        for stage, lengths in zip(stages, ([2, 2, 2], [3, 2, 1]))
    ]
    with pytest.raises(AgreementError, match=r"ranks 0 and 1 cut .* their slices have 2, 2, 2 and 3, 2, 1 positions"):
        loopback.eval(schedules, x, ids=torch.zeros(2, 6))


def test_widths_as_large_as_the_sequence_are_no_masks() -> None:
    x, module = torch.randn(2, WIDTH, WIDTH), Masked()
    schedule = schedule_of(module, options=Options(slice_lengths=[6, 5, 5]))
    assert schedule.step(x, target=x).shape == x.shape
    assert module.lengths == [6, 5, 5]


def test_a_stage_may_stand_in_a_wrapper() -> None:
    """As in torch.compile's and DistributedDataParallel's."""
    torch.manual_seed(0)
    stage, x = Stage("lstm"), torch.randn(2, 6, WIDTH)
    expected, _ = stage(x)
    torch.testing.assert_close(schedule_of(nn.parallel.DataParallel(stage)).step(x, target=x), expected)


SQUARE = r"may be a mask of queries and keys, which may look ahead.*UpTo\(3, rows=2\)"


@pytest.mark.parametrize(
    "m, given, told",
    [
        (1, torch.ones(6, 6), SQUARE),
        (1, torch.ones(2, 6, 6), SQUARE),
        (2, torch.ones(6, 6), SQUARE),
        (3, torch.ones(6, 6, dtype=torch.bool), SQUARE),
        (1, torch.arange(6), r"\[.*\] has 6 entries and one dimension, and args\[0\] has 6 positions: .* TensorChunkSpec\(0\)"),
        (2, torch.arange(6), r"\[.*\] has 3 entries and one dimension, and args\[0\] has 6 positions"),
    ],
)
@pytest.mark.parametrize("is_positional", [False, True])
def test_values_that_are_ambiguous(m: int, given: torch.Tensor, told: str, is_positional: bool) -> None:
    """Before, they were cut wrongly, or given to each slice whole, without a word."""
    x = torch.randn(6, 6, WIDTH)
    more: Any = {} if is_positional else {"given": given}
    with pytest.raises(ConfigurationError, match=told):
        schedule_of(Masked(), m).step(x, *([given] if is_positional else []), target=x, **more)


def test_features_are_no_positions() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ConfigurationError, match=r"\[batch, positions\] or \[batch, features\]: give args_slice_spec"):
        schedule_of(Masked()).step(x, target=x)


def test_masks_of_queries_and_keys() -> None:
    """Each slice gets its queries' rows, and the keys up to its end."""
    module, mask = Masked(), torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    step(module, kwargs={"mask": mask}, options=Options(kwargs_slice_spec={"mask": UpTo(3, rows=2)}))
    assert module.seen == [{"mask": (2, 1, 2, end)} for end in (2, 4, 6)]
    for ahead in (torch.ones_like(mask), torch.zeros(2, 1, 6, 6)):
        with pytest.raises(ConfigurationError, match="shows queries of positions 0 to 1 keys behind them"):
            step(module, kwargs={"mask": ahead}, options=Options(kwargs_slice_spec={"mask": UpTo(3, rows=2)}))
    with pytest.raises(ConfigurationError, match="no dimension 1 of 6 queries"):
        step(module, kwargs={"mask": mask}, options=Options(kwargs_slice_spec={"mask": UpTo(3, rows=1)}))


def test_errors_name_microbatches_and_slices() -> None:
    """Before, they named the number of the slice among all as that of a microbatch."""

    def fails(y: torch.Tensor, past: tuple[Any, ...]) -> Any:
        if len(past) == 1 and module.linear.weight.grad is not None:
            raise ValueError("no more")
        return y, None

    module = Changed(fails)
    x = torch.randn(4, 6, WIDTH)
    with pytest.raises(ValueError, match="no more") as caught:
        schedule_of(module, 2).step(x, target=x)
    assert "slice 1 of microbatch 1, action 0F1/1" in caught.value.__notes__[0]
    with pytest.raises(StageError, match=r"loss_fn returned a tensor of shape \[2, 6, 16\] for microbatch 0"):
        Seq1F1B(
            PipelineStage(Changed(lambda y, past: (y, None)), 0, 1, "cpu", Loopback(1).rank(0)), 1, loss_fn=lambda y, t: y, slices=3
        ).step(x[:2], target=x[:2])


class Keeping(Changed):
    """A stage whose output is its state, too."""

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> Any:
        y = self.linear(x)
        y = y + past[-1].sum(1, keepdim=True) if past else y
        return y, y


def test_an_output_that_is_the_state_may_be_changed_by_the_next_stage_on_the_rank() -> None:
    """As over a link. Before, the stage that had not changed it was blamed."""

    class Adding(Changed):
        def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> Any:
            return self.linear(x.add_(1.0)), None

    x, found = torch.randn(2, 6, WIDTH), []
    for ranks in (2, 1):
        torch.manual_seed(0)
        modules, loopback = [Keeping(), Adding()], Loopback(ranks)
        stages = [PipelineStage(one, i, 2, "cpu", loopback.rank(i % ranks)) for i, one in enumerate(modules)]
        options: Any = {"loss_fn": mse, "slices": 3}
        if ranks == 2:
            schedules: list[Any] = [Seq1F1B(stage, 1, **options) for stage in stages]
        else:
            schedules = [Interleaved1F1B(stages, 1, **options)]
        loopback.step(schedules, x, target=x)
        found.append([parameter.grad for module in modules for parameter in module.parameters()])
    assert all(map(torch.equal, *found))
