"""Run in an environment that has only bpipe, torch and numpy: balanced training steps give the gradients of plain ones, to the bit.

Given the names of modules that an extra brings, it imports these as well, and uses bpipe's part that needs them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import bpipe
from bpipe.schedules import Costs, build
from bpipe.search.exact import exact
from bpipe.search.job_shop import JobShop
from bpipe.tools.cli import main

P, M, WIDTH, ROWS = 4, 8, 16, 64
BATCH = torch.randn(ROWS * M, WIDTH, generator=torch.Generator().manual_seed(1))


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(P)]


def gradients(kind: type[bpipe.Schedule], lowest: bool = False) -> tuple[list[torch.Tensor], int]:
    """Those of two steps on the loopback, and how many bytes ranks evicted in the second."""
    loopback, modules = bpipe.Loopback(P), stages()
    made = [
        kind(bpipe.PipelineStage(module, i, P, "cpu", group=loopback.rank(i)), M, loss_fn=nn.functional.mse_loss)
        for i, module in enumerate(modules)
    ]
    schedules = [bpipe.Balanced(one, budget="lowest") for one in made] if lowest else made
    for _ in range(2):
        loopback.step(schedules, BATCH, target=BATCH)
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    assert all(gradient is not None for gradient in found)
    return found, sum(schedule.stats["evicted_bytes"] for schedule in schedules)


def train() -> None:
    plain, moved = gradients(bpipe.OneFOneB)
    assert moved == 0
    for kind, lowest in [(bpipe.BalancedOneFOneB, False), (bpipe.OneFOneB, True)]:
        balanced, moved = gradients(kind, lowest)
        assert moved > 0 and all(map(torch.equal, plain, balanced)), kind


def use(modules: list[str]) -> None:
    """What an extra is for, as far as the command line shows it."""
    for name in modules:
        importlib.import_module(name)
    if "matplotlib" in modules:
        assert main(["plot", "1f1b", "-p", "4", "-m", "8", "--out", "timeline.png"]) == 0
        assert Path("timeline.png").read_bytes().startswith(b"\x89PNG")
    if "ortools" in modules:
        shop = JobShop(build("1f1b", num_stages=2, num_microbatches=3), Costs())
        assert exact(shop, limits=[2, 2], first=shop.lanes).step_s == 12.0


def public_names() -> int:
    """How many names there are to import, those for programs of torch.distributed.pipelining included."""
    return len([getattr(bpipe, name) for name in bpipe.__all__])


if __name__ == "__main__":
    assert version("bpipe-torch") == bpipe.__version__
    assert (Path(bpipe.__file__).parent / "py.typed").exists()
    assert main(["env"]) == 0 and main(["show", "balanced_1f1b", "-p", "4", "-m", "8"]) == 0
    train()
    use(sys.argv[1:])
    print(f"works with Python {sys.version.split()[0]}, torch {torch.__version__}: {public_names()} public names")
