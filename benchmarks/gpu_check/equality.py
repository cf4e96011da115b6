"""Compare gradients bit for bit on one GPU: all ways to balance with plain 1F1B, and that with a loop over microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

import bpipe
from benchmarks.gpu_check import contenders
from benchmarks.gpu_check.contenders import CONTENDERS, PLAIN, moves
from benchmarks.gpu_check.model import Size, batch_of, gradients_of, loss_of, stage_of
from benchmarks.gpu_check.verdict import Verdict, judged
from bpipe.device import fork_random_states, random_state, set_random_state

STEPS = 3  # the first measures, and the second is the first with the plan made of that
SEED = 7
ALIKE = "Moving and recomputing activations changes no gradient and no loss: training is plain 1F1B's, to the bit."
ALONE = "The pipeline adds up what a loop over microbatches without bpipe adds up, to the bit."


class Trained(NamedTuple):
    """The result of some steps: all stages' accumulated gradients and the losses of the last step, and whether anything moved."""

    tensors: list[torch.Tensor]
    moved: bool


class Difference(NamedTuple):
    """The number of tensors that were compared, how many of them differ, and by how much at most."""

    num_tensors: int
    num_differing: int
    largest: float

    def problems(self, name: str) -> list[str]:
        """Return what is wrong, if anything is."""
        if not self.num_differing:
            return []
        return [f"{name}: {self.num_differing} of {self.num_tensors} tensors differ, by up to {self.largest:.3g}"]


def check(size: Size, device: torch.device, names: Iterable[str] = CONTENDERS) -> list[Verdict]:
    """Train the same model in every way in one process, and compare."""
    plain = in_loopback(size, PLAIN, device)
    problems, numbers = [], {"tensors": len(plain.tensors)}
    for name in [name for name in names if name != PLAIN]:
        found = in_loopback(size, name, device)
        difference = compare(found.tensors, plain.tensors)
        problems += difference.problems(name) + [f"{name}: nothing moved, so that nothing was tested"] * (not found.moved)
        numbers[f"differing, {name}"] = difference.num_differing
    alone = compare(plain.tensors, by_itself(size, device, range(size.num_ranks)))
    return [
        judged("equality: balanced and plain, one process", ALIKE, problems, numbers),
        judged("equality: pipeline and plain loop, one process", ALONE, alone.problems(PLAIN), alone._asdict()),
    ]


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Difference:
    """Compare tensors by torch.equal: a NaN equals nothing."""
    if len(found) != len(expected):
        return Difference(len(expected), abs(len(found) - len(expected)), float("inf"))
    differing = [(one, other) for one, other in zip(found, expected) if not torch.equal(one, other)]
    return Difference(len(expected), len(differing), max((_distance(*pair) for pair in differing), default=0.0))


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item() if one.shape == other.shape else float("inf")


def in_loopback(size: Size, name: str, device: torch.device) -> Trained:
    """Train under a schedule, with all ranks in this process."""
    stages, loopback = [stage_of(size, i, device) for i in range(size.num_ranks)], bpipe.Loopback(size.num_ranks)
    loopback.manual_seed(SEED)
    schedules = contenders.in_loopback(name, stages, size, loopback)
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        x = batch_of(size, step, device)
        loopback.step(schedules, x, target=x, losses=losses, return_outputs=False)
    moved = moves(schedules[0])
    for schedule in schedules:
        schedule.close()
    return Trained([*_all_gradients(stages), *losses], moved)


def by_itself(size: Size, device: torch.device, kept: Sequence[int]) -> list[torch.Tensor]:
    """Train one microbatch after another without bpipe; return the gradients of some stages and the losses of the last step.

    Each stage draws random numbers of its own, as its rank does.
    """
    stages = [stage_of(size, i, device) for i in range(size.num_ranks)]
    with fork_random_states([device]):
        random = [torch.Generator(device).manual_seed(SEED).get_state()] * size.num_ranks
        for step in range(STEPS):
            batch = batch_of(size, step, device)
            losses = [_one_microbatch(x, stages, random, size, device) for x in batch.chunk(size.num_microbatches)]
    return [*_all_gradients([stages[i] for i in kept]), *losses]


def _one_microbatch(
    x: torch.Tensor, stages: Sequence[nn.Module], random: list[torch.Tensor], size: Size, device: torch.device
) -> torch.Tensor:
    target = x
    for i, stage in enumerate(stages):
        set_random_state(random[i], device)
        x = stage(x)
        state = random_state(device)
        assert state is not None
        random[i] = state
    loss = loss_of(x, target)
    (loss / size.num_microbatches).backward()
    return loss.detach()


def _all_gradients(stages: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [gradient for stage in stages for gradient in gradients_of(stage)]
