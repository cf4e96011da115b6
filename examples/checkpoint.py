"""Save and resume, over the same number of stages or another.

Each rank writes what it trains, by parameter name, to a file of its own. `latest.json` names the folder that holds a
whole checkpoint and is renamed into place once every rank has written, so a run killed at any moment leaves either the
old checkpoint or the new one. The two folders, a and b, take turns.

    checkpoint/latest.json            {"folder": "a", "num_stages": 4, "step": 80, ...}
    checkpoint/a/stage-0-of-4.pt      {"parameters": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, ...}}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from files import whole, write_json
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["load", "save"]

State = dict[str, dict[str, Tensor]]


def save(folder: Path, module: nn.Module, optimizer: Optimizer, about: dict[str, Any]) -> None:
    """Write a checkpoint and what there is to say `about` it, a dict for JSON. Collective."""
    target = "b" if _latest(folder).get("folder") == "a" else "a"
    num_stages = dist.get_world_size()
    with whole(_shard(folder / target, dist.get_rank(), num_stages)) as part:
        torch.save({"parameters": module.state_dict(), "optimizer": _by_name(module, optimizer)}, part)
    dist.barrier()
    if dist.get_rank() == 0:
        write_json(folder / "latest.json", {**about, "folder": target, "num_stages": num_stages})
    dist.barrier()


def load(folder: Path, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Fill this rank's module and optimizer from the latest checkpoint and return what was said about it.

    Raises:
        FileNotFoundError: there is no whole checkpoint.
    """
    about = _latest(folder)
    if not about:
        raise FileNotFoundError(f"nothing to resume from: {folder / 'latest.json'} is missing")
    parameters: dict[str, Tensor] = {}
    states: State = {}
    for shard in _shards(folder / about["folder"], about["num_stages"]):
        parameters |= shard["parameters"]
        states |= shard["optimizer"]
    module.load_state_dict({name: parameters[name] for name in module.state_dict()})
    for name, parameter in module.named_parameters():
        optimizer.state[parameter] = {key: _like(parameter, value) for key, value in states[name].items()}
    return about


def _by_name(module: nn.Module, optimizer: Optimizer) -> State:
    return {name: dict(optimizer.state[parameter]) for name, parameter in module.named_parameters()}


def _shards(folder: Path, num_stages: int) -> Iterator[dict[str, State]]:
    for index in range(num_stages):
        # Mapped, so that of the other stages' bytes nothing is read.
        yield torch.load(_shard(folder, index, num_stages), map_location="cpu", mmap=True, weights_only=True)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Copy a state to its parameter's device, but for counters such as AdamW's step, which stay on the CPU."""
    return value.to(parameter.device if value.dim() else "cpu", copy=True)


def _shard(folder: Path, index: int, num_stages: int) -> Path:
    return folder / f"stage-{index}-of-{num_stages}.pt"


def _latest(folder: Path) -> dict[str, Any]:
    path = folder / "latest.json"
    return json.loads(path.read_text()) if path.exists() else {}
