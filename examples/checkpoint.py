"""Save and resume with torch.distributed.checkpoint, over the same number of stages or another.

Tensors are found by their names in the whole model, which every stage keeps. `latest.json` names the folder that holds a
whole checkpoint and is renamed into place once every rank has written, so a run killed at any moment leaves either the
old checkpoint or the new one. The two folders, a and b, take turns.

    checkpoint/latest.json       {"folder": "a", "num_stages": 4, "step": 80, ...}
    checkpoint/a/.metadata       the tensors by name: model.<name>, optimizer.state.<name>.exp_avg ..., and where each is
    checkpoint/a/__0_0.distcp    what rank 0 has written
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from files import write_json
from torch import nn
from torch.optim import Optimizer

import bpipe

__all__ = ["load", "save"]


def save(folder: Path, module: nn.Module, optimizer: Optimizer, about: dict[str, Any]) -> None:
    """Write a checkpoint and `about`, a dict for JSON that describes it. Collective."""
    target = "b" if _latest(folder).get("folder") == "a" else "a"
    if dist.get_rank() == 0:
        shutil.rmtree(folder / target, ignore_errors=True)  # of the last checkpoint but one, perhaps of more ranks
    dist.barrier()
    dcp.save(bpipe.training_state(module, optimizer), checkpoint_id=folder / target)
    if dist.get_rank() == 0:
        write_json(folder / "latest.json", {**about, "folder": target, "num_stages": dist.get_world_size()})
    dist.barrier()


def load(folder: Path, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Fill this rank's module and optimizer from the latest checkpoint and return its description. Collective.

    Raises:
        FileNotFoundError: there is no whole checkpoint.
    """
    about = _latest(folder)
    if not about:
        raise FileNotFoundError(f"nothing to resume from: {folder / 'latest.json'} is missing")
    dcp.load(bpipe.training_state(module, optimizer), checkpoint_id=folder / about["folder"])
    return about


def _latest(folder: Path) -> dict[str, Any]:
    path = folder / "latest.json"
    return json.loads(path.read_text()) if path.exists() else {}
