"""Accelerate's pipelined inference of a Transformers model: with its import changed, bpipe runs it and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("accelerate") is None:
    pytest.skip("accelerate is not installed here: make test-trainers", allow_module_level=True)


@pytest.mark.parametrize("way", ["torch", "import"])
def test_prepare_pippy(in_ranks: Callable[..., list[Any]], way: str) -> None:
    first, last = in_ranks("tests.trainers.pippy.infer", 2, way)
    assert all(rank["class"].startswith("bpipe.") == (way == "import") for rank in (first, last))
    assert first["logits"] is None
    assert torch.equal(last["logits"], last["whole"]) and last["logits"].shape == (4, 8, 64)
