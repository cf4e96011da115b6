"""What looks like a fault and works: it equals a single process to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import bpipe
from tests.faults.case import Case
from tests.faults.pipeline import WIDTH
from tests.faults.scene import Scene
from tests.models import KINDS, TOKENS, as_rank, flat, held_by, mse, single_process
from tests.models import WIDTH as KIND_WIDTH
from tests.test_sharding import single_process as sharded_reference
from tests.test_sharding import train as train_sharded

M = 4


Batch = tuple[list[torch.Tensor], list[torch.Tensor]]  # inputs and targets, by microbatch


class Call(NamedTuple):
    """A step or an evaluation.

    Args:
        args: the first stage's inputs, by microbatch.
        targets: by microbatch.
    """

    is_training: bool
    args: list[torch.Tensor]
    targets: list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A training loop whose gradients add up.

    Args:
        modules: makes them, one for each stage.
        calls: what it does.
        merges: whether the outputs of a step's microbatches can be put together.
    """

    modules: Callable[[int], list[nn.Module]]
    calls: Callable[[], list[Call]]
    schedule: type[bpipe.Schedule] = bpipe.OneFOneB
    num_ranks: int = 2
    num_stages: int = 2
    merges: bool = True

    def seeded(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return self.modules(self.num_stages)


def equals_one_process(work: Work, scene: Scene) -> None:
    """Compare this rank's part, call by call, with all stages in this process."""
    held = held_by(work.schedule, work.num_ranks, work.num_stages)[scene.rank]
    all_modules, reference = work.seeded(), work.seeded()
    modules = [all_modules[stage] for stage in held]
    stages = [bpipe.PipelineStage(module, stage, work.num_stages, "cpu") for stage, module in zip(held, modules)]
    schedule = work.schedule(stages, M, loss_fn=mse)
    for call in work.calls():
        losses: list[torch.Tensor] = []
        run = schedule.step if call.is_training else schedule.eval
        args = [(x,) for x in call.args]
        outputs = run(arg_mbs=args, target_mbs=call.targets, losses=losses, return_outputs=work.merges)
        results = [result_of(reference, *one, is_training=call.is_training) for one in zip(call.args, call.targets)]
        if work.num_stages - 1 in held:
            assert same(losses, [loss for _, loss in results])
            assert not work.merges or same(flat(outputs), [torch.cat(parts) for parts in zip(*(parts for parts, _ in results))])
        for stage, module in zip(held, modules):
            assert same(gradients(module), gradients(reference[stage])), f"stage {stage} differs"
    schedule.close()


def result_of(
    modules: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor, *, is_training: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The outputs and the loss of one microbatch."""
    with torch.set_grad_enabled(is_training):
        value: Any = (x,)
        for module in modules:
            value = module(*value) if isinstance(value, (tuple, list)) else module(value)
        loss = mse(value, y)
        if is_training:
            (loss / M).backward()
    return flat(value), loss.detach()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [torch.empty(0) if p.grad is None else p.grad for p in module.parameters()]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Equal to the bit, NaN too."""
    return len(a) == len(b) and all(x.dtype == y.dtype and x.shape == y.shape and bits(x) == bits(y) for x, y in zip(a, b))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


# Data.


def microbatches(sizes: Sequence[int], *rest: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = [(size, *(rest or (WIDTH,))) for size in sizes]
    xs, ys = ([torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(2))
    return xs, ys


def calls(pattern: str, *data: Batch) -> list[Call]:
    """T: train, E: evaluate, each letter with the next data in turn."""
    return [Call(letter == "T", *data[i % len(data)]) for i, letter in enumerate(pattern)]


EVEN = partial(microbatches, [2] * M)


def with_nan() -> Batch:
    xs, ys = EVEN()
    xs[1][0, 3] = torch.nan
    return xs, ys


def of_every_form() -> Batch:
    """Microbatches of one step that differ in size, number of dimensions and dtype."""
    forms = [EVEN(), microbatches([1] * M, 3, WIDTH), EVEN(dtype=torch.float64), microbatches([3] * M, dtype=torch.bfloat16)]
    return [form[0][i] for i, form in enumerate(forms)], [form[1][i] for i, form in enumerate(forms)]


# Stages.


class Plain(nn.Linear):
    """Computes in float32 and returns the dtype that it was given."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x.float())).to(x.dtype)


class Strided(nn.Module):
    """Returns what has gaps in memory, and what is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x if other is None else x + other.t())
        return torch.cat([y, y], dim=-1)[..., ::2], (y * 2).t()


class Viewing(nn.Module):
    """Returns a view of its input, and has nothing to train."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()


def plain(num_stages: int) -> list[nn.Module]:
    return [Plain() for _ in range(num_stages)]


def tied(num_stages: int) -> list[nn.Module]:
    """Of whole numbers, whose sums are exact in any order: of a tied parameter's gradient, schedules add the parts up in others."""
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages)]
    with torch.no_grad():
        for p in [p for module in modules for p in module.parameters()]:
            p.copy_(torch.randint(-1, 2, p.shape))
    modules[2].weight = modules[0].weight
    return [*modules]


def whole_numbers() -> Batch:
    xs, ys = EVEN()
    return [x.sign() for x in xs], [y.round() for y in ys]


def kind(name: str) -> Callable[[int], list[nn.Module]]:
    return lambda num_stages: [KINDS[name](stage) for stage in range(num_stages)]


def nested_data() -> Batch:
    return microbatches([2] * M, TOKENS, KIND_WIDTH)


# What the other tests show in more forms, here over the same process group as everything else.


def dropout(scene: Scene) -> None:
    mine, reference = as_rank(scene.rank, "transformer", 2, M, bpipe.OneFOneB, 2, {}), single_process("transformer", 2, M)
    assert same(
        [*flat(mine.gradients), *mine.losses], [*flat(reference.gradients[scene.rank]), *(reference.losses if mine.losses else [])]
    )


def sharded(scene: Scene) -> None:
    _, mine = train_sharded(scene.rank, bpipe.BreadthFirst, False)
    reference = sharded_reference(2)
    assert mine and all(all(map(torch.equal, found, reference[stage])) for stage, found in mine.items())


def works(name: str, play: Callable[[Scene], None], num_ranks: int = 2) -> Case:
    return Case(name=name, outcome="works", num_ranks=num_ranks, play=play, culprits=frozenset())


def loop(name: str, modules: Callable[[int], list[nn.Module]], calls: Callable[[], list[Call]], **more: Any) -> Case:
    work = Work(modules=modules, calls=calls, **more)
    return works(name, partial(equals_one_process, work), work.num_ranks)


BALANCED: dict[str, Any] = {"schedule": bpipe.BalancedOneFOneB, "num_ranks": 4, "num_stages": 4}
LOOPED: dict[str, Any] = {"schedule": bpipe.Interleaved1F1B, "num_stages": 4}
UNEVEN = partial(microbatches, [1, 2, 3, 1])
SHAPES = "shapes, dtypes, numbers of dimensions and batch sizes that change"

CASES = [
    loop("uneven microbatches, cut by the user, in train and eval", plain, lambda: calls("ETET", UNEVEN())),
    loop("None, numbers, dicts and pytrees as outputs", kind("nested"), lambda: calls("TET", nested_data())),
    loop(
        "outputs with gaps and transposed ones",
        lambda p: [*(Strided() for _ in range(p))],
        lambda: calls("TET", microbatches([WIDTH] * M)),
    ),
    loop(
        "an output that is a view of the input",
        lambda p: [Plain(), Viewing(), Viewing(), Plain()],
        lambda: calls("TET", EVEN()),
        num_ranks=4,
        num_stages=4,
    ),
    loop("NaN in the data", plain, lambda: calls("TET", with_nan(), EVEN())),
    loop("eval before, between and after training", plain, lambda: calls("ETEETE", EVEN()), **BALANCED),
    loop("several steps accumulate", plain, lambda: calls("TTT", EVEN(), UNEVEN())),
    loop("a parameter in two stages of a rank", tied, lambda: calls("TT", whole_numbers()), **LOOPED),
    loop(
        f"{SHAPES} between steps",
        plain,
        lambda: calls("TTTTET", EVEN(), microbatches([3] * M), microbatches([1] * M, 3, WIDTH), EVEN(dtype=torch.float64)),
    ),
    loop(f"{SHAPES} between microbatches", plain, lambda: calls("TET", of_every_form(), EVEN()), merges=False),
    works("dropout", dropout),
    works("several steps accumulate under FSDP2", sharded, 4),
]
