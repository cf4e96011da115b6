"""Go on from a distributed checkpoint, over another number of stages: start it again and again, with as many as you like.

    torchrun --nproc-per-node 4 examples/resume.py
    torchrun --nproc-per-node 2 examples/resume.py

Each layer has the name that it has in the whole model, so any number of stages finds its tensors. The second run goes on
with the very bits that the first one would have gone on with.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import bpipe

FOLDER = Path("runs/resume")
NUM_LAYERS, WIDTH, NUM_STEPS = 8, 64, 20


def main() -> None:
    """Train for some steps from where the last run has stopped, and save."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = build_stage(rank, num_ranks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    # bpipe: what DCP saves and loads; anything else that a run needs may stand beside it.
    state = {**bpipe.training_state(module, optimizer), "step": 0}
    if (folder := latest()) is not None:
        dcp.load(state, checkpoint_id=folder)

    stage = bpipe.PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    first_step = state["step"]
    for state["step"] in range(first_step + 1, first_step + NUM_STEPS + 1):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(state["step"]))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, target=x.cumsum(1).tanh(), losses=losses, return_outputs=False)
        optimizer.step()
        loss = bpipe.share_loss(losses)  # every rank has it
        if rank == 0 and state["step"] % 5 == 0:
            print(f"step {state['step']} over {num_ranks} stages  loss {loss:.6f}", flush=True)

    folder = FOLDER / f"step-{state['step']:06}"
    dcp.save(state, checkpoint_id=folder)
    if rank == 0:
        print(f"saved as {folder}: run it again, with another --nproc-per-node", flush=True)
    schedule.close()
    dist.destroy_process_group()


def latest() -> Path | None:
    """Return the newest checkpoint that is whole: its .metadata is written last."""
    whole = sorted(FOLDER.glob("step-*/.metadata"))
    return whole[-1].parent if whole else None


def build_stage(stage: int, num_stages: int) -> nn.Sequential:
    """Return one stage's layers under the whole model's names: "0", "1" and so on, not each stage's own from zero."""
    torch.manual_seed(0)
    layers = [(str(index), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for index in range(NUM_LAYERS)]
    return nn.Sequential(OrderedDict(layers[NUM_LAYERS * stage // num_stages : NUM_LAYERS * (stage + 1) // num_stages]))


if __name__ == "__main__":
    main()
