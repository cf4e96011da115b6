"""A program written for torch.distributed.pipelining runs when the module of its imports changes; the page lists every argument."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import microbatch, schedules, stage

import bpipe
from bpipe.as_torch import frontends
from bpipe.as_torch.frontends import SINCE
from bpipe.errors import ConfigurationError, PlanError, StageError
from bpipe.model.call import Call
from bpipe.model.of_torch_alone import OPTIONS, SCHEDULE, STAGE
from bpipe.schedules import Op
from tests.ranks import run_ranks
from tests.torch_names import page as pages
from tests.torch_names.signatures import MODULES, recorded, signatures

SOURCES = Path(pipelining.__file__).parent
M, WIDTH = 4, 6
mse = nn.functional.mse_loss


# The page.


def test_the_page_is_written_by_its_command() -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page()


def test_the_page_has_every_argument_of_the_installed_torch() -> None:
    listed = {(name, argument) for name, argument, *_ in pages.entries()}
    lacking = [
        (name, argument)
        for name, arguments in signatures(SOURCES).items()
        if pages.is_compared(name) and name not in pages.BASES
        for argument in arguments
        if (pages.shown_as(name), argument.partition("=")[0]) not in listed
    ]
    assert not lacking, "record this torch: python -m tests.torch_names --record VERSION FOLDER --write, and write notes"
    assert {*pipelining.__all__, *schedules.__all__, *stage.__all__, *microbatch.__all__} <= {*bpipe.__all__, *SINCE}
    assert all(hasattr(bpipe, name) for name in pipelining.__all__)


def test_signatures_are_read_as_python_reads_them() -> None:
    version = torch.__version__.partition("+")[0]
    found = signatures(SOURCES)
    assert recorded().get(version, found) == found
    for name in pipelining.__all__:
        read = [one.partition("=")[0] for one in found[name]]
        assert name == "SplitPoint" or read == [*inspect.signature(getattr(pipelining, name)).parameters]


def test_an_argument_that_bpipe_has_not_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = [*recorded()][-1]
    changed = recorded() | {newest: recorded()[newest] | {"Schedule1F1B": ["stage", "n_microbatches", "colour=None"]}}
    monkeypatch.setattr(pages, "recorded", lambda: changed)
    with pytest.raises(LookupError, match=r"Schedule1F1B\(colour\): place 2 in torch, None here"):
        pages.page()


def test_a_dataclass_takes_its_fields(tmp_path: Path) -> None:
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text("")
    (tmp_path / "__init__.py").write_text("__all__ = ['Info', 'Plain']")
    (tmp_path / "stage.py").write_text("@dataclass(frozen=True)\nclass Info:\n a: int\n b: bool = False\n c: int = field()\n")
    (tmp_path / "_IR.py").write_text("class Plain:\n a: int = 3\n")
    assert signatures(tmp_path) == {"Info": ["a", "b=False", "c"], "Plain": []}


# What only the newest torch has.


@pytest.mark.parametrize("name", SINCE)
def test_a_name_that_torch_lacks_is_refused_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pipelining, name, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    with pytest.raises(ImportError, match=rf"{name} is torch's own, since torch 2\.15, and this is torch 2\.14\.1\+cpu"):
        exec(f"from bpipe import {name}", {})
    exec("from bpipe import *", {})
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        frontends.Nothing  # noqa: B018


@pytest.mark.skipif(not hasattr(pipelining, "PipelineActivationLiveness"), reason="torch has it since 2.15")
def test_torch_counts_what_a_schedule_of_bpipe_keeps() -> None:
    made = [bpipe.ScheduleInterleaved1F1B(own, M, mse) for own in stages_of(bpipe.Loopback(2))]
    found = bpipe.analyze_pipeline_activation_liveness(made[0], pp_rank=0, stage_indices=[0, 2], granularity="stage_microbatch")
    assert isinstance(found, bpipe.PipelineActivationLiveness) and found.num_slots == 5


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_torch_s_runtime_are_refused_unless_they_change_nothing(name: str) -> None:
    kinds = (bpipe.ScheduleInterleaved1F1B, bpipe.ScheduleLoopedBFS, bpipe.ScheduleInterleavedZeroBubble, bpipe.FromCSV)
    default, way = OPTIONS[name]
    for kind in kinds:
        kind(stages_of(bpipe.Loopback(2))[0], M, mse, **{name: default})
        with pytest.raises(ConfigurationError) as raised:
            kind(stages_of(bpipe.Loopback(2))[0], M, mse, **{name: 2})
        assert str(raised.value) == f"{kind.__name__} takes no {name}=2, which acts on torch's runtime: {way}"
    arguments = inspect.signature(schedules.ScheduleInterleaved1F1B).parameters
    assert name not in arguments or arguments[name].default == default


# The same program with either module.


def program(names: ModuleType, kind: str, rank: int) -> dict[str, torch.Tensor]:
    """Two steps of a training loop on 2 ranks, as one would write it for torch.distributed.pipelining."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    indices = [rank] if kind == "Schedule1F1B" else [rank, rank + 2]
    num_stages = 2 * len(indices)
    device, group = torch.device("cpu"), dist.group.WORLD
    made = [
        names.PipelineStage(submodule=modules[i], stage_index=i, num_stages=num_stages, device=device, group=group) for i in indices
    ]
    parameters = [parameter for one in made for parameter in one.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    schedule = getattr(names, kind)(made[0] if len(made) == 1 else made, M, mse)
    x = torch.randn(2 * M, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (x,) if rank == 0 else ()
        schedule.step(*given, target=x if any(one.is_last for one in made) else None, losses=losses)
        optimizer.step()
    return {f"{kind} {i}.{name}": one for i in indices for name, one in modules[i].state_dict().items()}


def both_modules(rank: int) -> list[str]:
    differ = []
    for kind in ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        theirs, ours = program(pipelining, kind, rank), program(bpipe, kind, rank)
        differ += [name for name in theirs if not torch.equal(theirs[name], ours[name])]
    return differ


def test_a_changed_import_is_all() -> None:
    """Parameters after two steps are equal to the bit: m is a power of two, so that both scale exactly."""
    assert run_ranks(both_modules, 2) == [[], []]


def changed_between_steps(rank: int) -> list[int]:
    """Another number of microbatches, to evaluate with, and another order: over processes, where channels must follow."""
    torch.manual_seed(0)
    stages = [bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), i, 4, "cpu") for i in (rank, rank + 2)]
    schedule = bpipe.ScheduleInterleaved1F1B(stages, M, mse)
    x, counts = torch.ones(2 * M, WIDTH), []
    for m in (M, 1, 2):
        schedule._n_microbatches = m
        losses: list[torch.Tensor] = []
        (schedule.eval if m == 1 else schedule.step)(x, target=x, losses=losses)
        counts.append(len(losses))
    schedule._load_csv("0F0,0F1,2F0,2F1,2I0,2I1,0I0,0I1,2W0,2W1,0W0,0W1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1")
    schedule.step(x, target=x)
    return [*counts, sum(action.op is Op.W for action in schedule.plan.compute(0))]


def test_plans_change_over_processes() -> None:
    assert run_ranks(changed_between_steps, 2) == [[0, 0, 0, 4], [M, 1, 2, 4]]


def accumulated(rank: int) -> list[float]:
    shares = []
    for names in (pipelining, bpipe):
        torch.manual_seed(0)
        module = nn.Linear(WIDTH, WIDTH)
        x = torch.randn(2 * M, WIDTH)
        mse(module(x), x).backward()
        reference = 2 * module.weight.grad
        module.zero_grad()
        schedule = names.Schedule1F1B(names.PipelineStage(module, 0, 1, torch.device("cpu"), group=dist.group.WORLD), M, mse)
        for _ in range(2):
            schedule.step(x, target=x)
        shares.append((module.weight.grad / reference).mean().item())
    return shares


def test_accumulated_gradients_are_those_that_the_page_tells() -> None:
    (shares,) = run_ranks(accumulated, 1)
    assert shares == pytest.approx([0.625, 1.0])
    assert "0.625" in pages.PAGE.read_text(encoding="utf-8")


# Stages.


def stages_of(loopback: bpipe.Loopback, per_rank: int = 2) -> list[list[bpipe.PipelineStage]]:
    torch.manual_seed(0)
    p, n = loopback.num_ranks, loopback.num_ranks * per_rank
    made = [bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), i, n, "cpu", group=loopback.rank(i % p)) for i in range(n)]
    return [made[rank::p] for rank in range(p)]


def test_the_group_is_taken_where_it_was_in_other_versions() -> None:
    group = bpipe.Loopback(1).rank(0)
    linear = nn.Linear(2, 2)
    newest = bpipe.PipelineStage(linear, 0, 1, "cpu", None, None, None, None, group)
    assert newest.group == group
    assert bpipe.PipelineStage(linear, 0, 1, "cpu", group).group == group  # bpipe's older place
    assert bpipe.PipelineStage(linear, 0, 1, "cpu", torch.zeros(2), None, group).group == group  # torch 2.11's
    with pytest.raises(ConfigurationError, match="input_args is a LoopbackGroup, and group= was given too"):
        bpipe.PipelineStage(linear, 0, 1, "cpu", group, group=group)
    for wrong in ((2, 2), "cpu", [None, 3], lambda: None):
        with pytest.raises(ConfigurationError, match=r"output_args must be a tensor or a tuple of tensors.*give group="):
            bpipe.PipelineStage(linear, 0, 1, "cpu", None, wrong)


@pytest.mark.parametrize(
    ("name", "example", "message"),
    [
        ("input_args", torch.zeros(3, WIDTH), r"stage 0: input_args promised \(float32\[3, 6\]\).* has \(float32\[2, 6\]\)"),
        ("input_args", (torch.zeros(2, WIDTH), torch.zeros(1)), r"\(float32\[2, 6\], float32\[1\]\), and .* \(float32\[2, 6\]\)"),
        ("output_args", torch.zeros(2, WIDTH, dtype=torch.float64), r"output_args promised \(float64\[2, 6\]\)"),
        ("output_args", (), r"output_args promised no tensors"),
    ],
)
def test_examples_are_compared_with_the_first_microbatch(name: str, example: Any, message: str) -> None:
    group = bpipe.Loopback(1).rank(0)
    made = bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu", group=group, **{name: example})
    schedule = bpipe.Schedule1F1B(made, 2, mse)
    with pytest.raises(StageError, match=message):
        schedule.step(torch.zeros(4, WIDTH), target=torch.zeros(4, WIDTH))


def test_an_example_that_fits_is_compared_once() -> None:
    example = torch.zeros(2, WIDTH, device="meta")
    group = bpipe.Loopback(1).rank(0)
    made = bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu", example, (example,), example, (None,), group)
    schedule = bpipe.Schedule1F1B(made, 2, mse)
    assert made.examples
    for rows in (4, 8):  # of which the second does not fit
        schedule.step(torch.zeros(rows, WIDTH), target=torch.zeros(rows, WIDTH))
        assert not made.examples


# Steps.


@pytest.mark.parametrize("name", ["step", "eval"])
def test_no_argument_of_torch_reaches_the_module(name: str) -> None:
    """Not even a module that takes any keyword."""
    got: list[dict[str, Any]] = []

    class Free(nn.Linear):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            got.append(kwargs)
            return super().forward(x)

    loopback = bpipe.Loopback(1)
    schedule = bpipe.Schedule1F1B(bpipe.PipelineStage(Free(WIDTH, WIDTH), 0, 1, "cpu", group=loopback.rank(0)), 1, mse)
    x = torch.zeros(2, WIDTH)
    for run in (getattr(schedule, name), partial(getattr(loopback, name), [schedule])):
        run(x, target=x)
        for finalize_gradients in (True, False) if name == "step" else ():
            run(x, target=x, finalize_gradients=finalize_gradients)
    assert got == [{}] * (6 if name == "step" else 2)
    known = {one.partition("=")[0] for names in recorded().values() for one in names[f"Schedule1F1B.{name}"]}
    for taken in (inspect.signature(getattr(bpipe.Schedule1F1B, name)).parameters, Call._fields):
        assert {one.lstrip("*") for one in known} <= {*taken}


# What programs ask.


@pytest.mark.parametrize("per_rank", [1, 2])
def test_everything_that_the_page_says_can_be_asked(per_rank: int) -> None:
    loopback = bpipe.Loopback(2)
    kind = bpipe.Schedule1F1B if per_rank == 1 else bpipe.ScheduleInterleaved1F1B
    own = stages_of(loopback, per_rank)
    made = [kind(of_rank[0] if per_rank == 1 else of_rank, M, mse) for of_rank in own]
    objects = {"a stage": own[1][0], "a schedule": made[1], "`bpipe`": bpipe}
    lacks = {"_stages"} if per_rank == 1 else {"_stage"}
    for of, names in (*pages.ATTRIBUTES, *pages.USED_BY):
        for name in names.split(", "):
            assert hasattr(objects[of], name) == (name not in lacks), name
    assert (own[1][0].group_rank, own[1][0].group_size, own[0][0].has_backward) == (1, 2, True)
    assert (made[1].rank, made[1].pp_group_size, made[1].n_local_stages) == (1, 2, per_rank)
    assert made[1].stage_index_to_group_rank == {i: i % 2 for i in range(2 * per_rank)}
    assert made[0].scale_grads and made[0]._has_backward and made[0]._n_microbatches == M and made[0]._loss_fn is mse
    assert (made[0]._stage is own[0][0]) if per_rank == 1 else (made[0]._stages == own[0])


def test_private_names_of_torch_are_offered_where_a_trainer_uses_them_and_nowhere_else() -> None:
    assert all(used_by for _, used_by in pages.USED_BY.values())
    source = inspect.getsource(schedules)
    private = {*re.findall(r"self\.(_[a-z]\w*)", source), *re.findall(r"def (_[a-z]\w*)\(", source)}
    group = bpipe.Loopback(1).rank(0)
    stages = [bpipe.PipelineStage(nn.Linear(2, 2), i, 2, "cpu", group=group) for i in (0, 1)]
    made = bpipe.Schedule1F1B(stages_of(bpipe.Loopback(2), 1)[0][0], M, mse), bpipe.ScheduleInterleaved1F1B(stages, M, mse)
    offered = {name for name in private if any(hasattr(one, name) for one in made)}
    offered |= {name for name in dir(schedules) if re.match("_[A-Za-z]", name) and hasattr(bpipe, name)}
    assert len(private) > 30 and offered == {name for _, name in pages.USED_BY}


def test_bases_and_names_of_schedules() -> None:
    single, multi = bpipe.PipelineScheduleSingle, bpipe.PipelineScheduleMulti
    for kind in (bpipe.OneFOneB, bpipe.BalancedOneFOneB, bpipe.ZBH1, bpipe.ScheduleGPipe, bpipe.Seq1F1B):
        assert issubclass(kind, single) and not issubclass(kind, multi)
    for kind in (bpipe.ZBV, bpipe.ScheduleLoopedBFS, bpipe.FromCSV, bpipe.FromPlan, bpipe.BitPipe):
        assert issubclass(kind, multi) and not issubclass(kind, single)
    assert not issubclass(bpipe.Schedule, single) and not issubclass(int, single) and issubclass(single, single)
    group = bpipe.Loopback(1).rank(0)
    balanced = bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", group=group), 2, mse))
    assert isinstance(balanced, single) and not isinstance(balanced, multi) and not isinstance(3, single)
    for name in ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        kind = getattr(bpipe, f"Schedule{name}")
        assert bpipe.get_schedule_class(name) is bpipe.get_schedule_class(f"schedule{name}".lower()) is kind
        assert schedules.get_schedule_class(name).__name__ == f"Schedule{name}"
    assert bpipe.get_schedule_class("balanced_1f1b") is bpipe.get_schedule_class("BalancedOneFOneB") is bpipe.BalancedOneFOneB
    assert bpipe.get_schedule_class("PipelineScheduleMulti") is multi
    with pytest.raises(ConfigurationError, match=r"no schedule is called '2F2B'; choose one of gpipe"):
        bpipe.get_schedule_class("2F2B")
    for base in (single, multi):
        with pytest.raises(ConfigurationError, match="runs nothing by itself: construct a schedule"):
            base(None, 2)
        with pytest.raises(ConfigurationError, match=r"Mine derives from PipelineSchedule\w+, which runs nothing"):
            type("Mine", (base,), {})


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"])
def test_arguments_by_position_are_torch_s(name: str) -> None:
    loopback = bpipe.Loopback(2)
    specs = () if name == "ScheduleLoopedBFS" else ((bpipe.TensorChunkSpec(0),), {"y": bpipe.TensorChunkSpec(1)})
    merged = (bpipe.TensorChunkSpec(0),)
    made = [
        getattr(bpipe, name)(own, M, mse, *specs, merged, False, True, True, options=bpipe.Options(timeout_s=5.0))
        for own in stages_of(loopback)
    ]
    assert not made[0].scale_grads and made[0].session.context.specs.output == merged
    assert (made[0]._args_chunk_spec, made[0]._kwargs_chunk_spec) == (specs or (None, None))
    x = torch.randn(2 * M, WIDTH)
    (out,) = loopback.step(made, x, target=x)
    assert out.shape == x.shape


def test_what_is_set_holds_from_the_next_step_on() -> None:
    loopback = bpipe.Loopback(2)
    made = [bpipe.ScheduleInterleaved1F1B(own, M, mse) for own in stages_of(loopback)]
    x, weight = torch.randn(2 * M, WIDTH), made[0]._stages[0].submod.weight
    outputs = loopback.step(made, x, target=x)
    for schedule in made:
        schedule._has_backward = False
    before = weight.grad.clone()
    losses: list[torch.Tensor] = []
    assert torch.equal(loopback.step(made, x, target=x, losses=losses), outputs) and torch.equal(weight.grad, before)
    for schedule in made:
        schedule._n_microbatches, schedule._has_backward, schedule._loss_fn = 2, True, lambda out, y: mse(out, y) * 2
    fewer: list[torch.Tensor] = []
    weight.grad = None
    loopback.step(made, x, target=x, losses=fewer)
    assert len(losses) == M and len(fewer) == made[0]._n_microbatches == 2
    torch.testing.assert_close(torch.stack(fewer).mean(), 2 * torch.stack(losses).mean())
    torch.testing.assert_close(weight.grad, 2 * before)
    for schedule in made:
        schedule._args_chunk_spec = (bpipe.TensorChunkSpec(1),)
    assert loopback.eval(made, torch.randn(3, 2 * M, WIDTH)).shape == (2 * 3, M, WIDTH)
    with pytest.raises(ConfigurationError, match="kwargs_chunk_spec"):
        made[0]._kwargs_chunk_spec = {"scale": "rows"}
    with pytest.raises(ConfigurationError, match="_n_microbatches=0"):
        made[0]._n_microbatches = 0


def test_balanced_takes_no_other_plan() -> None:
    group = bpipe.Loopback(1).rank(0)
    balanced = bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", group=group), 2, mse))
    for change in (lambda: setattr(balanced, "_n_microbatches", 3), lambda: balanced._load_csv("0F0,0F1,0B0,0B1")):
        with pytest.raises(ConfigurationError, match="Balanced makes its own plans: change the schedule before"):
            change()


def test_what_belongs_to_torch_s_runtime_is_refused_with_the_way_out() -> None:
    made = bpipe.PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))
    for owner, names, base in ((made, STAGE, bpipe.PipelineStage), (bpipe.OneFOneB(made, 2, mse), SCHEDULE, bpipe.OneFOneB)):
        for name, way in names.items():
            with pytest.raises(AttributeError) as raised:
                getattr(owner, name)
            assert str(raised.value) == f"{base.__name__} has no {name}, which is part of torch's runtime: {way}"
            with pytest.raises(ConfigurationError, match=f"Mine overrides {name}, which bpipe does not call"):
                type("Mine", (base,), {name: lambda self: None})
        with pytest.raises(AttributeError, match="object has no attribute 'colour'"):
            owner.colour  # noqa: B018
    made.clear_runtime_states()


# Orders in files.


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"])
def test_orders_go_through_files(name: str, form: Any, tmp_path: Path) -> None:
    """A file that torch could load: its rows are those of `pipeline_order`, or with transfers."""
    loopback, path = bpipe.Loopback(2), tmp_path / "order.csv"
    made = [getattr(bpipe, name)(own, M, mse) for own in stages_of(loopback)]
    made[0].dump_csv(path, form)
    order = made[0].pipeline_order if form == "compute_only" else made[0].pipeline_order_with_comms
    assert path.read_text().splitlines() == [",".join(map(str, order[rank])) for rank in (0, 1)]
    x = torch.randn(2 * M, WIDTH)
    loopback.step(made, x, target=x)
    other = bpipe.Loopback(2)
    loaded = [bpipe._PipelineScheduleRuntime(own, M, mse) for own in stages_of(other)]
    with pytest.raises(ConfigurationError, match=r"no order of computations yet: call load_csv\(path\) on all ranks"):
        loaded[0].step(x)
    for schedule in loaded:
        schedule._load_csv(path if schedule.rank else path.read_text(), format=form)
    other.step(loaded, x, target=x)
    assert loaded[1].plan.compute(1) == made[1].plan.compute(1) and loaded[0]._n_microbatches == M
    for one, two in zip(made, loaded):
        assert all(torch.equal(a.submod.weight.grad, b.submod.weight.grad) for a, b in zip(one._stages, two._stages))


def test_a_schedule_that_has_run_takes_another_order() -> None:
    loopback = bpipe.Loopback(2)
    made = [bpipe.ScheduleInterleaved1F1B(own, 2, mse) for own in stages_of(loopback)]
    x = torch.randn(4, WIDTH)
    first = loopback.step(made, x, target=x)
    rows = ["0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1", "1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1"]
    for schedule in made:
        schedule.load_csv("\n".join(rows))
    assert torch.equal(loopback.step(made, x, target=x), first)
    assert [[str(action) for action in made[0].plan.compute(rank)] for rank in (0, 1)] == [row.split(",") for row in rows]


def test_orders_that_do_not_fit_are_refused() -> None:
    runtime = bpipe.FromCSV([one for own in stages_of(bpipe.Loopback(2), 1) for one in own][:1], 2, mse)
    for text, error, message in (
        ("0F0,0B0\n1F0,1B0", ConfigurationError, "the CSV has 1 microbatches, and the schedule 2"),
        ("0F0,0F1,0B0,0B1", ConfigurationError, "is for 1 stages on 1 ranks, but these are 2 stages"),
        ("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0", PlanError, "1B1"),
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0", PlanError, "0B1 stands before 0B0"),  # as torch's LoopedBFS orders them
    ):
        with pytest.raises(error, match=message):
            runtime._load_csv(text)
    with pytest.raises(ConfigurationError, match="format='compute': choose 'compute_only' or 'compute_comms'"):
        runtime._load_csv("0F0,0B0", format="compute")
    with pytest.raises(FileNotFoundError):
        runtime._load_csv("nowhere.csv")


def test_a_plan_that_the_schedule_was_not_made_for_is_refused() -> None:
    """Slices, slots and places are settled when a schedule is made: another plan would cut or place wrongly, without an error."""
    text = bpipe.schedules.build("1f1b", 2, 2).to_csv()
    stage = stages_of(bpipe.Loopback(2), 1)[0][0]
    takes_slices = bpipe.PipelineStage(TakesSlices(), 0, 2, "cpu", group=bpipe.Loopback(2).rank(0))
    for schedule, message in (
        (bpipe.Seq1F1B(takes_slices, 2, mse, slices=2), "the plan has slices=1, and Seq1F1B was made with 2: use FromPlan"),
        (bpipe.OneFOneB(stage, 2, mse, options=bpipe.Options(slots=2)), "OneFOneB keeps to slots, which a CSV cannot say"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            schedule.load_csv(text)
    loaded = bpipe.OneFOneB(stage, 2, mse)
    loaded.load_csv(text)
    assert loaded.plan.name == "csv"
    with pytest.raises(ConfigurationError, match="the CSV that was loaded has 2 microbatches: load one for 4"):
        loaded._n_microbatches = 4


class TakesSlices(nn.Linear):
    """A layer that computes each position by itself."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past: object = None) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


def test_what_a_property_raises_is_seen() -> None:
    class Asks(bpipe.PipelineStage):
        @property
        def asked(self) -> object:
            return self.submod.no_such_layer

    asks = Asks(nn.Linear(2, 2), 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))
    with pytest.raises(AttributeError, match="no_such_layer"):
        _ = asks.asked
    with pytest.raises(AttributeError, match="OneFOneB has one stage, _stage"):
        _ = bpipe.OneFOneB(asks, 2)._stages


def test_a_base_class_that_overrides_torch_s_runtime_is_refused() -> None:
    class Mixin:
        def forward_one_chunk(self) -> None: ...

    with pytest.raises(ConfigurationError, match="overrides forward_one_chunk"):
        type("Mine", (Mixin, bpipe.PipelineStage), {})


def test_an_unused_argument_is_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    own = stages_of(bpipe.Loopback(2), 1)[0]
    bpipe.FromCSV(own, 2, mse, None, None, None, True)
    assert "use_full_backward is not used any more" in caplog.text
