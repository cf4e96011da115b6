"""Learn scikit-learn's digits over four processes, by backpropagation and by local learning, and compare what comes of both.

    torchrun --nproc-per-node 4 examples/local_learning.py
    torchrun --nproc-per-node 4 examples/local_learning.py --epochs 10 --seeds 1

Both start with the same residual blocks. By backpropagation, 1F1B sends gradients from stage to stage; in local learning each stage
but the last has a head of its own, learns from its own loss, and sends only its output. The test accuracies of both are printed,
and a picture of them and of both schedules goes to runs/local_learning/local_learning.png.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from files import whole
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from processes import add_over_ranks, start_processes
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpipe
from bpipe.schedules import Costs, Op, build, simulate

WIDTH, CLASSES, MICROBATCHES, BATCH, TESTED = 64, 10, 4, 128, 360
BACKPROPAGATION, LOCAL = "backpropagation", "local learning"
COLORS = {BACKPROPAGATION: "#B26A00", LOCAL: "#0072B2"}  # apart for every kind of colour vision, and in grey

Accuracies = dict[str, list[list[float]]]  # of each way to learn, for each seed, after each epoch


def main() -> None:
    """Learn both ways with each seed, and report."""
    options, device = parse(), start_processes()
    found: Accuracies = {name: [] for name in COLORS}
    for seed in range(options.seeds):
        for name, accuracies in found.items():
            accuracies.append(learn(name, seed, options.epochs, device))
            if dist.get_rank() == 0:
                print(f"seed {seed}  {name}: {accuracies[-1][-1]:.4f} of the test set", flush=True)
    if dist.get_rank() == 0:
        means = {name: statistics.mean(curve[-1] for curve in curves) for name, curves in found.items()}
        draw(options.runs / "local_learning" / "local_learning.png", found)
        apart = 100 * (means[LOCAL] - means[BACKPROPAGATION])
        told = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
        print(f"mean of {options.seeds} seeds  {told}: {apart:+.2f} points", flush=True)
    dist.destroy_process_group()


def learn(name: str, seed: int, epochs: int, device: torch.device) -> list[float]:
    """Learn in one way; return the accuracy on the test set after each epoch, on all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    modules = [build_stage(index, num_ranks) for index in range(num_ranks)]  # all ranks draw all weights
    heads = bpipe.local_heads([(BATCH, WIDTH)] * (num_ranks - 1), CLASSES)
    module = modules[rank].to(device)
    if name == LOCAL and rank < num_ranks - 1:
        module = bpipe.LocalBlock(module, heads[rank].to(device), name=rank)

    # bpipe: the same stage and the same arguments; in local learning every rank takes the target.
    stage = bpipe.PipelineStage(module, rank, num_ranks, device)
    kind = bpipe.LocalLearning if name == LOCAL else bpipe.OneFOneB
    schedule = kind(stage, MICROBATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)

    (x, y), (test_x, test_y) = digits(seed, device)
    accuracies = []
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for rows in order[: len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            schedule.step(x[rows], target=y[rows], return_outputs=False)
            optimizer.step()  # of this stage alone: no other rank is waited for
        outputs = schedule.eval(test_x)
        right = 0.0 if outputs is None else (outputs.argmax(1) == test_y).double().mean().item()
        accuracies += add_over_ranks([right], device)
    schedule.close()
    return accuracies


class Residual(nn.Module):
    """A normalized layer beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build_stage(index: int, num_stages: int) -> nn.Module:
    """Return two residual blocks, behind the first layer on the first stage, before the classifier on the last one."""
    first = [nn.Linear(64, WIDTH)] * (index == 0)
    last = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)] * (index == num_stages - 1)
    return nn.Sequential(*first, Residual(), Residual(), *last)


def digits(seed: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and classes to learn and to test with, dealt by the seed."""
    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(seed))
    x = (torch.tensor(loaded.data, dtype=torch.float32)[order] / 8 - 1).to(device)
    y = torch.tensor(loaded.target)[order].to(device)
    return (x[TESTED:], y[TESTED:]), (x[:TESTED], y[:TESTED])


def draw(path: Path, found: Accuracies) -> None:
    """Write a PNG: the accuracies after each epoch, and a step of both schedules with eight microbatches."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    curves, *steps = figure.subplot_mosaic([["curves", "1f1b"], ["curves", "local"]], width_ratios=[1, 1.25]).values()
    for name, accuracies in found.items():
        by_epoch = list(zip(*accuracies, strict=True))
        epochs = range(1, len(by_epoch) + 1)
        curves.fill_between(epochs, [*map(min, by_epoch)], [*map(max, by_epoch)], color=COLORS[name], alpha=0.25, linewidth=0)
        curves.plot(epochs, [*map(statistics.mean, by_epoch)], color=COLORS[name], linewidth=2, label=name)
    curves.set_ylim(0.9, 1.0)
    curves.set_xlabel("epochs")
    curves.set_ylabel(f"accuracy on the test set, mean and range of {len(found[LOCAL])} seeds")
    curves.spines[["top", "right"]].set_visible(False)
    curves.legend(loc="lower right", frameon=False)
    for axes, name, rule in zip(steps, COLORS, ("1f1b", "local_learning"), strict=True):
        draw_step(axes, name, rule)
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=160)


def draw_step(axes: Axes, name: str, rule: str) -> None:
    """Draw when each rank computes in a step: forwards light, backwards dark."""
    plan = build(rule, num_stages=4, num_microbatches=8)
    timeline = simulate(plan, Costs(forward_s=1.0, backward_s=2.0))
    for rank in range(plan.num_ranks):
        for span in timeline.computations(rank):
            is_forward, number = span.action.op is Op.F, span.action.microbatch
            look = {"color": COLORS[name], "alpha": 0.45 if is_forward else 1.0, "edgecolor": "white", "linewidth": 0.8}
            axes.barh(rank, span.seconds, 0.8, span.begin_s, **look)
            middle, color = span.begin_s + span.seconds / 2, "black" if is_forward else "white"
            axes.text(middle, rank, number, ha="center", va="center", fontsize=8, color=color, weight="bold")
    axes.set_xlim(0, 33.5)
    axes.invert_yaxis()
    axes.set_yticks(range(plan.num_ranks), [f"rank {rank}" for rank in range(plan.num_ranks)])
    held = max(plan.peak_slots)
    told = f"{timeline.makespan_s:.0f} forwards' time, up to {held} microbatch{'es' * (held > 1)} held"
    axes.set_title(f"{name}: {told}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3, help="how often to learn in both ways")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
