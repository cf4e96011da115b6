"""Run README's loop over four processes, with nothing installed but bpipe and what it brings: `python readme_loop.py README.md`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

NUM_RANKS = 4


def changed(text: str, sign: str) -> str:
    """The program before (-) or after (+) the change that README shows."""
    diff = text.partition("```diff\n")[2].partition("```")[0].splitlines()
    return "\n".join(line[1:] for line in diff if line[:1] in ("", " ", sign))


def trained(rank: int, program: str) -> dict[str, Any]:
    """What a rank has after the loop, by name."""
    torch.manual_seed(rank)
    names: dict[str, Any] = {"rank": rank, "device": torch.device("cpu"), "loss_fn": nn.functional.mse_loss, "torch": torch}
    names["part"] = nn.Linear(4, 4)
    names["loader"] = [(torch.ones(8, 4) * i, torch.zeros(8, 4)) for i in range(3)]
    exec(program, names)
    return names


def run(rank: int, program: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    names = trained(rank, program)
    assert all(bool(parameter.isfinite().all()) for parameter in names["part"].parameters())
    names["schedule"].close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (changed(Path(sys.argv[1]).read_text(encoding="utf-8"), "+"), f"{folder}/store"), nprocs=NUM_RANKS)
    print(f"README's loop ran over {NUM_RANKS} processes with torch", torch.__version__)
