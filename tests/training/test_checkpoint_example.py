"""What examples/checkpoint.py promises: whatever interrupts a save, there is a whole checkpoint, the old one or the new one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.training.language import Pipeline, assert_equal


class InterruptedSaveError(Exception):
    pass


def interrupting(save: Callable[..., Any], *, is_at_the_end: bool) -> Callable[..., None]:
    """As if the processes were killed while DCP writes, or before `latest.json` is."""

    def interrupted(state: Any, *, checkpoint_id: Path) -> None:
        if is_at_the_end:
            save(state, checkpoint_id=checkpoint_id)
        elif dist.get_rank() == 0:
            checkpoint_id.mkdir()
            (checkpoint_id / "__0_0.distcp").write_bytes(b"a half")
        raise InterruptedSaveError

    return interrupted


def interrupted_saves(rank: int, folder: Path) -> list[tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Save thrice, then what is loaded after two saves that do not end, and after one more that does."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    checkpoint = importlib.import_module("checkpoint")
    pipeline, found = Pipeline(rank, 2), []
    (module,) = pipeline.modules.values()
    for step in range(3):
        pipeline.train([step])
        checkpoint.save(folder, module, pipeline.optimizer, {"step": step})
    whole, saved = checkpoint.dcp.save, pipeline.values()
    for step, is_at_the_end in ((3, True), (4, False)):
        pipeline.train([step])
        checkpoint.dcp.save = interrupting(whole, is_at_the_end=is_at_the_end)
        try:
            checkpoint.save(folder, module, pipeline.optimizer, {"step": step})
        except InterruptedSaveError:
            dist.barrier()
        found.append((checkpoint.load(folder, module, pipeline.optimizer), pipeline.values(), saved))
    checkpoint.dcp.save = whole
    pipeline.train([5])
    checkpoint.save(folder, module, pipeline.optimizer, {"step": 5})
    saved = pipeline.values()
    pipeline.train([6])
    found.append((checkpoint.load(folder, module, pipeline.optimizer), pipeline.values(), saved))
    return found


def test_an_interrupted_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    for of_rank in run_ranks(interrupted_saves, 2, tmp_path):
        assert [about["step"] for about, _, _ in of_rank] == [2, 2, 5]
        for about, values, saved in of_rank:
            assert about["num_stages"] == 2
            assert_equal(values, saved)
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 5
