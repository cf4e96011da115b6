"""Weights that only one replica has, such as experts: one norm and one decision for all replicas, as in a single process.

The processes are two replicas of a pipeline of two stages, or four replicas of one stage. Gradients are random, and those of shared
weights are the same on all replicas, as after their reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bpipe
from bpipe.errors import BPipeError
from bpipe.training.pipeline_ranks import Ranks
from bpipe.training.replica_norms import Norm, difference, of_all
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES, REPLICAS, BOUND = 2, 2, 0.5
ORDERS = [2.0, 1.0, 3.0, 0.5, float("inf")]
SHARED, NO_REPLICA = "shared", -1


class Weight:
    """A weight of the model, which some ranks have: its gradient follows from its name."""

    def __init__(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        seed = sum((i + 1) * ord(letter) for i, letter in enumerate(name))
        self.gradient = (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)

    def plain(self) -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros_like(self.gradient))
        parameter.grad = self.gradient.clone()
        return parameter

    def sharded(self, mesh: Any, *placements: Any) -> nn.Parameter:
        from torch.distributed.tensor import distribute_tensor

        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(self.gradient), mesh, placements))
        parameter.grad = distribute_tensor(self.gradient.clone(), mesh, placements)
        return parameter

    def split(self, rank: int, size: int) -> nn.Parameter:
        """A shard that no DTensor knows of, as of tensor parallelism by hand."""
        part = self.gradient.chunk(size)[rank].clone()
        parameter = nn.Parameter(torch.zeros_like(part))
        parameter.grad = part
        return parameter


class Place:
    """A rank's place: its meshes, its stage and its replica."""

    def __init__(self, rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("ep", "pp"))
        self.alone = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("edp", "ep", "pp"))
        self.stage, self.replica = rank % STAGES, rank // STAGES
        self.edp, self.ep = divmod(rank, 2)  # of the second one


def shared(stage: int, **how: Any) -> list[Weight]:
    return [Weight(f"shared {stage} {i}", 3 + i, 4, **how) for i in range(3)]


def experts(stage: int, replica: int, num: int = 2, **how: Any) -> list[Weight]:
    return [Weight(f"expert {stage} {replica} {i}", 5, 2, scale=1 + 4 * replica, **how) for i in range(num)]


def everywhere(kind: Callable[..., list[Weight]], *of: Any) -> list[Weight]:
    """Those of all stages, and for experts of all replicas."""
    return [weight for stage in range(STAGES) for one in of or [()] for weight in kind(stage, *one)]


class Case:
    """What a rank gives to clip_grad_norm_, and the weights of a single process."""

    def __init__(self, parameters: Any, whole: list[Weight], **options: Any) -> None:
        self.parameters, self.whole, self.options = parameters, whole, options

    def listed(self) -> list[nn.Parameter]:
        return [one for part in self.parameters.values() for one in part] if isinstance(self.parameters, dict) else self.parameters


Make = Callable[[Place], Case]
BOTH = [(replica,) for replica in range(REPLICAS)]


def plain_experts(place: Place, *, by_group: bool = False, **how: Any) -> Case:
    of_all, own = [one.plain() for one in shared(place.stage)], [one.plain() for one in experts(place.stage, place.replica, **how)]
    whole = everywhere(shared) + everywhere(partial(experts, **how), *BOTH)
    replicas = place.mesh["ep"].get_group() if by_group else place.mesh["ep"]
    return Case([own[0], *of_all, *own[1:]], whole, own=own, group=place.mesh["pp"], replicas=replicas)


def as_many_as_the_replica_s_number(place: Place) -> Case:
    """Replica 0 has none, and names none."""
    own = [one.plain() for one in experts(place.stage, place.replica, place.replica)]
    of_all = [one.plain() for one in shared(place.stage)]
    whole = everywhere(shared) + everywhere(lambda stage: experts(stage, 1, 1))
    return Case(of_all + own, whole, own=iter(own), group=place.mesh["pp"], replicas=place.mesh["ep"])


def on_one_stage(place: Place) -> Case:
    own = [one.plain() for one in experts(1, place.replica)] if place.stage else []
    of_all = [one.plain() for one in shared(place.stage)]
    whole = everywhere(shared) + [one for replica in range(REPLICAS) for one in experts(1, replica)]
    return Case(of_all + own, whole, own=own, group=place.mesh["pp"], replicas=place.mesh["ep"])


def shards_by_hand(place: Place) -> Case:
    """Tensor parallelism without DTensors: each rank's shards are its own, and its normalisation is not."""
    own = [one.split(place.replica, REPLICAS) for one in experts(place.stage, 0)]
    of_all = [one.plain() for one in shared(place.stage)]
    whole = everywhere(shared) + everywhere(lambda stage: experts(stage, 0))
    return Case(own + of_all, whole, own=own, group=place.mesh["pp"], replicas=place.mesh["ep"])


def nothing_is_shared(place: Place) -> Case:
    own = [one.plain() for one in experts(place.stage, place.replica)]
    return Case(own, everywhere(experts, *BOTH), own=own, group=place.mesh["pp"], replicas=place.mesh["ep"])


def no_gradient_on_one(place: Place) -> Case:
    """An expert that no token went to."""
    case = plain_experts(place)
    own = case.options["own"]
    if place.replica:
        own[0].grad = None
    case.whole = everywhere(shared) + everywhere(lambda stage: experts(stage, 0) + experts(stage, 1)[1:])
    return case


def several_stages_of_a_rank(place: Place) -> Case:
    """A rank with two stages, as a dict of them."""
    stages = (place.stage, 3 - place.stage)
    of_all = {stage: [one.plain() for one in shared(stage)] for stage in stages}
    own = {stage: [one.plain() for one in experts(stage, place.replica)] for stage in stages}
    whole = [one for stage in range(2 * STAGES) for one in shared(stage) + experts(stage, 0) + experts(stage, 1)]
    given = {stage: of_all[stage] + own[stage] for stage in stages}
    every = [one for part in own.values() for one in part]
    return Case(given, whole, own=every, group=place.mesh["pp"], replicas=place.mesh["ep"])


def halves(place: Place) -> Case:
    """Experts in bfloat16 beside weights in float32."""
    return plain_experts(place, dtype=torch.bfloat16)


def beside_sharded_ones(place: Place) -> Case:
    """Shared weights are sharded over the replicas, as FSDP2 does; experts are not."""
    from torch.distributed.tensor import Shard

    of_all = [one.sharded(place.mesh["ep"], Shard(0)) for one in shared(place.stage)]
    own = [one.plain() for one in experts(place.stage, place.replica)]
    whole = everywhere(shared) + everywhere(experts, *BOTH)
    return Case(own + of_all, whole, own=own, group=place.mesh["pp"], replicas=place.mesh["ep"])


def on_an_expert_mesh(place: Place) -> Case:
    """All experts of a layer in one DTensor: nothing is to be said."""
    from torch.distributed.tensor import Shard

    own = [one.sharded(place.mesh["ep"], Shard(0)) for one in experts(place.stage, 0)]
    of_all = [one.plain() for one in shared(place.stage)]
    return Case(of_all + own, everywhere(shared) + everywhere(lambda stage: experts(stage, 0)), group=place.mesh["pp"])


def on_two_meshes(place: Place) -> Case:
    """torchtitan's: experts sharded over the expert mesh and then by FSDP, all others by FSDP over both, and a norm replicated."""
    from torch.distributed.tensor import Replicate, Shard

    both = place.alone["edp", "ep"]
    own = [one.sharded(both, Shard(0), Shard(1)) for one in experts(0, 0)]
    of_all = [one.sharded(both, Shard(0), Shard(0)) for one in shared(0)]
    norm = [one.sharded(place.alone["ep"], Replicate()) for one in shared(1)]
    return Case([*own, *of_all, *norm], experts(0, 0) + shared(0) + shared(1), group=place.alone["pp"])


def sharded_among_their_holders(place: Place) -> Case:
    """An expert on two of four replicas, which FSDP2 shards between them; what is shared, over all four."""
    from torch.distributed.tensor import Shard

    own = [one.sharded(place.alone["edp"], Shard(0)) for one in experts(0, place.ep)]
    of_all = [one.sharded(place.alone["edp", "ep"], Shard(0), Shard(0)) for one in shared(0)]
    whole = shared(0) + experts(0, 0) + experts(0, 1)
    return Case(own + of_all, whole, own=own, group=place.alone["pp"], replicas=place.alone["ep"])


def on_two_of_four(place: Place) -> Case:
    """An expert that two of four replicas have, plainly: the other ones of the expert mesh have others."""
    own, of_all = [one.plain() for one in experts(0, place.ep)], [one.plain() for one in shared(0)]
    whole = shared(0) + experts(0, 0) + experts(0, 1)
    return Case(of_all + own, whole, own=own, group=place.alone["pp"], replicas=place.alone["ep"])


def none_own(place: Place) -> Case:
    """Plain data parallelism, compared."""
    of_all = [one.plain() for one in shared(place.stage)]
    return Case(of_all, everywhere(shared), group=place.mesh["pp"], replicas=place.mesh["ep"])


RIGHT: list[Make] = [
    plain_experts,
    as_many_as_the_replica_s_number,
    on_one_stage,
    shards_by_hand,
    nothing_is_shared,
    no_gradient_on_one,
    several_stages_of_a_rank,
    halves,
    beside_sharded_ones,
    on_an_expert_mesh,
    on_two_meshes,
    sharded_among_their_holders,
    on_two_of_four,
    none_own,
]


def without(make: Make, *names: str) -> Make:
    def changed(place: Place) -> Case:
        case = make(place)
        for name in names:
            del case.options[name]
        return case

    return changed


def with_options(make: Make, **options: Callable[[Place], Any]) -> Make:
    def changed(place: Place) -> Case:
        case = make(place)
        case.options |= {name: option(place) for name, option in options.items()}
        return case

    return changed


def not_reduced(place: Place) -> Case:
    case = none_own(place)
    case.listed()[1].grad *= 1 + place.replica
    return case


def unlike_lists(place: Place) -> Case:
    case = none_own(place)
    del case.parameters[3 - place.replica :]
    return case


def missing_on_one(place: Place) -> Case:
    case = none_own(place)
    case.listed()[0].grad = None if place.replica else case.listed()[0].grad
    return case


def plain_beside_a_mesh(place: Place) -> Case:
    """Experts in DTensors, and weights beside them whose gradients nobody has reduced."""
    case = on_an_expert_mesh(place)
    case.listed()[0].grad *= 1 + place.replica
    return case


DIFFERENT = "have the same stages in two replicas, but not the same gradients"
REFUSED: dict[str, tuple[Make, str]] = {
    "own ones not named": (without(plain_experts, "own"), DIFFERENT),
    "replicas not named": (without(plain_experts, "replicas"), "own= are weights that other replicas do not have: give replicas="),
    "own ones beside sharded ones": (without(beside_sharded_ones, "own", "replicas"), DIFFERENT),
    "own ones sharded among their holders": (without(sharded_among_their_holders, "own", "replicas"), DIFFERENT),
    "not reduced": (not_reduced, DIFFERENT),
    "not reduced, beside a mesh": (plain_beside_a_mesh, DIFFERENT),
    "more on one": (unlike_lists, DIFFERENT),
    "no gradient on one": (missing_on_one, DIFFERENT),
    "the pipeline's own ranks": (
        with_options(plain_experts, replicas=lambda place: place.mesh["pp"]),
        "are in the group and in replicas=",
    ),
    "only some of the own ones": (
        with_options(plain_experts, own=lambda place: []),
        DIFFERENT,
    ),
}


def told(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BPipeError as error:
        return f"{type(error).__name__}: {error}"


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def everything(rank: int) -> dict[str, Any]:
    place, found = Place(rank), dict[str, Any]()
    for make in RIGHT:
        name = make.__name__
        for order in ORDERS:
            case = make(place)
            expected = torch.nn.utils.get_total_norm([one.gradient for one in case.whole], order)
            found[f"{name} {order}"] = bpipe.clip_grad_norm_(case.parameters, BOUND, order, **case.options), expected
        case = make(place)
        before = [None if one.grad is None else full(one.grad) for one in case.listed()]
        bpipe.clip_grad_norm_(case.parameters, BOUND, **case.options)
        found[f"{name} clipped"] = [(was, full(one.grad)) for was, one in zip(before, case.listed()) if was is not None]
    for name, (make, _) in REFUSED.items():
        case = make(place)
        before = [None if one.grad is None else full(one.grad) for one in case.listed()]
        found[name] = told(lambda case=case: bpipe.clip_grad_norm_(case.parameters, BOUND, **case.options))
        assert all(one.grad is None or torch.equal(was, full(one.grad)) for was, one in zip(before, case.listed()))
    case = plain_experts(place)
    if rank == 2:
        case.options["own"][0].grad[0, 0] = float("inf")
    found["overflow"] = bpipe.clip_grad_norm_(case.parameters, BOUND, **case.options)
    found["overflow, refused"] = told(
        lambda: bpipe.clip_grad_norm_(case.parameters, BOUND, error_if_nonfinite=True, **case.options)
    )
    for name in SCALED:
        found[f"scaled {name}"] = scaled(place, name)
    found["trained"] = trained(place)
    return found


# Loss scaling.

Optimizers = list[torch.optim.Optimizer | None]


def of_one(case: Case, **options: Any) -> Optimizers:
    return [torch.optim.SGD(case.listed(), lr=1.0, **options)]


def of_experts_apart(case: Case) -> Optimizers:
    own = case.options["own"]
    return [
        torch.optim.SGD([one for one in case.listed() if all(one is not other for other in own)], lr=1.0),
        torch.optim.SGD(own, lr=1.0),
    ]


SCALED: dict[str, tuple[Make, Callable[[Case], Optimizers]]] = {
    "plain": (plain_experts, of_one),
    "fused": (plain_experts, partial(of_one, fused=True)),
    "two optimizers": (plain_experts, of_experts_apart),
    "own ones alone": (nothing_is_shared, of_one),
    "no optimizer on one stage": (
        plain_experts,
        lambda case: [None] if dist.get_rank() % STAGES else of_one(case),
    ),
    "beside sharded ones, in one optimizer": (without(beside_sharded_ones, "own", "replicas"), of_one),
    "sharded ones": (on_an_expert_mesh, of_one),
    "two meshes": (on_two_meshes, of_one),
    "sharded among their holders": (without(sharded_among_their_holders, "own", "replicas"), of_one),
    "on two of four": (on_two_of_four, of_one),
}


def scaled(place: Place, name: str) -> list[tuple[float, bool]]:
    """An overflow on one replica, then none: the scale after each step, and whether all weights here are as they should be.

    As in torch each optimizer decides by itself: the overflow is in the last one's gradients.
    """
    make, optimizers_of = SCALED[name]
    case, seen = make(place), []
    scaler = bpipe.GradScaler("cpu", init_scale=8.0, group=case.options["group"], replicas=case.options.get("replicas"))
    optimizers = optimizers_of(case)
    of_each = [[p for group in optimizer.param_groups for p in group["params"]] if optimizer else [] for optimizer in optimizers]
    for is_overflow in (True, False):
        for parameter in (parameter for of_one in of_each for parameter in of_one):
            parameter.grad = torch.full_like(parameter, 4.0)
        if is_overflow and dist.get_rank() in ((0, 2) if make is on_two_of_four else (2,)):  # its holders have the same gradient
            grad: Any = next(iter(case.options.get("own") or case.listed())).grad
            (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = float("nan")
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        expected = [(-0.5 if of is not of_each[-1] else 0.0) - (not is_overflow) for of in of_each]
        is_right = all(bool((full(one) == value).all()) for of, value in zip(of_each, expected) for one in of)
        seen.append((scaler.get_scale(), is_right))
    return seen


# A training, in float64: each replica has an expert for its half of the batch.


class Stage(nn.Module):
    """A layer that all replicas have, and the experts of a list of replicas: each gets the samples of its replica."""

    def __init__(self, stage: int, replicas: tuple[int, ...]) -> None:
        super().__init__()
        self.replicas = replicas
        torch.manual_seed(stage)
        self.layer, made = nn.Linear(4, 4), [nn.Linear(4, 4) for _ in range(REPLICAS)]
        self.experts = nn.ModuleList(made[replica] for replica in replicas)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.tanh(self.layer(x)).chunk(len(self.replicas))
        return torch.cat([(1 + 9 * replica) * expert(part) for replica, expert, part in zip(self.replicas, self.experts, parts)])


STEPS = 3


def batch(step: int, replica: int) -> Iterator[Tensor]:
    return iter(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(10 * step + replica), dtype=torch.float64))


def trained(place: Place) -> tuple[list[Tensor], dict[str, Tensor]]:
    module = Stage(place.stage, (place.replica,))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scaler = bpipe.GradScaler("cpu", init_scale=8.0, group=place.mesh["pp"], replicas=place.mesh["ep"])
    stage = bpipe.PipelineStage(module, place.stage, STAGES, "cpu", group=place.mesh["pp"])
    schedule = bpipe.OneFOneB(stage, 2, loss_fn=lambda y, target: scaler.scale(F.mse_loss(y, target)))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, place.replica)
        schedule.step(x, target=y)
        for parameter in module.parameters():
            parameter.grad /= REPLICAS  # the loss is the mean of both replicas'
        for parameter in module.layer.parameters():
            dist.all_reduce(parameter.grad, group=place.mesh["ep"].get_group())
        if step == 1 and dist.get_rank() == 2:
            module.experts[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        norms.append(
            bpipe.clip_grad_norm_(
                module.parameters(), BOUND, own=module.experts.parameters(), group=place.mesh["pp"], replicas=place.mesh["ep"]
            )
        )
        scaler.step(optimizer)
        scaler.update()
    schedule.close()
    return norms, {name: value.detach() for name, value in module.named_parameters()}


def trained_alone() -> tuple[list[Tensor], list[Stage]]:
    modules = [Stage(stage, tuple(range(REPLICAS))) for stage in range(STAGES)]
    whole = nn.Sequential(*modules)
    optimizer, norms = torch.optim.AdamW(whole.parameters(), lr=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        (x0, y0), (x1, y1) = batch(step, 0), batch(step, 1)
        F.mse_loss(whole(torch.cat([x0, x1])), torch.cat([y0, y1])).backward()
        if step == 1:
            norms.append(torch.tensor(float("inf"), dtype=torch.float64))
            continue  # the overflow
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), BOUND))
        optimizer.step()
    return norms, modules


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    ranks = run_ranks(everything, STAGES * REPLICAS)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", RIGHT)
def test_the_norm_is_that_of_a_single_process(seen: dict[str, list[Any]], make: Make, order: float) -> None:
    """Of all replicas' weights, each once; on all ranks of a pipeline and of its replicas to the bit."""
    totals = seen[f"{make.__name__} {order}"]
    for total, expected in totals:
        assert torch.equal(total, totals[0][0])
        torch.testing.assert_close(total, expected, rtol=1e-2 if make is halves else 2e-6, atol=0)


@pytest.mark.parametrize("make", RIGHT)
def test_all_gradients_are_clipped_by_it(seen: dict[str, list[Any]], make: Make) -> None:
    total = seen[f"{make.__name__} 2.0"][0][1]
    for of_rank in seen[f"{make.__name__} clipped"]:
        for before, after in of_rank:
            torch.testing.assert_close(
                after, before * (BOUND / (total + 1e-6)).to(before.dtype), rtol=2e-2 if make is halves else 1e-5, atol=1e-7
            )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decided_is_refused_on_all_ranks(seen: dict[str, list[Any]], name: str) -> None:
    """No gradient is changed; on some ranks the message says that another one, of the same pipeline, has the reason."""
    heard = seen[name]
    assert all(text.startswith("ConfigurationError: ") for text in heard)
    assert all(REFUSED[name][1] in text or "of the group cannot clip: it says why" in text for text in heard)
    assert sum(REFUSED[name][1] in text for text in heard) >= REPLICAS


def test_an_overflow_on_one_replica_is_the_total_of_all(seen: dict[str, list[Any]]) -> None:
    assert all(total.isinf() for total in seen["overflow"])
    assert all(text.startswith("StageError: the total norm of order 2.0 of the gradients is") for text in seen["overflow, refused"])


@pytest.mark.parametrize("name", SCALED)
def test_all_replicas_skip_the_step_or_none(seen: dict[str, list[Any]], name: str) -> None:
    """Also where torch refuses an optimizer: DTensors beside others; or tells the ranks of one mesh alone: of two meshes."""
    assert seen[f"scaled {name}"] == [[(4.0, True), (4.0, True)]] * STAGES * REPLICAS


def test_training_with_experts_is_that_of_a_single_process(seen: dict[str, list[Any]]) -> None:
    """Loss scaling with an overflow in one expert, clipping and AdamW."""
    norms, modules = trained_alone()
    for rank, (found, values) in enumerate(seen["trained"]):
        for one, other in zip(found, norms, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        stage, replica = modules[rank % STAGES], rank // STAGES
        expected = {f"layer.{name}": value for name, value in stage.layer.named_parameters()}
        expected |= {f"experts.0.{name}": value for name, value in stage.experts[replica].named_parameters()}
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-10, atol=1e-12)


class Reads(TorchDispatchMode):
    """Counts numbers that are read from a tensor, for which the host waits."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compare", [difference, of_all])
def test_the_host_waits_as_often_for_many_gradients_as_for_one(compare: Any) -> None:
    """They are read together once they are gathered."""
    counts = []
    for number in (1, 40):
        norms = [Norm(place, "", None, torch.tensor(0.5 + place, dtype=torch.bfloat16)) for place in range(number)]
        with Reads() as reads:
            found = compare(Ranks(None, "a rank without others"), norms)
        assert found == "" or [(one.place, one.norm.item(), one.norm.dtype) for one in found] == [
            (one.place, one.norm.item(), torch.bfloat16) for one in norms
        ]
        counts.append(reads.number)
    assert counts[0] == counts[1]
