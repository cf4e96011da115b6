"""Trainers of others, in a virtual environment of their own: `make test-trainers`. Elsewhere these tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests import ranks

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}
LOADED = [f"tests.trainers.{name}" for name in ("titan", "gym", "pippy")]  # by the fork server, once: some take ten seconds
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def in_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Call a function, named with its module, in ranks: only they import the trainer."""
    os.environ |= {**OFFLINE, "HF_HOME": str(tmp_path_factory.mktemp("huggingface"))}

    ranks.LOADED += [name for name in LOADED if name not in ranks.LOADED]

    def call(where: str, num_ranks: int, *args: Any, **kwargs: Any) -> list[Any]:
        return ranks.run_ranks(_call, num_ranks, where, args, kwargs, timeout_s=TIMEOUT_S)

    return call


def _call(rank: int, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module, _, function = where.rpartition(".")
    return getattr(import_module(module), function)(rank, *args, **kwargs)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working directory of torchtitan, with a text and a tokenizer."""
    from tests.trainers.assets import write_assets

    folder = tmp_path_factory.mktemp("torchtitan")
    write_assets(folder)
    return folder
