"""What PyTorch's tests of pipelining say of schedules, batches and plans, in one process: over a fake group, or in a loopback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torchs
from torch.testing import assert_close

import bpipe
from bpipe.errors import ConfigurationError, PlanError
from tests.dry_run.fake_group import fake_group
from tests.torch_api.models import WIDTH, Block, batch, blocks, gradients_of, in_one_process, sum_of_squares

pytestmark = pytest.mark.usefixtures("one_thread")

ALONE = ["Schedule1F1B", "ScheduleGPipe"]
CPU = torch.device("cpu")


def alone(name: str, module: nn.Module, m: int = 2, loss_fn: Callable[..., Any] | None = sum_of_squares, **options: Any) -> Any:
    """A schedule of one stage on a group of one rank, made as for torch."""
    kind, stage = getattr(bpipe, name), bpipe.PipelineStage(module, 0, 1, CPU)
    return kind(stage if issubclass(kind, bpipe.PipelineScheduleSingle) else [stage], m, loss_fn=loss_fn, **options)


# One stage


@pytest.mark.parametrize("name", ALONE)
def test_one_stage(name: str) -> None:
    """The loss is a mean here, and gradients are scaled by default."""
    (module,), (x, target) = blocks(1), batch()
    output, loss, *gradients = in_one_process(blocks(1), nn.functional.mse_loss)
    with fake_group(0, size=1):
        schedule, losses = alone(name, module, loss_fn=nn.functional.mse_loss), []
        for _ in range(2):
            module.zero_grad()
            losses = []
            result = schedule.step(x, target=target, losses=losses)
        schedule.close()
    assert_close(result, output)
    assert_close(torch.stack(losses).mean(), loss)
    assert_close(gradients_of([module]), gradients, rtol=1e-5, atol=4e-5)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(x + y))


@pytest.mark.parametrize("name", ALONE)
def test_batches_that_are_cut_already(name: str) -> None:
    """To the bit what the schedule cuts itself."""
    torch.manual_seed(0)
    whole, (x, target) = Scaled(), batch()
    pieces, y = copy.deepcopy(whole), x.flip(0)
    with fake_group(0, size=1):
        losses: list[list[torch.Tensor]] = [[], []]
        schedules = [alone(name, module, scale_grads=False) for module in (whole, pieces)]
        expected = schedules[0].step(x, y=y, target=target, losses=losses[0])
        result = schedules[1].step(
            arg_mbs=[(one,) for one in x.tensor_split(2)],
            kwarg_mbs=[{"y": one} for one in y.tensor_split(2)],
            target_mbs=list(target.tensor_split(2)),
            losses=losses[1],
        )
        for schedule in schedules:
            schedule.close()
    assert torch.equal(result, expected) and all(map(torch.equal, *losses))
    assert all(map(torch.equal, gradients_of([pieces]), gradients_of([whole])))


@pytest.mark.parametrize("name", ALONE)
def test_an_evaluation_and_then_training(name: str) -> None:
    (module,), (x, target) = blocks(1), batch()
    with fake_group(0, size=1):
        schedule = alone(name, module)
        cut = {"arg_mbs": [(one,) for one in x.tensor_split(2)], "target_mbs": list(target.tensor_split(2))}
        losses: list[list[torch.Tensor]] = [[], [], []]
        outputs = [schedule.eval(x, target=target, losses=losses[0]), schedule.eval(**cut, losses=losses[1])]
        assert gradients_of([module]) == [None] * 4
        outputs.append(schedule.step(**cut, losses=losses[2]))
        schedule.close()
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    assert all(torch.equal(torch.stack(one), torch.stack(losses[0])) for one in losses)
    assert all(gradient is not None for gradient in gradients_of([module]))


def test_gradients_of_the_batch_itself() -> None:
    """An input and a keyword argument that need a gradient get it."""

    class Product(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return x * scale

    x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    with fake_group(0, size=1):
        schedule = alone("ScheduleGPipe", Product(), loss_fn=sum_of_squares, scale_grads=False)
        assert torch.equal(schedule.step(x, scale=scale, target=torch.zeros(2)), x * scale)
        schedule.close()
    assert torch.equal(x.grad, torch.full((2,), 18.0)) and torch.equal(scale.grad, torch.full((2,), 6.0))


def test_batches_of_another_size_are_learned() -> None:
    """And outputs of another dtype: torch's schedules refuse what differs from the first step."""
    modules, loopback = blocks(2), bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(one, i, 2, CPU, group=loopback.rank(i)) for i, one in enumerate(modules)]
    schedules = [bpipe.ScheduleGPipe(stage, 2, sum_of_squares) for stage in stages]
    for size in (8, 10, 8):
        x = torch.ones(size, WIDTH)
        assert loopback.step(schedules, x, target=x).shape == (size, WIDTH)
    for module in modules:
        module.to(torch.float64)
    x = torch.ones(8, WIDTH, dtype=torch.float64)
    assert loopback.step(schedules, x, target=x).dtype is torch.float64


ONE = torch.zeros(2, 4)
WRONG_PIECES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a batch beside its pieces": ((ONE,), {"arg_mbs": [(ONE,), (ONE,)]}),
    "a keyword argument beside its pieces": ((), {"y": ONE, "kwarg_mbs": [{}, {}]}),
    "a target beside its pieces": ((), {"arg_mbs": [(ONE,), (ONE,)], "target": ONE, "target_mbs": [ONE, ONE]}),
    "pieces that are no list": ((), {"arg_mbs": (ONE,)}),
    "no pieces": ((), {"arg_mbs": []}),
    "keyword pieces that are no list": ((), {"arg_mbs": [(ONE,), (ONE,)], "kwarg_mbs": {"y": ONE}}),
    "pieces that are no tuples": ((), {"arg_mbs": [ONE, ONE]}),
    "keyword pieces that are no dicts": ((), {"kwarg_mbs": [ONE, ONE]}),
    "too few targets": ((), {"arg_mbs": [(ONE,), (ONE,)], "target_mbs": [ONE]}),
}


@pytest.mark.parametrize("what", WRONG_PIECES)
def test_pieces_that_do_not_fit_are_refused(what: str) -> None:
    args, kwargs = WRONG_PIECES[what]
    with fake_group(0, size=1):
        schedule = alone("ScheduleGPipe", nn.Identity(), loss_fn=None)
        with pytest.raises(ConfigurationError):
            schedule.step(*args, **kwargs)
        assert torch.equal(schedule.step(ONE), ONE)
        schedule.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_compiled_stages_in_halves(name: str) -> None:
    """Torch refuses them in a schedule with weight halves; here they run."""
    num_stages = 2
    whole, (x, target) = blocks(num_stages), batch()
    _, _, *gradients = in_one_process(blocks(num_stages))
    with fake_group(0, size=1):
        stages = [bpipe.PipelineStage(torch.compile(one, backend="eager"), i, num_stages, CPU) for i, one in enumerate(whole)]
        schedule = getattr(bpipe, name)(stages, 2, loss_fn=sum_of_squares, scale_grads=False)
        schedule.step(x, target=target)
        schedule.close()
    assert_close(gradients_of(whole), gradients, rtol=1e-5, atol=4e-5)


# Names and orders


KINDS = [name for name, one in vars(torchs).items() if isinstance(one, type) and issubclass(one, torchs._PipelineSchedule)]


@pytest.mark.parametrize("name", [name for name in KINDS if hasattr(bpipe, name)])
def test_classes_derive_from_each_other_as_torchs_do(name: str) -> None:
    others = [other for other in KINDS if hasattr(bpipe, other)]
    assert {*KINDS} - {*others} <= {"_ScheduleForwardOnly"} and len(others) > 9
    for other in others:
        expected = issubclass(getattr(torchs, name), getattr(torchs, other))
        assert issubclass(getattr(bpipe, name), getattr(bpipe, other)) == expected, other


def test_a_schedule_is_an_instance_as_its_class_is_a_subclass() -> None:
    loopback = bpipe.Loopback(1)
    stages = [bpipe.PipelineStage(nn.Identity(), i, 2, CPU, group=loopback.rank(0)) for i in (0, 1)]
    schedule = bpipe.ScheduleInterleaved1F1B(stages, 2)
    bases = ("_PipelineScheduleRuntime", "PipelineScheduleMulti", "_PipelineSchedule")
    assert [isinstance(schedule, getattr(bpipe, name)) for name in (*bases, "PipelineScheduleSingle")] == [True] * 3 + [False]
    assert not issubclass(bpipe.Interleaved1F1B, bpipe.FromCSV) and not issubclass(bpipe.FromPlan, bpipe.FromCSV)


def test_a_class_by_its_name() -> None:
    for name in ("1F1B", "1f1b", "Interleaved1F1B", "INTERLEAVED1F1B", "GPipe", "LoopedBFS", "ZBVZeroBubble"):
        assert issubclass(bpipe.get_schedule_class(name), bpipe.Schedule)
    for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
        assert bpipe.get_schedule_class(name).__name__ == name
    with pytest.raises(ValueError, match="ScheduleThatDoesNotExist"):
        bpipe.get_schedule_class("ScheduleThatDoesNotExist")


SIZES = [  # stages per rank, microbatches, ranks
    *((2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8), (4, 16, 4), (4, 32, 4), (4, 64, 4)),
    *((4, 16, 16), (4, 32, 32), (3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5)),
    *((2, 3, 4), (2, 10, 4), (2, 15, 4)),
]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]


def orders(name: str, per_rank: int, m: int, ranks: int, placement: Callable[[int], list[int]]) -> list[dict[int, list[Any]]]:
    """Of each rank, in the words of torch: bpipe's order and torch's, without idle moments."""
    num_stages, found = per_rank * ranks, []
    with fake_group(0, size=ranks):
        for library in (bpipe, pipelining):
            stages = [library.PipelineStage(nn.Identity(), i, num_stages, CPU) for i in placement(0)]
            order = getattr(library, name)(stages, m).pipeline_order
            found.append({rank: [str(action) for action in order[rank] if action is not None] for rank in order})
    return found


@pytest.mark.parametrize("per_rank, m, ranks", SIZES)
@pytest.mark.parametrize("name", LOOPED)
def test_looped_orders(name: str, per_rank: int, m: int, ranks: int) -> None:
    """The order of torch's own schedule, where torch has one; its validator accepts ours in any case."""
    ours, theirs = orders(name, per_rank, m, ranks, lambda rank: list(range(rank, per_rank * ranks, ranks)))
    accepted_by_torch(ours, lambda stage: stage % ranks, per_rank * ranks)
    if name != "ScheduleLoopedBFS":  # whose backwards torch runs from the last microbatch to the first
        assert ours == theirs
    else:
        assert {rank: sorted(of_rank) for rank, of_rank in ours.items()} == {rank: sorted(one) for rank, one in theirs.items()}


@pytest.mark.parametrize("m", [8, 12])
@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_orders_in_a_v(name: str, m: int) -> None:
    """torch's validator accepts them; `tests/schedules/test_rules.py` compares them with torch's own."""
    ours, _ = orders(name, 2, m, 4, lambda rank: [rank, 7 - rank])
    accepted_by_torch(ours, lambda stage: min(stage, 7 - stage), 8)


def accepted_by_torch(order: dict[int, list[str]], rank_of: Callable[[int], int], num_stages: int) -> None:
    """Raise unless torch's own pass adds transfers to an order, and its simulation runs to the end."""
    actions = {rank: [torchs._Action.from_str(one) for one in of_rank] for rank, of_rank in order.items()}
    with_transfers = torchs._add_send_recv(actions, stage_to_rank=rank_of, num_stages=num_stages)
    torchs._simulate_comms_compute(with_transfers, stage_to_rank=rank_of, num_stages=num_stages)


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_a_v_takes_two_stages_per_rank(name: str) -> None:
    with fake_group(0, size=4):
        stages = [bpipe.PipelineStage(nn.Identity(), i, 16, CPU) for i in (0, 7, 8, 15)]
        with pytest.raises(ValueError, match="stages"):
            getattr(bpipe, name)(stages, 16)


def test_few_microbatches_for_dual_pipe() -> None:
    with fake_group(0, size=4), pytest.raises(ValueError, match="takes 2p or more microbatches"):
        bpipe.ScheduleDualPipeV([bpipe.PipelineStage(nn.Identity(), i, 8, CPU) for i in (0, 7)], 4)


# Orders from outside


def loaded(rows: list[str], placement: list[list[int]], m: int, format: str = "compute_only") -> tuple[list[nn.Module], Any, Any]:
    """The modules, the loopback and the schedules of a plan that torch's text describes."""
    num_stages = sum(map(len, placement))
    modules, loopback, made = blocks(num_stages), bpipe.Loopback(len(placement)), []
    for rank, held in enumerate(placement):
        stages = [bpipe.PipelineStage(modules[i], i, num_stages, CPU, group=loopback.rank(rank)) for i in held]
        made.append(bpipe._PipelineScheduleRuntime(stages, m, loss_fn=sum_of_squares, scale_grads=False))
        made[-1].load_csv("\n".join(rows), format=format)
    return modules, loopback, made


RUNS = {
    "stages that follow on one rank": (["0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1"], [[0, 1]], 2),
    "halves on one rank": (["0F0,0F1,0I0,0I1,0W0,0W1"], [[0]], 2),
    "a V of one microbatch": (["0F0,,,3F0,3B0,,,0B0", ",1F0,2F0,,,2B0,1B0,"], [[0, 3], [1, 2]], 1),
    "halves over two ranks": (
        ["0F0,0F1,2F0,2F1,,2I0,2W0,0I0,2I1,0W0,0I1,2W1,0W1", ",1F0,1F1,3F0,3I0,3F1,1I0,3I1,3W0,1I1,1W0,3W1,1W1"],
        [[0, 2], [1, 3]],
        2,
    ),
    "three stages on a rank, two on the other": (
        ["0F0,0F1,1F0,1F1,4F0,4B0,4F1,4B1,1B0,1B1,0B0,0B1", "2F0,2F1,3F0,3F1,3B0,3B1,2B0,2B1"],
        [[0, 1, 4], [2, 3]],
        2,
    ),
    "transfers in an order of one's own": (
        [
            "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1",
            "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1",
        ],
        [[0], [1]],
        2,
    ),
}


@pytest.mark.parametrize("what", RUNS)
def test_orders_in_torchs_text(what: str) -> None:
    rows, placement, m = RUNS[what]
    modules, loopback, schedules = loaded(rows, placement, m, "compute_comms" if "SEND" in rows[0] else "compute_only")
    (x, target), losses = batch(), []
    output = loopback.step(schedules, x, target=target, losses=losses)
    expected, loss, *gradients = in_one_process(blocks(len(modules)))
    assert_close(output, expected)
    assert_close(sum(losses), loss)
    assert_close(gradients_of(modules), gradients, rtol=1e-5, atol=4e-5)


def test_an_order_goes_through_a_file(tmp_path: Any) -> None:
    """As torch's tests do it: written with transfers by one schedule, read by another, the same actions."""
    rows, placement, m = RUNS["halves over two ranks"]
    _, _, schedules = loaded(rows, placement, m)
    schedules[0].dump_csv(tmp_path / "order.csv")
    assert "0SEND_F0" in (tmp_path / "order.csv").read_text()
    _, _, again = loaded(rows, placement, m)
    again[0]._load_csv(tmp_path / "order.csv", format="compute_comms")
    assert again[0].pipeline_order_with_comms == schedules[0].pipeline_order_with_comms


@pytest.mark.parametrize(
    "rows", [["0F0,0B0"], ["0F0", "1F0"], ["0F0,0B0", "1F0"], ["0F0,0W0", "1F0,1B0"]], ids=["rank", "backward", "half", "input"]
)
def test_orders_that_lack_something_are_refused(rows: list[str]) -> None:
    with pytest.raises((PlanError, ConfigurationError)):
        loaded(rows, [[0], [1]], 1)


# Backwards in halves


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


class Uses(nn.Module):
    """Uses one weight, or two, in a way of its own."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.how = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(x, self.first, self.second)


HALVES: dict[str, Callable[..., torch.Tensor]] = {
    "a view at the end": lambda x, a, b: View.apply(torch.relu(x @ a) @ b),
    "a custom function": lambda x, a, b: MatMul.apply(MatMul.apply(x, a), b),
    "a weight used twice": lambda x, a, b: torch.relu(x @ a) @ a,
    "a function with two outputs between": lambda x, a, b: sum(torch.split(torch.cat([x @ a, x @ b], 1), WIDTH, 1)),
    "a weight that is not used": lambda x, a, b: x @ b,
}


@pytest.mark.parametrize("what", HALVES)
def test_backwards_in_halves(what: str) -> None:
    """The gradients of inputs come first, those of weights later, and both equal those of one backward to the bit."""
    torch.manual_seed(0)
    found = []
    for rule in (bpipe.OneFOneB, bpipe.ZBH1):
        torch.manual_seed(0)
        modules, loopback, (x, target) = [Uses(HALVES[what]) for _ in range(2)], bpipe.Loopback(2), batch()
        x.requires_grad_()
        stages = [bpipe.PipelineStage(one, i, 2, CPU, group=loopback.rank(i)) for i, one in enumerate(modules)]
        made = [rule(stage, 4, sum_of_squares) for stage in stages]
        loopback.step(made, x, target=target)
        found.append([x.grad, *(gradient for gradient in gradients_of(modules) if gradient is not None)])
    assert len(found[0]) > 2 and all(map(torch.equal, *found))


# Batches


def test_batches_are_cut_as_torch_says() -> None:
    """`TensorChunkSpec` and its two shorthands are torch's own."""
    seen = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            seen.append([tuple(x.shape), tuple(y.shape), {key: tuple(value.shape) for key, value in kwargs.items()}])
            return x

    specs = {
        "args_chunk_spec": bpipe.TensorChunkSpec.from_tuple((0, 1)),
        "kwargs_chunk_spec": bpipe.TensorChunkSpec.from_dict({"z": 0, "w": 2}),
    }
    with fake_group(0, size=1):
        schedule = alone("ScheduleGPipe", Looks(), loss_fn=None, **specs)
        output = schedule.step(torch.zeros(4, 3), torch.zeros(3, 6), z=torch.zeros(2), w=torch.zeros(1, 1, 4))
        schedule.close()
    assert output.shape == (4, 3) and seen == [[(2, 3), (3, 3), {"z": (1,), "w": (1, 1, 2)}]] * 2


def test_block_masks_are_cut_with_their_batch() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    seen = []

    class Attends(nn.Module):
        def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
            seen.append((x.shape[0], mask.shape, mask.to_dense()))
            return x

    lengths = torch.tensor([3, 128, 256, 30])
    whole = create_block_mask(lambda b, h, q, k: (q >= k) & (k < lengths[b]), 4, None, 256, 256, device="cpu")
    with fake_group(0, size=1):
        schedule = alone("ScheduleGPipe", Attends(), loss_fn=None)
        schedule.step(torch.zeros(4, 256), whole)
        schedule.close()
    assert [one[:2] for one in seen] == [(2, (2, 1, 256, 256))] * 2
    assert torch.equal(torch.cat([one[2] for one in seen]), whole.to_dense())


def test_what_cuts_models_is_torchs_own() -> None:
    for name in ("pipeline", "pipe_split", "SplitPoint", "build_stage", "Pipe"):
        assert getattr(bpipe, name) is getattr(pipelining, name)
    assert bpipe.TensorChunkSpec is pipelining.microbatch.TensorChunkSpec


def test_a_stage_knows_its_place() -> None:
    with fake_group(2, size=4):
        stage = bpipe.PipelineStage(submodule=Block(), stage_index=2, num_stages=4, device=CPU)
        assert (stage.group_rank, stage.group_size, stage.is_first, stage.is_last) == (2, 4, False, False)
