"""Auxiliary heads for the features of common blocks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError, StageError

SHAPES = {"mlp": (3, 8), "transformer": (3, 5, 8), "convolutional": (3, 8, 4, 4)}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("residual", [True, False])
def test_predictions_of_common_features(kind: str, residual: bool) -> None:
    """One for each sample, whatever the microbatch, from all of its features, by a head whose parameters all learn."""
    shape = SHAPES[kind]
    (head,) = bpipe.local_heads([shape], 10, residual=residual)
    x = torch.randn(shape)
    assert head(x).shape == (3, 10)
    assert torch.allclose(head(x)[:1], head(x[:1]), atol=1e-6)
    x.requires_grad_()
    head(x)[:, 0].sum().backward()
    assert x.grad is not None and bool((x.grad != 0).all())
    assert all(p.grad is not None for p in head.parameters())


def test_predictions_for_each_token() -> None:
    (head,) = bpipe.local_heads([SHAPES["transformer"]], 10, per_token=True)
    assert head(torch.zeros(2, 7, 8)).shape == (2, 7, 10)


def test_features_that_are_not_known() -> None:
    for shape in ((8,), (1, 2, 3, 4, 5), (3, 0)):
        with pytest.raises(ConfigurationError, match="no head is known for features of shape"):
            bpipe.local_heads([shape], 10)
    with pytest.raises(ConfigurationError, match="predicts for each token"):
        bpipe.local_heads([SHAPES["mlp"]], 10, per_token=True)
    with pytest.raises(ConfigurationError, match=re.escape("shapes=[32, 64]: give a list with a shape for each head")):
        bpipe.local_heads((32, 64), 10)
    with pytest.raises(ConfigurationError, match="num_classes=0"):
        bpipe.local_heads([SHAPES["mlp"]], 0)


def test_names_in_a_checkpoint() -> None:
    """Blocks with different names can be saved together; the block may be of any kind, with several outputs."""
    block = bpipe.LocalBlock(nn.Linear(2, 2), nn.Linear(2, 3), name=4)
    assert list(block.state_dict()) == ["blocks.4.weight", "blocks.4.bias", "heads.4.weight", "heads.4.bias"]
    assert isinstance(block.block, nn.Linear) and block.head.out_features == 3
    assert bpipe.LocalBlock(Pair(), nn.Bilinear(2, 2, 3))(torch.zeros(1, 2))[1].shape == (1, 3)


def test_a_block_of_another_stage_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = bpipe.split_model(model, [["0"], ["1"]])
    with pytest.raises(ConfigurationError, match="the module is stage 1 of 2 of the model that it was cut from"):
        bpipe.PipelineStage(bpipe.LocalBlock(parts[1], nn.Linear(2, 3)), 0, 2, "cpu")


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x + 1


class Overwriting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_().sum(1)


def test_a_head_that_changes_the_output_is_refused_or_gets_a_copy(one_thread: None) -> None:
    block, x = bpipe.LocalBlock(nn.Linear(3, 3), Overwriting()), torch.randn(5, 3)
    with pytest.raises(StageError, match="changed the block's output in place"):
        block(x)
    expected = block.block(x)
    with torch.inference_mode():
        assert torch.equal(block(x)[0], expected)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x)[0], expected)
    assert torch.equal(compiled(x)[1], expected.relu().sum(1))


def test_a_loss_that_changes_the_output_is_refused() -> None:
    """A prediction may share the memory of the output that the next stage gets."""
    loopback = bpipe.Loopback(2)
    modules = [bpipe.LocalBlock(nn.Linear(3, 3), nn.Flatten()), nn.Linear(3, 3)]

    def loss_fn(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction.sub_(target) ** 2).mean()

    stages = [bpipe.PipelineStage(module, rank, 2, "cpu", loopback.rank(rank)) for rank, module in enumerate(modules)]
    schedules = [bpipe.LocalLearning(stage, 2, loss_fn=loss_fn) for stage in stages]
    with pytest.raises(StageError, match="loss_fn changed the prediction in place"):
        loopback.step(schedules, torch.randn(4, 3), target=torch.ones(4, 3))
