"""The norm and the overflow of weights that ranks have in different groups: as in one process that has all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bpipe
from bpipe.errors import BPipeError
from tests.ranks import run_ranks


def _weight(number: int, size: int = 4) -> nn.Parameter:
    """A weight whose gradient is its number, everywhere."""
    weight = nn.Parameter(torch.zeros(size))
    weight.grad = torch.full((size,), float(number))
    return weight


def _norm_of(*numbers: int, size: int = 4) -> float:
    return float(torch.linalg.vector_norm(torch.cat([torch.full((size,), float(n)) for n in numbers])))


def _error(work: Callable[[], Any]) -> str:
    try:
        work()
    except BPipeError as error:
        return str(error)
    return ""


def _norms(rank: int) -> dict[str, tuple[float, float]]:
    """For each way to have weights of one's own: the norm that was found, and the right one."""
    found: dict[str, tuple[float, float]] = {}
    ep_pp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
    ep, pp = ep_pp["ep"].get_local_rank(), ep_pp["pp"].get_local_rank()
    groups: dict[str, Any] = {"group": ep_pp["pp"], "replicas": ep_pp["ep"]}

    shared, mine = _weight(1 + pp), _weight(10 + rank)
    norm = bpipe.clip_grad_norm_([shared, mine], 1.0, own=[mine], **groups)
    found["an expert on every rank"] = norm.item(), _norm_of(1, 2, 10, 11, 12, 13)

    # Only one replica of one stage has an expert at all, such as a shared one that the others lack.
    shared, own = _weight(1 + pp), [_weight(7)] if rank == 3 else []
    norm = bpipe.clip_grad_norm_([shared, *own], 1.0, own=own, **groups)
    found["one replica of one stage alone"] = norm.item(), _norm_of(1, 2, 7)

    # Experts that got no token in this step have no gradient on one replica.
    shared, mine = _weight(1 + pp), _weight(5)
    if ep == 1:
        mine.grad = None
    norm = bpipe.clip_grad_norm_([shared, mine], 1.0, own=[mine], **groups)
    found["an expert without tokens"] = norm.item(), _norm_of(1, 2, 5, 5)

    # Everything is a replica's own: nothing is shared.
    mine = _weight(2 + rank)
    norm = bpipe.clip_grad_norm_([mine], 1.0, own=[mine], **groups)
    found["nothing is shared"] = norm.item(), _norm_of(2, 3, 4, 5)

    # A stage that is frozen on all replicas, and experts in the largest norm.
    shared, mine = _weight(1), _weight(3 + rank)
    norm = bpipe.clip_grad_norm_([shared, mine] if pp else [], 1.0, "inf", own=[mine] if pp else [], **groups)
    found["the largest of one stage"] = norm.item(), 6.0

    # A norm for each group of an optimizer, as those who clip experts apart do.
    shared, mine = _weight(1 + pp), _weight(10 + rank)
    first = bpipe.clip_grad_norm_([shared], 1.0, **groups)
    second = bpipe.clip_grad_norm_([mine], 1.0, own=[mine], **groups)
    found["shared ones apart"] = first.item(), _norm_of(1, 2)
    found["experts apart"] = second.item(), _norm_of(10, 11, 12, 13)

    # Two stages on a rank, with experts in one of them, and a parameter that both have.
    both, mine = _weight(1 + pp), _weight(20 + ep)
    norm = bpipe.clip_grad_norm_({pp: [both, mine] if pp else [both], 3 - pp: [both]}, 1.0, own=[mine] if pp else [], **groups)
    found["two stages that share a weight"] = norm.item(), _norm_of(1, 2, 20, 21)

    # DTensors: experts on a mesh of the experts, beside weights that are replicated on it.
    whole = torch.arange(8.0)
    experts = nn.Parameter(distribute_tensor(torch.zeros(8), ep_pp["ep"], [Shard(0)]))
    experts.grad = distribute_tensor(whole + pp, ep_pp["ep"], [Shard(0)])
    copies = nn.Parameter(distribute_tensor(torch.zeros(4), ep_pp["ep"], [Replicate()]))
    copies.grad = distribute_tensor(torch.full((4,), 1.0 + pp), ep_pp["ep"], [Replicate()])
    norm = bpipe.clip_grad_norm_([experts, copies], 1.0, group=ep_pp["pp"])
    right = float(torch.linalg.vector_norm(torch.cat([whole, whole + 1, torch.full((4,), 1.0), torch.full((4,), 2.0)])))
    found["DTensors that are sharded and replicated"] = norm.item(), right

    # fully_shard over the experts' mesh for shared weights alone, with experts that are plain and own.
    torch.manual_seed(pp)
    layer = nn.Linear(4, 4, bias=False)
    right = 2.0 * (4 * 4) ** 0.5  # each of the stages' gradients is 2 everywhere
    fully_shard(layer, mesh=ep_pp["ep"])
    layer(torch.full((1, 4), 2.0)).sum().backward()
    assert isinstance(layer.weight.grad, DTensor)
    mine = _weight(10 + rank)
    norm = bpipe.clip_grad_norm_([layer.weight, mine], 1.0, own=[mine], **groups)
    right = (2 * right**2 + _norm_of(10, 11, 12, 13) ** 2) ** 0.5
    found["plain experts beside sharded weights"] = norm.item(), right

    # A three-dimensional mesh, where replicas of the experts are among the replicas: ep is the dimension along which they differ.
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "pp"))
    shared, mine = _weight(1 + mesh["pp"].get_local_rank()), _weight(10 + rank)
    norm = bpipe.clip_grad_norm_([shared, mine], 1.0, own=[mine], group=mesh["pp"], replicas=mesh["ep"].get_group())
    found["a group of a mesh of three dimensions"] = norm.item(), _norm_of(1, 2, 10, 11, 12, 13)
    return found


def test_the_norm_is_that_of_one_process_that_has_all_weights() -> None:
    """Whichever ranks have a weight to themselves, all clip by one number: the norm over all that there is."""
    ranks = run_ranks(_norms, 4)
    for name, (norm, right) in ranks[0].items():
        assert abs(norm - right) <= 1e-5 * right, name
    assert all(
        {name: norm for name, (norm, _) in one.items()} == {name: norm for name, (norm, _) in ranks[0].items()} for one in ranks
    )


def _overflows(rank: int) -> dict[str, tuple[bool, float]]:
    """For each place of an overflow: whether this rank has stepped, and its scale afterwards."""
    found: dict[str, tuple[bool, float]] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
    groups: dict[str, Any] = {"group": mesh["pp"], "replicas": mesh["ep"]}

    def steps(name: str, gradients: dict[int, float], calls_unscale: bool = True, has_optimizer: bool = True) -> None:
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = torch.full((2,), gradients.get(rank, 1.0))
        scaler = bpipe.GradScaler("cpu", init_scale=8.0, **groups)
        scaler.scale(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], lr=1.0) if has_optimizer else None
        if calls_unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found[name] = bool((weight != 0).any()), scaler.get_scale()

    steps("nowhere", {})
    steps("in an expert of one replica", {3: float("inf")})
    steps("in one replica, without unscale_", {2: float("nan")}, calls_unscale=False)
    steps("on a rank in the corner that no group of the first has", {1: float("inf")})
    steps("opposite signs that cancel in a sum", {0: float("inf"), 2: -float("inf")})
    steps("an overflow where another has no optimizer", {1: float("inf")}, has_optimizer=rank != 2)
    steps("in all of them", dict.fromkeys(range(4), float("nan")))
    return found


def test_an_overflow_anywhere_skips_the_step_everywhere() -> None:
    """Along the stages and along the replicas: all ranks step, or none does, and all go on with one scale."""
    ranks = run_ranks(_overflows, 4)
    for name in ranks[0]:
        stepped = {one[name][0] for one in ranks}
        assert stepped == {name == "nowhere"}, name
        assert {one[name][1] for one in ranks} == {8.0 if name == "nowhere" else 4.0}, name


def _refusals(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
    ep, pp = mesh["ep"].get_local_rank(), mesh["pp"].get_local_rank()
    groups: dict[str, Any] = {"group": mesh["pp"], "replicas": mesh["ep"]}
    found = {}

    def clip(weights: list[nn.Parameter], own: list[nn.Parameter]) -> str:
        return _error(lambda: bpipe.clip_grad_norm_(weights, 1.0, own=own, **groups))

    shared, mine = _weight(1 + pp), _weight(10 + rank)
    found["an expert that nobody has called own"] = clip([shared, mine], [])
    shared, mine = _weight(1 + pp), _weight(10 + rank)
    found["own on one replica alone"] = clip([shared, mine], [mine] if ep else [])
    shared = _weight(1 + pp + (ep if pp else 0))
    found["a shared weight that was not reduced on one stage"] = clip([shared], [])
    shared = _weight(1 + pp, size=4 + ep)
    found["shared weights of different sizes"] = clip([shared], [])
    shared, more = _weight(1 + pp), [_weight(3)] if ep == 0 else []
    found["a weight that only one replica has, and nobody calls own"] = clip([shared, *more], [])
    shared = _weight(1 + pp)
    if ep:
        assert shared.grad is not None
        shared.grad = None
    found["a shared weight without a gradient on one replica"] = clip([shared], [])
    return found


def test_what_replicas_should_share_and_do_not_is_refused_on_all_ranks() -> None:
    """A weight that differs between replicas and is not called `own` is found, whichever way it differs, and no rank goes on."""
    ranks = run_ranks(_refusals, 4)
    for name in ranks[0]:
        assert all(one[name] for one in ranks), name


def _one_group(rank: int) -> tuple[float, bool]:
    """DistributedDataParallel over two replicas of one stage each: the norm is that of one of them."""
    replicas = dist.new_group([0, 1])
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(nn.Linear(4, 4, bias=False), process_group=replicas)
    module(torch.full((1, 4), 1.0 + rank)).sum().backward()
    alone = [dist.new_group([one]) for one in range(2)][rank]
    norm = bpipe.clip_grad_norm_(module.parameters(), 100.0, group=alone, replicas=replicas)
    return norm.item(), True


def test_replicas_under_ddp_count_once() -> None:
    """Gradients that DDP has averaged are equal on the replicas, and their norm counts once."""
    for norm, _ in run_ranks(_one_group, 2):
        assert abs(norm - 1.5 * 4) < 1e-5
