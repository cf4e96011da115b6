"""Train a byte-level GPT in stages, one per process, with their activation memory balanced.

    torchrun --nproc-per-node 4 examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py --resume --steps 200

The text is Python's own standard library. The first steps alternate between plain and balanced 1F1B, to compare their
memory and time; both give the same gradients, to the bit, so all of them train. All files of a run are under
runs/NAME. Ctrl-C ends it after the step it is in, with a checkpoint and the report.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPTConfig, build_stage
from processes import Stop, add_over_ranks, start_processes
from progress import Journal
from report import Measurements, write_report
from text import Text, open_text, write_text
from timeline import draw_timeline
from torch import Tensor
from turns import Turns

import bpipe

NUM_SEQUENCES = 32
NUM_MICROBATCHES = 8


def main() -> None:
    """Train, from the start or from a checkpoint, and report."""
    options, config, device = parse(), GPTConfig(), start_processes()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    folder = options.runs / options.name
    text = prepare_text(options.runs, config.sequence_length)

    module = build_stage(config, rank, num_ranks, device=device, seed=options.seed)
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.9), weight_decay=0.1)
    history = new_history(config)
    if options.resume:
        history = checkpoint.load(folder / "checkpoint", module, optimizer)

    # bpipe: this rank's stage, and two schedules that share it.
    stage = bpipe.PipelineStage(module, rank, num_ranks, device)
    plain = bpipe.OneFOneB(stage, n_microbatches=NUM_MICROBATCHES, loss_fn=loss_fn)
    balanced = bpipe.BalancedOneFOneB(stage, n_microbatches=NUM_MICROBATCHES, loss_fn=loss_fn)

    first_step, stop, measurements = history["step"], Stop(), Measurements("plain", "balanced")
    turns = Turns(plain, balanced, steps=range(first_step, first_step + 2 * options.compare), folder=folder / "trace")
    with Journal(history, num_steps=options.steps, is_shown=rank == 0) as journal, turns:
        for step in range(first_step, options.steps):
            name, schedule = turns.take(step)
            x, target = text.train_batch(NUM_SEQUENCES, seed=options.seed, step=step)
            losses: list[Tensor] = []

            optimizer.zero_grad()
            schedule.step(x.to(device), target=target.to(device), losses=losses, return_outputs=False)
            set_learning_rate(optimizer, step, options)
            optimizer.step()

            measurements.add(name, schedule.stats)
            [asked_to_stop] = add_over_ranks([stop.is_asked], device)
            history["step"] = step + 1
            history["losses"].append(bpipe.share_loss(losses))
            if is_due(step + 1, options):
                history["validation_losses"][str(step + 1)] = validate(balanced, text, device)
            if is_due(step + 1, options) or asked_to_stop:
                checkpoint.save(folder / "checkpoint", module, optimizer, history)
            journal.show()
            if asked_to_stop:
                break

    ranks = measurements.gather(device)
    if rank == 0 and history["step"] > first_step:
        write_report(folder, ranks, {**history, "options": vars(options), "steps_of_rank_0": measurements.steps})
        if turns.trace.timelines:
            draw_timeline(folder)
    plain.close()
    balanced.close()
    dist.destroy_process_group()


def prepare_text(folder: Path, sequence_length: int) -> Text:
    """Let one process collect the text, and open it in all. Collective."""
    if dist.get_rank() == 0:
        write_text(folder)
    dist.barrier()
    return open_text(folder, sequence_length=sequence_length)


def new_history(config: GPTConfig) -> dict[str, Any]:
    """Return a run's record of itself before its first step; the checkpoint keeps it too."""
    return {"step": 0, "losses": [], "validation_losses": {}, "config": asdict(config)}


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def validate(schedule: bpipe.Schedule, text: Text, device: torch.device) -> float:
    """Return the mean loss over validation batches, always the same ones. Collective."""
    losses: list[Tensor] = []
    for x, target in text.validation_batches(NUM_SEQUENCES, num_batches=4):
        some: list[Tensor] = []
        schedule.eval(x.to(device), target=target.to(device), losses=some, return_outputs=False)
        losses += some
    return bpipe.share_loss(losses)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, options: argparse.Namespace) -> None:
    """Rise over the first twentieth of the steps, hold, and fall to nothing over the last two fifths."""
    rise, fall = (step + 1) / (0.05 * options.steps), (options.steps - step) / (0.4 * options.steps)
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate * min(rise, 1.0, fall)


def is_due(num_steps: int, options: argparse.Namespace) -> bool:
    """Say whether to validate and save after so many steps."""
    return bool(num_steps == options.steps or num_steps % options.validate_every == 0)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = int(os.environ.get("STEPS") or 60)
    parser.add_argument("--steps", type=int, default=steps, help="training steps in all (default: $STEPS, or 60)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs (default: runs)")
    parser.add_argument("--name", default="gpt", help="this run's folder in it (default: gpt)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, over any number of stages")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=int, default=6, help="plain steps to compare with (default: 6)")
    parser.add_argument("--validate-every", type=int, default=20, help="steps between checkpoints (default: 20)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
