"""Stages that are sharded over replicas (FSDP2, 2 x 2): the same functions, over the pipeline's group.

Both replicas get the same batch: the mean of two equal gradients is exact, so that a sharded run has the bits of another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import bpipe
from tests.ranks import run_ranks
from tests.training.language import BOUND, LanguageModel, Pipeline, assert_equal, backward_of, cross_entropy, train_alone
from tests.training.test_checkpoint import state_of, told

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES, REPLICAS = 2, 2
BEFORE, AFTER = range(2), range(2, 4)


def sharded(mesh: Any, **options: Any) -> Pipeline:
    """A rank of one of two pipelines whose stages are sharded over both."""
    from torch.distributed.fsdp import fully_shard

    def shard(module: nn.Module) -> None:
        for block in module.blocks.values():
            fully_shard(block, mesh=mesh["replica"])
        fully_shard(module, mesh=mesh["replica"])

    rank, group = mesh["stage"].get_local_rank(), mesh["stage"].get_group()
    return Pipeline(rank, STAGES, schedule=bpipe.OneFOneB, group=group, shard=shard, **options)


def scaled(mesh: Any) -> list[Any]:
    """An overflow in the shard of one replica of one stage; the course of the scale, and whether weights changed."""
    scaler = bpipe.GradScaler("cpu", init_scale=8.0, group=mesh["stage"])
    pipeline = sharded(mesh, loss_fn=lambda y, target: scaler.scale(cross_entropy(y, target)))
    seen = []
    for step in range(3):
        pipeline.optimizer.zero_grad()
        pipeline.backward(step)
        before = pipeline.values()
        if step == 1 and mesh.get_rank() == STAGES:  # the second replica of the first stage
            pipeline.modules[0].embedding.weight.grad.to_local()[-1, -1] = float("inf")
        scaler.step(pipeline.optimizer)
        scaler.update()
        is_changed = any(not torch.equal(value, before[name]) for name, value in pipeline.values().items())
        seen.append((scaler.get_scale(), is_changed))
    return seen


def tied(mesh: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The embedding's and the head's copies of a matrix, in shards of unequal size."""
    pipeline = sharded(mesh)
    (stage, module), *_ = pipeline.modules.items()
    end = module.head if stage else module.embedding
    copies = bpipe.TiedWeights({"embedding.weight": end.weight}, group=mesh["stage"])
    copies.broadcast()
    pipeline.backward(0)
    own = end.weight.grad.full_tensor().clone()
    copies.sum_grads()
    return [own, end.weight.grad.full_tensor()], pipeline.values()


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """In one start of the processes: what FSDP2 imports takes each of them seconds."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("replica", "stage"))
    found: dict[str, Any] = {"clipped": sharded(mesh).train(BEFORE)}
    pipeline = sharded(mesh)
    pipeline.backward(0)
    found["gradients"] = pipeline.gradients()
    found["of all"] = told(lambda: bpipe.clip_grad_norm_(pipeline.modules[rank % STAGES].parameters(), 1.0))
    found["of a mesh"] = told(lambda: bpipe.share_loss([], group=mesh))
    found["norms"] = [
        bpipe.clip_grad_norm_(pipeline.modules[rank % STAGES].parameters(), 1e9, order, group=mesh["stage"])
        for order in (2.0, 1.0, float("inf"))
    ]
    found["scaled"], found["tied"] = scaled(mesh), tied(mesh)

    pipeline = sharded(mesh)
    pipeline.train(BEFORE, clips=False)
    dcp.save(state_of(pipeline), checkpoint_id=folder / "sharded")
    found["went on"] = pipeline.train(AFTER, clips=False), pipeline.values()
    again = sharded(mesh)
    dcp.load(state_of(again), checkpoint_id=folder / "sharded")
    found["resumed"] = again.train(AFTER, clips=False), again.values()
    plain = Pipeline(rank, 4)
    dcp.load(state_of(plain), checkpoint_id=folder / "sharded")
    found["resumed plain"] = plain.train(AFTER, clips=False), plain.values()
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    ranks = run_ranks(everything, STAGES * REPLICAS, tmp_path_factory.mktemp("sharded"))
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


def test_clipping(seen: dict[str, list[Any]]) -> None:
    """Equal on all ranks to the bit; shards' norms are added up in another order than a whole gradient's."""
    expected = list(train_alone(LanguageModel(), BEFORE))
    assert all(
        torch.equal(ours, first)
        for of_rank in seen["clipped"]
        for (_, ours), (_, first) in zip(of_rank, seen["clipped"][0], strict=True)
    )
    for (loss, norm), (loss_alone, norm_alone) in zip(seen["clipped"][0], expected, strict=True):
        assert norm > BOUND
        torch.testing.assert_close(norm, norm_alone, rtol=1e-6, atol=0)
        torch.testing.assert_close(loss, loss_alone, rtol=1e-6, atol=0)


def test_norms(seen: dict[str, list[Any]]) -> None:
    whole = LanguageModel()
    backward_of(whole, 0)
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert_equal({name: value for part in seen["gradients"] for name, value in part.items()}, gradients)
    for of_rank in seen["norms"]:
        for order, norm in zip((2.0, 1.0, float("inf")), of_rank, strict=True):
            torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients.values(), order), rtol=1e-6, atol=0)
        assert all(map(torch.equal, of_rank, seen["norms"][0]))


def test_the_group_of_all_replicas_is_refused(seen: dict[str, list[Any]]) -> None:
    """It would count each shard's gradient once more for each replica."""
    for rank, text in enumerate(seen["of all"]):
        ranks = [rank % 2, rank % 2 + 2]
        assert text.startswith(f"ConfigurationError: gradients are sharded over ranks {ranks}, of which the group [0, 1, 2, 3]")
    assert all(text.startswith("ConfigurationError: a mesh of 2 dimensions") for text in seen["of a mesh"])


def test_an_overflow_in_one_shard_skips_the_step_everywhere(seen: dict[str, list[Any]]) -> None:
    assert seen["scaled"] == [[(8.0, True), (4.0, False), (4.0, True)]] * 4


def test_tied_shards(seen: dict[str, list[Any]]) -> None:
    (of_embedding, total), (of_head, other) = seen["tied"][0][0], seen["tied"][1][0]
    assert torch.equal(total, of_embedding + of_head) and torch.equal(total, other)
    assert not torch.equal(of_embedding, of_head)
    assert torch.equal(seen["tied"][0][1]["embedding.weight"], seen["tied"][1][1]["head.weight"])


def test_checkpoints(seen: dict[str, list[Any]]) -> None:
    """Saved sharded over two stages, and resumed so, and over four whole ones."""
    losses, expected = seen["went on"][0][0], {name: value for _, part in seen["went on"] for name, value in part.items()}
    for way in ("resumed", "resumed plain"):
        assert all(of_rank[0] == losses for of_rank in seen[way])
        assert_equal({name: value for _, part in seen[way] for name, value in part.items()}, expected)
