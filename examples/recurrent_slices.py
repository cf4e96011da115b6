"""Train recurrent stages in slices: LSTMs, and a gated selective state-space model as Mamba has it.

    torchrun --nproc-per-node 4 examples/recurrent_slices.py

A recurrent state is as large after a long sequence as after a short one, so that slices cost the same wherever they are cut. In
each step, whole sequences in 1F1B, slices, and balanced slices compute the gradients of the same batch; they have to agree.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from processes import add_over_ranks, start_processes
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu, softplus

import bpipe

WIDTH, CHANNELS, HIDDEN = 16, 32, 4
BATCH, POSITIONS, SLICES, NUM_STEPS = 6, 128, 4, 3
CHUNK = 8  # positions of which the state-space layer multiplies decays at once
MOST_APART = 1e-10  # in double precision


def main() -> None:
    """Learn to remember: each position's target is the mean of all positions so far."""
    device = start_processes()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = build_stage(rank).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    # bpipe: one stage, which takes sequences whole and in slices, and the schedules that share it.
    stage = bpipe.PipelineStage(module, rank, num_ranks, device)
    schedules = {
        "whole": bpipe.OneFOneB(stage, BATCH, loss_fn=mse_loss),
        "slices": bpipe.Seq1F1B(stage, BATCH, loss_fn=mse_loss, slices=SLICES),
        "balanced slices": bpipe.Seq1F1B(
            stage, BATCH, loss_fn=mse_loss, slices=SLICES, options=bpipe.Options(slots=SLICES + -(-num_ranks // 2))
        ),
    }
    apart = 0.0
    for step in range(1, NUM_STEPS + 1):
        x, target = batch_of(step, device)
        gradients = {}
        for name, schedule in schedules.items():
            losses: list[Tensor] = []
            optimizer.zero_grad()
            schedule.step(x, target=target, losses=losses, return_outputs=False)
            gradients[name] = [parameter.grad.clone() for parameter in module.parameters()]
        optimizer.step()
        apart = max(apart, furthest(gradients, device))
        loss = bpipe.share_loss(losses)
        if rank == 0:
            print(f"step {step}/{NUM_STEPS}  loss {loss:.4f}", flush=True)

    kib = {name: schedule.stats["peak_bytes"] / 1024 for name, schedule in schedules.items()}
    told = ", ".join(f"{name} {peak:.0f} KiB" for name, peak in kib.items())
    print(f"rank {rank}: at most {told} of activations", flush=True)
    if rank == 0 and apart <= MOST_APART:
        print(f"agreement   the gradients of slices are those of whole sequences, to {apart:.0e} of their size", flush=True)
    for schedule in schedules.values():
        schedule.close()
    dist.destroy_process_group()
    if apart > MOST_APART:
        sys.exit(f"the gradients of slices are not those of whole sequences: they differ by {apart:.0e} of their size")


def furthest(gradients: dict[str, list[Tensor]], device: torch.device) -> float:
    """Return how far slices are from whole sequences, in the norm of all ranks' gradients. Collective."""
    whole, *others = gradients.values()
    squares = [sum(float((one - other).square().sum()) for one, other in zip(found, whole, strict=True)) for found in others]
    size, *differences = add_over_ranks([sum(float(one.square().sum()) for one in whole), *squares], device)
    return float((max(differences) / size) ** 0.5)


class Recurrent(nn.Module):
    """An LSTM, whose state are its two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, last: Any = None) -> tuple[Tensor, Any]:
        y, state = self.lstm(self.norm(x), last)
        return x + y, state


class Selective(nn.Module):
    """A selective state-space layer as in Mamba: what it keeps, takes and gives depends on its input, and a gate on what is used.

    Of each channel, `hidden = exp(delta * A) * hidden + delta * B * x` and `y = C * hidden + D * x`, with delta, B and C made of x.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * CHANNELS), nn.Linear(CHANNELS, WIDTH)
        self.chosen, self.delta = nn.Linear(CHANNELS, 2 * HIDDEN + 1), nn.Linear(1, CHANNELS)
        self.log_decay = nn.Parameter(torch.arange(1.0, HIDDEN + 1).log().repeat(CHANNELS, 1))
        self.skip = nn.Parameter(torch.ones(CHANNELS))

    def forward(self, x: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor]:
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        u = silu(u)
        b, c, step = self.chosen(u).split([HIDDEN, HIDDEN, 1], -1)
        delta = softplus(self.delta(step))  # [batch, positions, CHANNELS]
        log_keep = -delta.unsqueeze(-1) * self.log_decay.exp()  # [batch, positions, CHANNELS, HIDDEN]
        taken = (delta * u).unsqueeze(-1) * b.unsqueeze(2)
        hidden = u.new_zeros(len(x), CHANNELS, HIDDEN) if last is None else last
        found = []
        for of_chunk, given in zip(log_keep.split(CHUNK, 1), taken.split(CHUNK, 1)):
            found.append(scan(of_chunk, given, hidden))
            hidden = found[-1][:, -1]
        y = torch.einsum("bpch,bph->bpc", torch.cat(found, 1), c) + self.skip * u
        return x + self.out(y * silu(gate)), hidden.clone()  # a view would keep the whole chunk


def scan(log_keep: Tensor, taken: Tensor, hidden: Tensor) -> Tensor:
    """Return the hidden states of a chunk: each position's is what is kept of the one before, and what it takes.

    What position s has taken is kept at position t as the product of what is kept from s + 1 to t. Sums of logarithms say that for
    each pair, and no such sum is positive, so that nothing overflows, as quotients of products would.
    """
    sums = log_keep.cumsum(1)
    behind = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=sums.device).triu(1)[..., None, None]
    kept = (sums.unsqueeze(2) - sums.unsqueeze(1)).masked_fill(behind, -torch.inf).exp()  # [batch, t, s, CHANNELS, HIDDEN]
    return torch.einsum("btsch,bsch->btch", kept, taken) + sums.exp() * hidden.unsqueeze(1)


class Stage(nn.Module):
    """Layers in turn. In slices, `past` has what this stage returned for each earlier slice; a recurrent layer needs the last."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, past: tuple[Any, ...] | None = None) -> Any:
        states = []
        for place, layer in enumerate(self.layers):
            x, state = layer(x, past[-1][place] if past else None)
            states.append(state)
        return x if past is None else (x, states)


def build_stage(rank: int) -> nn.Module:
    """Return a stage: one of LSTMs and one of selective layers, in turn."""
    torch.manual_seed(rank)
    kind = Selective if rank % 2 else Recurrent
    return Stage(kind(), kind()).double()


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sequences, and the mean of all positions up to each."""
    x = torch.randn(BATCH, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(step)).double().to(device)
    return x, x.cumsum(1) / torch.arange(1, POSITIONS + 1, device=device)[:, None]


if __name__ == "__main__":
    main()
