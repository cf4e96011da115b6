"""Train a GPT on sequences of 32,768 bytes, and compare four schedules: whole sequences and slices, plain and balanced.

    torchrun --nproc-per-node 4 examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py --tokens 8192 --slices 4 --steps 5

In each step all four schedules compute the gradients of the same batch, in turns; they have to agree but for rounding, and the
optimizer takes the last ones. The first line takes some five minutes on 2 idle cores, because attention grows with the square of
the sequence. A table is printed, and a picture of each rank's memory goes to runs/long_context/memory.png.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from gpt import GPTConfig, build_stage
from picture import draw_activations
from processes import add_over_ranks, start_processes
from report import Measurements, Summary
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_gpt import loss_fn, prepare_text

import bpipe

MIB = 1024**2
REFERENCE = "1F1B"
HEADINGS = ("schedule", "activations of\nfullest rank, MiB", "of all\nranks, MiB", "step time,\nover 1F1B's", "loss,\nnats a byte")

# Single precision, summed in another order. What adds up wrongly is off by a share of a slice, some percent.
MOST_APART = {"losses": 1e-5, "gradients": 1e-3}


class Result(NamedTuple):
    """What one schedule computed in a step: the loss in nats per byte, and this rank's gradients."""

    loss: float
    gradients: list[Tensor]


def main() -> None:
    """Train, compare, and report."""
    options, device = parse(), start_processes()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # Two blocks a stage; the last stage has one, and the head and the loss, which take as much memory as another.
    config = GPTConfig(sequence_length=options.tokens, num_blocks=2 * num_ranks - 1, num_heads=2, num_key_heads=1, width=32)
    text = prepare_text(options.runs, options.tokens)
    module = build_stage(config, rank, num_ranks, device=device, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    # bpipe: one stage, whose module takes sequences whole and in slices, and four schedules that share it.
    stage = bpipe.PipelineStage(module, rank, num_ranks, device)
    schedules = schedules_of(stage, options.microbatches, options.slices)

    measurements, apart = Measurements(*schedules), dict.fromkeys(MOST_APART, 0.0)
    for step in range(options.steps):
        x, target = (tensor.to(device) for tensor in text.train_batch(options.microbatches, seed=0, step=step))
        results = {}
        for name, schedule in schedules.items():
            losses: list[Tensor] = []
            optimizer.zero_grad()
            schedule.step(x, target=target, losses=losses, return_outputs=False)
            measurements.add(name, schedule.stats)
            results[name] = Result(bpipe.share_loss(losses), [parameter.grad.clone() for parameter in module.parameters()])
            if rank == 0:
                print(f"step {step + 1}/{options.steps}  {name}: loss {results[name].loss:.6f}", flush=True)
        apart = {key: max(value, apart[key]) for key, value in furthest(results, device).items()}
        optimizer.step()

    ranks = measurements.gather(device)
    if rank == 0:
        report(ranks, {name: result.loss for name, result in results.items()}, options)
        print(told_of_agreement(apart), flush=True)
    for schedule in schedules.values():
        schedule.close()
    dist.destroy_process_group()
    if not is_same(apart):
        sys.exit("the schedules do not compute the same")


def schedules_of(stage: bpipe.PipelineStage, num_microbatches: int, slices: int) -> dict[str, bpipe.Schedule]:
    """Return the four schedules by name; slots of slices count slices."""
    fewest = slices + -(-dist.get_world_size() // 2)
    return {
        REFERENCE: bpipe.OneFOneB(stage, num_microbatches, loss_fn=loss_fn),
        "balanced 1F1B": bpipe.BalancedOneFOneB(stage, num_microbatches, loss_fn=loss_fn),
        "slices": bpipe.Seq1F1B(stage, num_microbatches, loss_fn=loss_fn, slices=slices),
        "balanced slices": bpipe.Seq1F1B(
            stage, num_microbatches, loss_fn=loss_fn, slices=slices, options=bpipe.Options(slots=fewest)
        ),
    }


def furthest(results: dict[str, Result], device: torch.device) -> dict[str, float]:
    """Return how far the schedules are from 1F1B: in the loss, and in the norm of all ranks' gradients. Collective."""
    loss, gradients = results[REFERENCE]
    squares = [sum(float(gradient.square().sum()) for gradient in gradients)]
    for result in results.values():
        squares.append(sum(float((one - other).square().sum()) for one, other in zip(result.gradients, gradients, strict=True)))
    whole, *differences = add_over_ranks(squares, device)
    return {
        "losses": max(abs(result.loss - loss) / loss for result in results.values()),
        "gradients": (max(differences) / whole) ** 0.5,
    }


def told_of_agreement(apart: dict[str, float]) -> str:
    """Say whether all schedules computed the same."""
    if is_same(apart):
        told = ", ".join(f"{key} to {value:.0e} of their size" for key, value in apart.items())
        return f"agreement   all four compute the same but for rounding: {told}"
    told = ", ".join(
        f"{key} by {apart[key]:.0e} of their size, and at most {most:.0e} is rounding" for key, most in MOST_APART.items()
    )
    return f"agreement   none: {told}"


def is_same(apart: dict[str, float]) -> bool:
    """Say whether what schedules computed differs by rounding only."""
    return all(apart[key] <= most for key, most in MOST_APART.items())


def report(ranks: list[Summary], losses: dict[str, float], options: argparse.Namespace) -> None:
    """Print the table and draw the picture. For one rank."""
    sizes = f"{options.microbatches} sequences of {options.tokens:,} tokens, in {options.slices} slices or whole"
    table = Table(box=box.SIMPLE_HEAD, title=sizes)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    peaks = {name: [rank[name]["peak_bytes"] / MIB for rank in ranks] for name in losses}
    seconds = {name: max(rank[name]["step_s"] for rank in ranks) for name in losses}
    for name, loss in losses.items():
        over = seconds[name] / seconds[REFERENCE]
        table.add_row(name, f"{max(peaks[name]):.1f}", f"{sum(peaks[name]):.1f}", f"{over:.2f}", f"{loss:.6f}")
    Console().print(table)
    if (cores := os.cpu_count() or 1) < len(ranks):
        print(
            f"cores       {cores} for {len(ranks)} ranks: a step takes the compute of all, and hardly shows how slices shorten it"
        )
    fullest = ", ".join(f"{name} {max(of_ranks):.0f}" for name, of_ranks in peaks.items())
    path = options.runs / "long_context" / "memory.png"
    draw_activations(path, ranks, f"{sizes}\nThe fullest rank, MiB: {fullest}")
    print(f"picture     {path}")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="bytes of a sequence (default: 32768)")
    parser.add_argument("--slices", type=int, default=8, help="of each sequence (default: 8)")
    parser.add_argument("--microbatches", type=int, default=4, help="of one sequence each (default: 4)")
    parser.add_argument("--steps", type=int, default=1, help="training steps, each under all four schedules (default: 1)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (default: runs)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
