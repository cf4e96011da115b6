"""torchtitan's `pipelining_fn`: called as its trainer calls it, over gloo, with a model of its kind that is built on meta."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.torchtitan import pipelining_fn
from tests.dry_run.fake_group import fake_group
from tests.partition.models import Decoder, assert_equal, cross_entropy, taken_gradients, words
from tests.ranks import run_ranks

M, SIZE = 4, 2


class Dims:
    """torchtitan's `ParallelDims`, as far as a pipeline asks it."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._mesh = (
            init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pp",)) if dist.is_initialized() else Mesh(num_ranks, rank)
        )

    def get_mesh(self, names: str | list[str]) -> DeviceMesh | Mesh:
        return self._mesh


class Mesh(SimpleNamespace):
    """A mesh without processes."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        super().__init__(size=lambda: num_ranks, get_local_rank=lambda: rank, get_group=lambda name: None)


def config(**changes: Any) -> SimpleNamespace:
    """torchtitan's `ParallelismConfig` with its defaults."""
    defaults = {
        "module_fqns_per_model_part": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": SIZE,
    }
    return SimpleNamespace(**{**defaults, **changes})


def loss_fn(
    output: torch.Tensor, target: torch.Tensor, global_valid_tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict]:
    """A sum over tokens, divided by those of all microbatches if these are known; and metrics."""
    total = cross_entropy(output, target) * target.numel()
    return (total if global_valid_tokens is None else total / global_valid_tokens), {"metric": 1}


def parallelize(part: nn.Module, **configs: Any) -> nn.Module:
    """As torchtitan's: it may return another module than it got."""
    assert set(configs) == {"parallel_dims", "training", "parallelism", "compile_config", "ac_config", "dump_folder"}
    other = copy.copy(part)
    other.is_parallelized = True
    return other


def call(pipeline: Any, rank: int, num_ranks: int, batch: int = M * SIZE, **changes: Any) -> Any:
    with torch.device("meta"):
        model = Decoder()
    return pipeline(
        model,
        parallel_dims=Dims(num_ranks, rank),
        training=SimpleNamespace(local_batch_size=batch),
        parallelism=config(**changes),
        compile_config=None,
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=SimpleNamespace(layers=[None] * len(model.layers)),
        parallelize_fn=parallelize,
        loss_fn=loss_fn,
    )


def microbatches(seed: int) -> list[torch.Tensor]:
    return list(words(M * SIZE, seed).chunk(M))


def shifts() -> list[torch.Tensor]:
    return list(torch.randn(M * SIZE, 1, 16, generator=torch.Generator().manual_seed(5)).chunk(M))


def trained(rank: int, make: Any, options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """What torchtitan's trainer and validator do around the schedule."""
    schedule, parts, has_first, has_last = call(pipelining_fn(make, **options), rank, dist.get_world_size(), **changes)
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights()
        part.train()
    found: dict[str, Any] = {"losses": [], "has": (has_first, has_last), "parallelized": all(p.is_parallelized for p in parts)}
    valid = torch.tensor(M * SIZE * words(1).shape[1])
    for _ in range(2):
        losses: list[torch.Tensor] | None = [] if has_last else None
        schedule.step(
            arg_mbs=[(x,) for x in microbatches(0)] if has_first else None,
            kwarg_mbs=[{"shift": shift} for shift in shifts()],
            target_mbs=microbatches(1) if has_last else None,
            losses=losses,
            loss_kwargs={"global_valid_tokens": valid},
            return_outputs=False,
        )
    found["losses"], found["without embeddings"] = losses, [part.tok_embeddings is None for part in parts]
    found["gradients"] = taken_gradients(parts)
    for part in parts:
        part.eval()
    with torch.no_grad():
        found["validation"] = [] if has_last else None
        schedule.eval(
            arg_mbs=[(x,) for x in microbatches(0)] if has_first else None,
            kwarg_mbs=[{"shift": shift} for shift in shifts()],
            target_mbs=microbatches(1) if has_last else None,
            losses=found["validation"],
        )
    schedule.close()
    return found


def alone() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The losses of a single process, and its gradients after two steps."""
    model, losses = Decoder(), []
    with torch.no_grad():
        model.init_weights()
    valid = torch.tensor(M * SIZE * words(1).shape[1])
    for _ in range(2):
        for x, y, shift in zip(microbatches(0), microbatches(1), shifts()):
            loss = loss_fn(model(x, shift=shift), y, valid)[0]
            loss.backward()
            losses.append(loss.detach())
    return losses[M:], taken_gradients([model])


@pytest.mark.parametrize(
    ("make", "options", "changes"),
    [
        (bpipe.BalancedOneFOneB, {"options": bpipe.Options(timeout_s=30.0)}, {}),
        (bpipe.OneFOneB, {"balanced": {"budget": "lowest"}}, {"module_fqns_per_model_part": [["tok_embeddings", "layers.0"], [
            *(f"layers.{i}" for i in range(1, 6)), "norm", "lm_head"]]}),
        (bpipe.Interleaved1F1B, {}, {"pipeline_parallel_layers_per_stage": 2}),
        (bpipe.ZBV, {}, {}),
        (bpipe.ZBV, {"auto": {"options": bpipe.Options(effort=0)}}, {}),
    ],
    ids=["balanced", "in bytes, by names", "interleaved", "zbv", "auto"],
)  # fmt: skip
def test_trains_and_validates_as_a_single_process(
    one_thread: None, make: Any, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    losses, gradients = alone()
    ranks = run_ranks(trained, 2, make, options, changes)
    assert_equal(gradients, {name: gradient for rank in ranks for name, gradient in rank["gradients"].items()})
    assert all(rank["parallelized"] for rank in ranks)
    assert [rank["without embeddings"][0] for rank in ranks] == [False, True]  # None is what torchtitan's models look for
    (last,) = (rank for rank in ranks if rank["has"][1])
    assert [rank["has"][0] for rank in ranks] == [True, False]
    assert all(map(torch.equal, losses, last["losses"])) and len(last["losses"]) == M
    total = M * SIZE * words(1).shape[1]
    torch.testing.assert_close(torch.stack(last["validation"]), torch.stack(losses) * total)  # divided and multiplied again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_microbatch_size": 3}, "local_batch_size=8 does not divide by pipeline_parallel_microbatch_size=3"),
        ({"pipeline_parallel_schedule_csv": "a.csv"}, "use bpipe.FromPlan"),
        ({"pipeline_parallel_first_stage_less_layers": 9}, "6 layers do not fill 2 stages, whose ends count 9 and 1 layers"),
        ({"module_fqns_per_model_part": [["tok_embeddings"]]}, "1 stages do not divide over 2 ranks"),
        ({"module_fqns_per_model_part": [["tok_embeddings"], ["norm"]]}, "no stage has lm_head"),
        ({"pipeline_parallel_layers_per_stage": 3}, "3 stages do not divide over 2 ranks"),
        ({"pipeline_parallel_layers_per_stage": 2}, "balanced_1f1b takes one stage per rank"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(pipelining_fn(), 0, 2, **changes)


def test_an_order_is_kept_or_chosen() -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        pipelining_fn(bpipe.ZBV, balanced={}, auto={})
    with pytest.raises(ConfigurationError, match="options= stands in auto=, too: give all of them there"):
        pipelining_fn(bpipe.ZBV, auto={"options": bpipe.Options(effort=0)}, options=bpipe.Options(timeout_s=60.0))


def test_a_model_without_layers_is_cut_by_names_alone() -> None:
    with pytest.raises(ConfigurationError, match="Sequential has no `layers` to cut at: name each stage's modules in"):
        pipelining_fn()(
            nn.Sequential(nn.Linear(2, 2)),
            parallel_dims=Dims(2, 0),
            training=SimpleNamespace(local_batch_size=8),
            parallelism=config(),
            device=torch.device("cpu"),
            parallelize_fn=parallelize,
            loss_fn=loss_fn,
        )


@pytest.mark.parametrize("rank", [1, 3])
def test_a_dry_run(rank: int) -> None:
    """torchtitan's `comm.mode = "fake_backend"`: one process is a rank of a group whose others do not exist."""
    tokens = words(SIZE).shape[1]
    with fake_group(rank, size=4):
        hidden = torch.empty(SIZE, tokens, 16, device="meta")
        schedule, (part,), _, has_last = call(pipelining_fn(bpipe.OneFOneB, input_args=hidden), rank, 4)
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights()
        target = {"target_mbs": list(words(M * SIZE).chunk(M))} if has_last else {}
        output = schedule.step(arg_mbs=[()] * M, kwarg_mbs=[{}] * M, **target)
        assert (output is not None) == has_last and schedule.stats["peak_slots"] == min(M, 4 - rank)
        schedule.close()
