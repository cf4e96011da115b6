"""Weights that stages of several processes share: a plain loop trains them as one process does, without `TiedWeights`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import bpipe
from bpipe.errors import AgreementError, RankFailedError, StageError
from bpipe.fill import OptimizerSteps
from bpipe.model.ties import tied_in
from bpipe.schedules import Op, build
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

M, WORDS, WIDTH, STEPS, BATCH = 4, 7, 6, 20, 8


class Language(nn.Module):
    """An embedding, layers and a head with the embedding's weight; some layers may be one."""

    def __init__(self, num_layers: int, *, one_block: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers))
        if one_block:
            self.layers = nn.ModuleList([self.layers[0]] * num_layers)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        output: torch.Tensor = self.head(x)
        return output


class Part(nn.Module):
    """A stage that a user builds: the model names what is tied, as Transformers' do."""

    _tied_weights_keys: ClassVar = {"head.weight": "embedding.weight"}

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        model = Language(num_stages, seed=stage)  # each process begins with other values
        first, last = stage == 0, stage == num_stages - 1
        self.embedding = model.embedding if first else None
        self.layer = model.layers[stage]
        self.head = model.head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x if self.embedding is None else self.embedding(x))
        return x if self.head is None else self.head(x)


class Case(NamedTuple):
    """How a model is trained.

    Args:
        stages: of the model, all ranks together.
        schedule: makes the schedule of a rank's stages.
        accumulated: steps before the optimizer's.
    """

    stages: int
    schedule: Callable[..., Any] = bpipe.OneFOneB
    one_block: bool = False
    accumulated: int = 1
    norm: float | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD


def lowest(stage: Any, *args: Any, **options: Any) -> Any:
    return bpipe.Balanced(bpipe.OneFOneB(stage, *args, **options), budget="lowest")


CASES = {
    "two stages": Case(2),
    "accumulated steps": Case(2, accumulated=3),
    "clipped": Case(2, norm=0.05),
    "AdamW, clipped": Case(2, norm=0.05, optimizer=torch.optim.AdamW),
    "one block on all stages": Case(2, one_block=True),
    "two stages on a rank": Case(4, bpipe.Interleaved1F1B, one_block=True),
    "halves": Case(2, bpipe.ZBH1),
    "balanced": Case(2, bpipe.BalancedOneFOneB),
    "balanced in bytes": Case(2, lowest, accumulated=2),
}
ON_FOUR = {
    "four stages": Case(4),
    "one block on all of four": Case(4, bpipe.BalancedOneFOneB, one_block=True),
    "a V": Case(8, bpipe.ZBV, one_block=True),
    "clipped on four": Case(4, one_block=True, norm=0.05, accumulated=2),
}


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, WORDS, (BATCH, 3), generator=torch.Generator().manual_seed(step))
    return words, (words + 1) % WORDS


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def alone(case: Case, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    model = Language(case.stages, one_block=case.one_block) if model is None else model
    optimizer = case.optimizer(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(case.accumulated):
            for x, y in zip(*(one.chunk(M) for one in batches(step + 100 * i))):
                (loss_of(model(x), y) / M).backward()
        if case.norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.norm)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def parts_of(model: nn.Module, num_stages: int) -> list[nn.Module]:
    names = [[f"layers.{stage}"] for stage in range(num_stages)]
    names[0].insert(0, "embedding")
    names[-1].append("head")
    return bpipe.split_model(model, names)


def loop(schedule: Any, parts: dict[int, nn.Module], case: Case, steps: Sequence[int] = range(STEPS), group: Any = None) -> Any:
    parameters = list({id(one): one for part in parts.values() for one in part.parameters()}.values())
    optimizer = case.optimizer(parameters, lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        for i in range(case.accumulated):
            x, y = batches(step + 100 * i)
            schedule.step(x, target=y, return_outputs=False)
        if case.norm is not None:
            by_stage = {index: part.parameters() for index, part in parts.items()}
            bpipe.clip_grad_norm_(by_stage, case.norm, group=group)
        optimizer.step()
    return optimizer


def stages_on(rank: int, case: Case, num_ranks: int) -> list[int]:
    rule = getattr(case.schedule, "rule", "1f1b")
    return build(rule, case.stages, M, num_ranks=num_ranks).stages_of(rank)


def trained(rank: int, num_ranks: int, case: Case, model: nn.Module | None = None) -> dict[str, Any]:
    cut = parts_of(Language(case.stages, one_block=case.one_block) if model is None else model, case.stages)
    parts = {index: cut[index] for index in stages_on(rank, case, num_ranks)}
    del cut
    stages = [bpipe.PipelineStage(part, index, case.stages, "cpu") for index, part in parts.items()]
    schedule = case.schedule(stages if len(stages) > 1 else stages[0], M, loss_fn=loss_of)
    loop(schedule, parts, case)
    stats = schedule.stats
    found = {name: value.detach().clone() for part in parts.values() for name, value in part.state_dict().items()}
    exchanges = [str(action) for action in schedule.plan.actions[rank] if action.op in (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD)]
    schedule.close()
    peaks = stats["device_peak_bytes"], stats["predicted_device_peak_bytes"]
    return {"weights": found, "exchanges": exchanges, "peaks": peaks}


def all_of(rank: int, num_ranks: int) -> dict[str, Any]:
    return {name: trained(rank, num_ranks, case) for name, case in (CASES if num_ranks == 2 else ON_FOUR).items()}


@cache
def outcomes(num_ranks: int) -> list[dict[str, Any]]:
    return run_ranks(all_of, num_ranks, num_ranks)


@pytest.mark.parametrize("name", [*CASES, *ON_FOUR])
def test_a_plain_loop_trains_as_one_process(name: str) -> None:
    case, ranks = (CASES | ON_FOUR)[name], outcomes(2 if name in CASES else 4)
    expected = alone(case)
    for rank in ranks:
        assert rank[name]["peaks"][0] == rank[name]["peaks"][1]
        for key, value in rank[name]["weights"].items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-12)
    if case.stages == len(ranks):  # each rank that has a copy exchanges its gradient once with each other one
        holders = range(len(ranks)) if case.one_block else (0, len(ranks) - 1)
        each = 2 * (len(holders) - 1)
        assert [len(rank[name]["exchanges"]) for rank in ranks] == [each * (one in holders) for one in range(len(ranks))]


def built(rank: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    part = Part(rank, 2)
    whole = Language(2, seed=0)
    whole.layers[1].load_state_dict(Language(2, seed=1).layers[1].state_dict())
    stage = bpipe.PipelineStage(part, rank, 2, "cpu")
    schedule = bpipe.OneFOneB(stage, M, loss_fn=loss_of)
    loop(schedule, {rank: part}, Case(2))
    schedule.close()
    return part.state_dict(), [alone(Case(2), whole)]


def test_what_a_model_names_as_tied_is_tied_and_begins_as_the_first_stage_has_it() -> None:
    (first, [expected]), (last, _) = run_ranks(built, 2)
    torch.testing.assert_close(first["embedding.weight"], expected["embedding.weight"], rtol=0, atol=1e-12)
    assert torch.equal(first["embedding.weight"], last["head.weight"])
    torch.testing.assert_close(last["layer.0.weight"], expected["layers.1.0.weight"], rtol=0, atol=1e-12)


def in_half(rank: int, by_hand: bool) -> torch.Tensor:
    part = parts_of(Language(2).bfloat16(), 2)[rank]
    weight = part.embedding.weight if rank == 0 else part.head.weight
    tied = bpipe.TiedWeights({"embedding.weight": weight}) if by_hand else None
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batches(step)
        schedule.step(x, target=y)
        if tied is not None:
            tied.sum_grads()
        optimizer.step()
        optimizer.zero_grad()
    schedule.close()
    return weight.detach().clone()


def test_the_sum_of_half_precision_is_that_of_tied_weights() -> None:
    """To the bit; and who makes `TiedWeights` sums by it alone, not twice."""
    for with_it, without in zip(run_ranks(in_half, 2, True), run_ranks(in_half, 2, False)):
        assert torch.equal(with_it, without)


def apart(rank: int) -> list[str]:
    part = parts_of(Language(2), 2)[rank]
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1 * (1 + rank))
    x, y = batches(0)
    schedule.step(x, target=y)
    optimizer.step()
    with pytest.raises((StageError, RankFailedError), match="copies have different values now"):  # a rank may hear of it first
        schedule.step(x, target=y)
    return []


def test_copies_that_drift_apart_are_refused_on_both_ranks() -> None:
    run_ranks(apart, 2)


def half_frozen(rank: int) -> None:
    part = parts_of(Language(2), 2)[rank]
    (part.embedding if rank == 0 else part.head).weight.requires_grad_(rank == 0)
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    x, y = batches(0)
    with pytest.raises(AgreementError, match="is frozen on some of them"):
        schedule.step(x, target=y)


def test_a_weight_that_is_frozen_on_one_stage_alone_is_refused() -> None:
    run_ranks(half_frozen, 2)


class Untied(Language):
    """Its class names weights as tied that this model has apart."""

    _tied_weights_keys: ClassVar = {"head.weight": "embedding.weight"}

    def __init__(self) -> None:
        super().__init__(2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False).double()


def cut_apart(rank: int) -> dict[str, torch.Tensor]:
    part = parts_of(Untied(), 2)[rank]
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    loop(schedule, {rank: part}, Case(2))
    schedule.close()
    return part.state_dict()


def test_what_a_cut_has_shown_apart_stays_apart() -> None:
    expected = alone(Case(2), Untied())
    for found in run_ranks(cut_apart, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_two_models_of_one_class_have_weights_of_their_own() -> None:
    keys = [{one.key for one in tied_in(nn.Sequential(nn.Identity(), Part(stage, 2)), stage)} for stage in (0, 1)]
    assert keys[0] == keys[1] and len(keys[0]) == 1  # of one path: one weight
    both = {one.key: one.first_name for one in tied_in(nn.Sequential(Part(0, 2), nn.DataParallel(Part(0, 2))), 0)}
    assert sorted(both.values()) == ["0.embedding.weight", "1.embedding.weight"]


def begins_apart(rank: int) -> bool:
    x, y = batches(0)
    part = Part(rank, 2)
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    with pytest.raises(AgreementError, match=r"have different values, of which an evaluation would use each: load the same values"):
        schedule.eval(x, target=y)
    schedule.step(x, target=y)
    schedule.eval(x, target=y)
    schedule.close()
    frozen = Part(rank, 2)
    (frozen.embedding if rank == 0 else frozen.head).weight.requires_grad_(False)
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(frozen, rank, 2, "cpu"), M, loss_fn=loss_of)
    with pytest.raises(AgreementError, match="has other values on some of them, and is frozen"):
        schedule.step(x, target=y)
    return True


def test_copies_that_begin_apart_are_not_evaluated_nor_left_frozen() -> None:
    assert run_ranks(begins_apart, 2) == [True, True]


def in_turns(rank: int) -> bool:
    """Steps that reduce, do not, and reduce."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage = mesh.get_local_rank("pp")
    module = nn.parallel.DistributedDataParallel(parts_of(Language(2), 2)[stage], process_group=mesh.get_group("dp"))
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, stage, 2, "cpu", group=mesh.get_group("pp")), M, loss_fn=loss_of)
    x, y = batches(0)
    schedule.step(x, target=y)
    module.require_backward_grad_sync = False
    with pytest.raises((StageError, RankFailedError), match="zero the gradients before no_sync"):
        schedule.step(x, target=y)
    return True


def test_sums_to_which_steps_under_no_sync_would_add_are_refused() -> None:
    assert all(run_ranks(in_turns, 4))


def sharded(rank: int, by: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    case = Case(2, norm=0.05 if by == "fsdp" else None)
    part = parts_of(Language(2), 2)[stage]
    if by == "fsdp":
        fully_shard(part, mesh=mesh["dp"])
    module = nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group("dp")) if by == "ddp" else part
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, stage, 2, "cpu", group=mesh.get_group("pp")), M, loss_fn=loss_of)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batches(step)
        optimizer.zero_grad()
        for half in range(2):  # the first of them reduces nothing yet
            rows = [one.chunk(4)[2 * half + replica] for one in (x.repeat(4, 1), y.repeat(4, 1))]
            if by == "ddp":
                module.require_backward_grad_sync = half == 1
            schedule.step(rows[0], target=rows[1], finalize_gradients=half == 1 or by == "ddp")
        if case.norm is not None:
            bpipe.clip_grad_norm_(module.parameters(), case.norm, group=mesh.get_group("pp"))
        optimizer.step()
    found = {name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for name, one in part.named_parameters()}
    schedule.close()
    return found


@pytest.mark.parametrize("by", ["fsdp", "ddp"])
def test_with_data_parallelism_and_steps_that_do_not_reduce(by: str) -> None:
    expected = alone(Case(2, accumulated=1, norm=0.05 if by == "fsdp" else None), Doubled(Language(2)))
    for found in run_ranks(sharded, 4, by):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[f"model.{name}"], rtol=0, atol=1e-12)


class Doubled(nn.Module):
    """A model whose gradients count twice, as two accumulated steps of the same rows do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(x)
        output.register_hook(lambda gradient: 2 * gradient)
        return output


def saved(rank: int, folder: str) -> None:
    case = Case(2, optimizer=torch.optim.AdamW)
    part = parts_of(Language(2), 2)[rank]
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    optimizer = loop(schedule, {rank: part}, case, range(3))
    dcp.save(bpipe.training_state(part, optimizer), checkpoint_id=folder)
    schedule.close()


def resumed(rank: int, num_ranks: int, folder: str) -> dict[str, torch.Tensor]:
    case = Case(2, optimizer=torch.optim.AdamW)
    model = Language(2, seed=5)
    names = {1: [["embedding", "layers", "head"]], 3: [["embedding"], ["layers"], ["head"]]}[num_ranks]
    part = model if num_ranks == 1 else bpipe.split_model(model, names)[rank]
    optimizer = case.optimizer(part.parameters(), lr=0.1)
    dcp.load(bpipe.training_state(part, optimizer), checkpoint_id=folder)
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, num_ranks, "cpu"), M, loss_fn=loss_of)
    for step in range(3, STEPS):
        x, y = batches(step)
        optimizer.zero_grad()
        schedule.step(x, target=y)
        optimizer.step()
    schedule.close()
    return {name: value.detach().clone() for name, value in part.state_dict().items()}


def test_a_checkpoint_resumes_over_other_numbers_of_stages(tmp_path: Any) -> None:
    """The optimizer's states of a weight are saved once, under the name that it has in a single process."""
    run_ranks(saved, 2, str(tmp_path / "states"))
    expected = alone(Case(2, optimizer=torch.optim.AdamW))
    for num_ranks in (1, 3):
        for found in run_ranks(resumed, num_ranks, num_ranks, str(tmp_path / "states")):
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def stepped(rank: int) -> dict[str, torch.Tensor]:
    part = parts_of(Language(2), 2)[rank]
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    schedule.fill = OptimizerSteps({rank: optimizer})
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batches(step)
        schedule.step(x, target=y)
    schedule.close()
    return part.state_dict()


def test_optimizers_step_behind_the_sum() -> None:
    expected = alone(Case(2))
    for found in run_ranks(stepped, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def scaled_loop(model: nn.Module, scaler: Any, backward: Callable[[int], Any], name: str) -> dict[str, torch.Tensor]:
    """Train with a step in which one gradient, of a weight with this name, is not finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(step)
        for own, parameter in model.named_parameters():
            if step == 3 and own == name:
                assert parameter.grad is not None
                parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def scaled(rank: int) -> dict[str, torch.Tensor]:
    part, scaler = parts_of(Language(2), 2)[rank], bpipe.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    stage = bpipe.PipelineStage(part, rank, 2, "cpu")
    schedule = bpipe.OneFOneB(stage, M, loss_fn=lambda output, target: scaler.scale(loss_of(output, target)))

    def backward(step: int) -> None:
        x, y = batches(step)
        schedule.step(x, target=y)

    found = scaled_loop(part, scaler, backward, "layers.1.0.bias")
    schedule.close()
    return found


def test_an_overflow_on_one_stage_skips_the_step_of_all_copies() -> None:
    model, scaler = Language(2), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)

    def backward(step: int) -> None:
        for x, y in zip(*(one.chunk(M) for one in batches(step))):
            (scaler.scale(loss_of(model(x), y)) / M).backward()

    expected = scaled_loop(model, scaler, backward, "layers.1.0.bias")
    for found in run_ranks(scaled, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
