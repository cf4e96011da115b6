"""What the example shows: local learning is as accurate as backpropagation, but for a point."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EPOCHS, SEEDS = 10, 3


def learn(rank: int) -> dict[str, float]:
    """The mean accuracy after the last epoch, of both ways to learn."""
    sys.path.insert(0, str(EXAMPLES))
    from local_learning import COLORS
    from local_learning import learn as learn_by

    device = torch.device("cpu")
    return {name: sum(learn_by(name, seed, EPOCHS, device)[-1] for seed in range(SEEDS)) / SEEDS for name in COLORS}


def test_digits() -> None:
    found = run_ranks(learn, 4, timeout_s=300)
    assert all(one == found[0] for one in found)
    by_backpropagation, locally = found[0].values()
    assert min(by_backpropagation, locally) > 0.96
    assert locally > by_backpropagation - 0.01
