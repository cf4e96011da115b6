"""Expert parallelism whose all-to-alls run beside computations: a forward and a backward in two threads (DualPipeV).

    torchrun --nproc-per-node 4 examples/moe_overlap.py

Two pipelines of two ranks each. At each place of the pipelines, the experts of a stage are spread over both of them: a token goes
to the rank of its expert and back by `bpipe.overlap.all_to_all`, and while it travels, the other half of the pair computes. The
example trains two copies of one model, one with pairs that run one after the other and one with `TwoThreads`, and compares them to
the bit and in time. On a machine whose processes share a few cores there is nothing to gain: bytes are moved by the same cores that
compute.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe
from bpipe.overlap import TwoThreads, all_to_all

NUM_WORDS, LENGTH, WIDTH, NUM_EXPERTS, NUM_LAYERS = 32, 32, 64, 4, 2  # layers of a stage
NUM_PIPELINES, NUM_MICROBATCHES, NUM_STEPS = 2, 8, 6


def main() -> None:
    """Train both copies in turns."""
    dist.init_process_group("gloo")
    place, pipeline = divmod(dist.get_rank(), NUM_PIPELINES)
    num_places = dist.get_world_size() // NUM_PIPELINES
    # Every process makes all groups, in the same order.
    pipelines = [dist.new_group(list(range(i, dist.get_world_size(), NUM_PIPELINES))) for i in range(NUM_PIPELINES)]
    experts = [dist.new_group([i * NUM_PIPELINES + j for j in range(NUM_PIPELINES)]) for i in range(num_places)]
    groups = pipelines[pipeline], experts[place]

    copies = [Copy(place, num_places, *groups, overlap=overlap) for overlap in (None, TwoThreads())]
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(1, NUM_STEPS + 1):
        generator = torch.Generator().manual_seed(step + 100 * pipeline)
        words = torch.randint(NUM_WORDS, (NUM_MICROBATCHES, LENGTH), generator=generator)
        losses = [copy.train(words) for copy in copies]
        for taken, copy in zip(seconds, copies):
            taken.append(copy.schedule.stats["step_s"])
        if place == 0 and pipeline == 0:
            print(f"step {step}/{NUM_STEPS}  loss {losses[0]:.4f} and {losses[1]:.4f}", flush=True)

    are_same = all(map(torch.equal, *(copy.stages.parameters() for copy in copies)))
    one, other = (statistics.median(taken[1:]) for taken in seconds)  # the first step of each makes connections
    compared = "the same to the bit" if are_same else "DIFFERENT"
    print(f"place {place}, pipeline {pipeline}: weights {compared}; side by side takes {other / one:.2f} of the time", flush=True)
    for copy in copies:
        copy.schedule.close()
    dist.destroy_process_group()
    if not are_same:
        raise SystemExit(1)


class Copy:
    """A rank's part of one copy of the model: its two stages, their schedule and their optimizer."""

    def __init__(self, place: int, num_places: int, pipeline: Any, experts: Any, overlap: TwoThreads | None) -> None:
        num_stages, numbers = 2 * num_places, (place, 2 * num_places - 1 - place)
        self.stages = nn.ModuleList(stage_of(number, num_stages, experts) for number in numbers)
        self._experts = experts
        self._optimizer = torch.optim.AdamW(self.stages.parameters(), lr=3e-3)
        stages = [bpipe.PipelineStage(one, n, num_stages, "cpu", group=pipeline) for n, one in zip(numbers, self.stages)]
        self.schedule = bpipe.DualPipeV(stages, NUM_MICROBATCHES, loss_fn=loss_fn, overlapped=True)
        self.schedule.overlap = overlap

    def train(self, words: Tensor) -> float:
        """Train one step on this pipeline's batch; return its loss."""
        losses: list[Tensor] = []
        self._optimizer.zero_grad()
        self.schedule.step(words, target=(words + 1) % NUM_WORDS, losses=losses, return_outputs=False)
        for name, parameter in self.stages.named_parameters():
            assert parameter.grad is not None
            if "experts" not in name:  # an expert has had the tokens of all pipelines already
                dist.all_reduce(parameter.grad, group=self._experts)
            parameter.grad /= NUM_PIPELINES
        self._optimizer.step()
        return sum(map(float, losses)) / max(len(losses), 1)


def stage_of(number: int, num_stages: int, experts: Any) -> nn.Sequential:
    """Return a stage: the same on all pipelines, but for its experts."""
    torch.manual_seed(number)
    layers: list[nn.Module] = [nn.Embedding(NUM_WORDS, WIDTH)] if number == 0 else []
    layers += [Experts(experts) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers, *([nn.Linear(WIDTH, NUM_WORDS)] if number == num_stages - 1 else ()))


class Experts(nn.Module):
    """A layer whose experts are spread over the ranks of a group: each token goes to one of them, and comes back."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group, self._num_ranks = group, dist.get_world_size(group)
        self._num_local = NUM_EXPERTS // self._num_ranks
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        made = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(NUM_EXPERTS)]
        first = dist.get_rank(group) * self._num_local
        self.experts = nn.ModuleList(made[first : first + self._num_local])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [n, width]
        chances = self.router(tokens).softmax(-1)
        chance, chosen = chances.max(-1)  # the expert of each token: [n]
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=NUM_EXPERTS).view(self._num_ranks, self._num_local)
        received = torch.empty_like(sent)  # how many tokens come from each rank for each of its own experts
        dist.all_to_all_single(received, sent, group=self._group)
        to_ranks, from_ranks = sent.sum(1).tolist(), received.sum(1).tolist()

        here = all_to_all(tokens[order], self._group, from_ranks, to_ranks)
        by_expert = torch.arange(self._num_local).repeat(self._num_ranks).repeat_interleave(received.flatten())
        done = torch.zeros_like(here)
        for number, expert in enumerate(self.experts):
            rows = (by_expert == number).nonzero().squeeze(1)
            done = done.index_add(0, rows, expert(here[rows]))
        back = all_to_all(done, self._group, to_ranks, from_ranks)
        return x + (torch.zeros_like(tokens).index_copy(0, order, back) * chance.unsqueeze(1)).view_as(x)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of the next words."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main()
