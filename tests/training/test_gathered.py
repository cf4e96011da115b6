"""Weights that FSDP2 has gathered between two steps: what bpipe does there means the sharded ones, which are trained.

All replicas get the same batch, so that a sharded run has the numbers of a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import bpipe
from bpipe.errors import BPipeError
from bpipe.torch_private.fsdp_states import groups_of
from tests.ranks import run_ranks
from tests.training.language import LanguageModel, Pipeline, assert_equal, backward_of, train_alone, words_of
from tests.training.test_checkpoint import state_of, told

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES, REPLICAS, STEPS = 2, 2, 2


def sharded(mesh: Any, schedule: type[bpipe.Schedule] = bpipe.OneFOneB, **options: Any) -> Pipeline:
    """A rank of one of the pipelines, whose stages are sharded over all of them."""
    from torch.distributed.fsdp import fully_shard

    def shard(module: nn.Module) -> None:
        for block in module.blocks.values():
            fully_shard(block, mesh=mesh["replica"], **options)
        fully_shard(module, mesh=mesh["replica"], **options)

    size, rank, group = mesh["stage"].size(), mesh["stage"].get_local_rank(), mesh["stage"].get_group()
    return Pipeline(rank, size, 2 * size if schedule is bpipe.BreadthFirst else size, schedule, group=group, shard=shard)


def evaluated(pipeline: Pipeline) -> None:
    x, target = words_of(7)
    pipeline.schedule.eval(x, target=target, return_outputs=False)


def own_forward(pipeline: Pipeline) -> None:
    """The user's, such as one for a figure: FSDP keeps the outermost module's weights after it."""
    with torch.no_grad():
        for index, module in pipeline.modules.items():
            words = words_of(7)[0]
            module(words if index == 0 else torch.zeros(*words.shape, 32))


def by_hand(pipeline: Pipeline) -> None:
    for module in pipeline.modules.values():
        module.unshard()


def kept_after_backward(pipeline: Pipeline) -> None:
    for module in pipeline.modules.values():
        module.set_reshard_after_backward(False)


USERS = (own_forward, by_hand, kept_after_backward)


def units_of(pipeline: Pipeline) -> list[Any]:
    return [one for module in pipeline.modules.values() for one in module.modules() if hasattr(one, "_get_fsdp_state")]


def num_gathered(pipeline: Pipeline) -> int:
    return sum(not group.is_sharded for unit in units_of(pipeline) for group in groups_of(unit))


def free(pipeline: Pipeline) -> None:
    for unit in units_of(pipeline):
        unit.reshard()


def trained(mesh: Any, between: Callable[[Pipeline], None], *args: Any, **options: Any) -> dict[str, Any]:
    """Do something between a step and the clipping, before the optimizer's step and after it; what training saw."""
    pipeline, seen = sharded(mesh, *args, **options), []
    for step in range(STEPS):
        pipeline.optimizer.zero_grad()
        loss = pipeline.backward(step)
        between(pipeline)
        seen.append((loss, pipeline.clip()))
        if between in USERS:  # as FSDP2 asks of them, whose weights would be those of before
            free(pipeline)
        pipeline.optimizer.step()
    between(pipeline)
    return {"seen": seen, "left": num_gathered(pipeline), "state": told(lambda: state_of(pipeline))}


def failing_eval(mesh: Any) -> int:
    """The head raises: what was gathered until then is free again."""
    pipeline = sharded(mesh)
    for module in pipeline.modules.values():
        module.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises((ZeroDivisionError, BPipeError)):
        evaluated(pipeline)
    return num_gathered(pipeline)


def kept_by_the_user(mesh: Any) -> tuple[int, int]:
    """What the user has gathered stays for further evaluations."""
    pipeline = sharded(mesh)
    evaluated(pipeline)
    by_hand(pipeline)
    before = num_gathered(pipeline)
    evaluated(pipeline)
    return before, num_gathered(pipeline)


def tied(mesh: Any) -> dict[str, Any]:
    """Copies that are given as they are gathered, and get their first value then."""
    pipeline = sharded(mesh)
    evaluated(pipeline)
    by_hand(pipeline)
    (stage, module), *_ = pipeline.modules.items()
    end = module.head if stage else module.embedding
    copies = bpipe.TiedWeights({"w": end.weight}, group=mesh["stage"])
    copies.broadcast()
    module.unshard()  # again where it was freed, as its value has changed
    values = end.weight.detach().clone()
    module.reshard()
    pipeline.backward(0)
    by_hand(pipeline)
    clips = {
        "without a sum": told(lambda: pipeline.clip()),
        "without copies": (copies.sum_grads(), told(lambda: pipeline.clip()))[1],
        "norm": pipeline.clip(copies=[end.weight] if stage else ()),
    }
    return {"values": values, **clips}


def not_reduced(mesh: Any) -> list[Any]:
    """Two steps accumulate, of which the first does not reduce."""
    pipeline = sharded(mesh)
    seen: list[Any] = []
    for is_last in (False, True):
        for module in pipeline.modules.values():
            module.set_requires_gradient_sync(is_last)
        pipeline.backward(int(is_last))
        seen.append(told(pipeline.clip) if not is_last else pipeline.clip())
    return seen


def not_reduced_over_copies(mesh: Any, group: Any) -> list[Any]:
    """Sharded over two ranks, and copied over two: the sums over shards wait for those over copies."""
    from torch.distributed.fsdp import fully_shard

    module, seen = Scales(is_wide=True), []
    fully_shard(module, mesh=mesh)
    for is_last in (False, True):
        module.set_requires_all_reduce(is_last)
        module(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        clip = partial(bpipe.clip_grad_norm_, list(module.parameters()), 1e9, group=group)
        seen.append(clip() if is_last else told(clip))
    return seen


class Scales(nn.Module):
    """Three numbers and one: of a shard over two ranks, one has two or none."""

    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.more = nn.Parameter(torch.ones(3)) if is_wide else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x if self.more is None else x * self.more)


def of_empty_shards(mesh: Any, *, is_wide: bool) -> dict[float, Any]:
    from torch.distributed.fsdp import fully_shard

    stage, module = mesh["stage"].get_local_rank(), Scales(is_wide=is_wide)
    fully_shard(module, mesh=mesh["replica"])
    module(torch.tensor([1.0, 2.0, 3.0]) + stage).sum().backward()
    found: dict[float, Any] = {}
    for order in (2.0, float("inf"), float("-inf"), -1.0):
        try:
            found[order] = bpipe.clip_grad_norm_(module.parameters(), 1e9, order, group=mesh["stage"])
        except BPipeError as error:
            found[order] = f"{type(error).__name__}: {error}"
    return found


def resumed(mesh: Any, folder: Path) -> tuple[Any, Any]:
    """Saved and loaded while weights are gathered."""
    pipeline = sharded(mesh)
    pipeline.train([0])
    own_forward(pipeline)
    dcp.save(state_of(pipeline), checkpoint_id=folder)
    free(pipeline)
    again = sharded(mesh)
    own_forward(again)
    dcp.load(state_of(again), checkpoint_id=folder)
    return (pipeline.train([1]), pipeline.values()), (again.train([1]), again.values())


def optimizer_of_gathered(mesh: Any) -> str:
    pipeline = sharded(mesh)
    own_forward(pipeline)
    pipeline.optimizer = torch.optim.SGD([p for module in pipeline.modules.values() for p in module.parameters()], lr=0.1)
    return told(lambda: state_of(pipeline))


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """In one start of the processes: what FSDP2 imports takes each of them seconds."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("replica", "stage"))
    wide = init_device_mesh("cpu", (REPLICAS * STAGES, 1), mesh_dim_names=("replica", "stage"))
    return {
        "eval": trained(mesh, evaluated),
        "eval, kept after forward": trained(mesh, evaluated, reshard_after_forward=False),
        "eval, sharded over fewer": trained(wide, evaluated, reshard_after_forward=2),
        "eval, in the plan": trained(mesh, evaluated, bpipe.BreadthFirst),
        **{one.__name__: trained(mesh, one) for one in USERS},
        "own forward, sharded over fewer": trained(wide, own_forward, reshard_after_forward=2),
        "failing eval": failing_eval(mesh),
        "kept by the user": kept_by_the_user(mesh),
        "tied": tied(mesh),
        "not reduced": not_reduced(mesh),
        "not reduced over copies": not_reduced_over_copies(mesh, wide["stage"]),
        "empty": [of_empty_shards(mesh, is_wide=is_wide) for is_wide in (False, True)],
        "resumed": resumed(mesh, folder),
        "optimizer of gathered": optimizer_of_gathered(mesh),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    ranks = run_ranks(everything, STAGES * REPLICAS, tmp_path_factory.mktemp("gathered"))
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


EVALS = ("eval", "eval, kept after forward", "eval, sharded over fewer", "eval, in the plan")
OTHERS = (*(one.__name__ for one in USERS), "own forward, sharded over fewer")


@pytest.mark.parametrize("name", [*EVALS, *OTHERS])
def test_training_goes_on_as_a_single_process(seen: dict[str, list[Any]], name: str) -> None:
    """The norms count all gradients, the next loss is that of the new weights, and an optimizer's parameters are found."""
    expected = list(train_alone(LanguageModel(), range(STEPS)))
    for of_rank in seen[name]:
        torch.testing.assert_close(of_rank["seen"], expected, rtol=1e-5, atol=0)
        assert of_rank["state"] == "nothing"
        assert (of_rank["left"] == 0) == (name in EVALS or name == "kept_after_backward")


def test_eval_frees_what_it_gathers_and_nothing_else(seen: dict[str, list[Any]]) -> None:
    assert seen["failing eval"] == [0] * 4
    assert all(before == after > 0 for before, after in seen["kept by the user"])


def test_tied_weights_are_the_sharded_ones(seen: dict[str, list[Any]]) -> None:
    whole = LanguageModel()
    value = whole.embedding.weight.detach().clone()
    whole.head.weight.data = value.clone()
    backward_of(whole, 0)
    total = whole.embedding.weight.grad + whole.head.weight.grad
    gradients = [total, *(p.grad for name, p in whole.named_parameters() if name not in ("embedding.weight", "head.weight"))]
    for rank, of_rank in enumerate(seen["tied"]):
        assert torch.equal(of_rank["values"], value)
        torch.testing.assert_close(of_rank["norm"], torch.nn.utils.get_total_norm(gradients), rtol=1e-5, atol=0)
        assert of_rank["without a sum"].startswith("ConfigurationError: ") and "'w'" in seen["tied"][rank // 2 * 2]["without a sum"]
        text = f"rank {rank // 2 * 2} counts 'w'" if rank % 2 else "rank 1 of the group cannot clip: it says why"
        assert of_rank["without copies"].startswith(f"ConfigurationError: {text}")


def test_gradients_that_are_not_reduced_are_no_gradients_yet(seen: dict[str, list[Any]]) -> None:
    whole = LanguageModel()
    backward_of(whole, 0)
    backward_of(whole, 1)
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    for refused, norm in seen["not reduced"]:
        assert refused.startswith("ConfigurationError: FSDP2 keeps gradients that are not reduced over the replicas yet")
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


def test_gradients_that_are_not_reduced_over_copies_neither(seen: dict[str, list[Any]]) -> None:
    module = Scales(is_wide=True)
    (2 * module(torch.tensor([1.0, 2.0, 3.0])).sum()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
    for refused, norm in seen["not reduced over copies"]:
        assert refused.startswith("ConfigurationError: FSDP2 keeps gradients that are not reduced over the replicas yet")
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_wide", [False, True])
def test_ranks_with_empty_shards_take_part(seen: dict[str, list[Any]], is_wide: bool) -> None:
    """Torch's own leaves the others waiting for them in an infinite norm."""
    gradients = []
    for stage in range(STAGES):
        module = Scales(is_wide=is_wide)
        module(torch.tensor([1.0, 2.0, 3.0]) + stage).sum().backward()
        gradients += [p.grad for p in module.parameters()]
    for of_rank in seen["empty"]:
        found = of_rank[is_wide]
        for order in (2.0, float("inf"), float("-inf")):
            torch.testing.assert_close(found[order], torch.nn.utils.get_total_norm(gradients, order), rtol=1e-6, atol=0)
        assert found[-1.0].startswith("ConfigurationError: torch has no norm of order -1.0 of the gradients: ")


def test_checkpoints(seen: dict[str, list[Any]]) -> None:
    for (losses, values), (losses_again, values_again) in seen["resumed"]:
        assert [loss for loss, _ in losses] == [loss for loss, _ in losses_again]
        assert_equal(values, values_again)


def test_an_optimizer_of_gathered_weights_is_refused(seen: dict[str, list[Any]]) -> None:
    text = "ConfigurationError: the optimizer has weights that FSDP2 had gathered when it was made"
    assert all(told.startswith(text) for told in seen["optimizer of gathered"])
