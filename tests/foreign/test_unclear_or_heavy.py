"""Calls, files and processes that are a little off: done, or refused with what is wrong and where."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import bpipe
import bpipe.errors
import bpipe.fill
from bpipe.comm.health.collective import RankLeftError
from bpipe.errors import BPipeError, ConfigurationError
from bpipe.overlap import TwoThreads
from bpipe.schedules import Costs, build, simulate
from bpipe.schedules.torch_csv import from_csv
from tests.over import nested
from tests.ranks import run_ranks

W = 4


def _alone(module: nn.Module | None = None, **options: Any) -> bpipe.OneFOneB:
    stage = bpipe.PipelineStage(module or nn.Linear(W, W), 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    return bpipe.OneFOneB(stage, 2, loss_fn=F.mse_loss, **nested(options))


def _is_clear(work: Callable[[], Any], *words: str) -> None:
    with pytest.raises((BPipeError, TypeError)) as caught:
        work()
    assert isinstance(caught.value, BPipeError) or "bpipe" not in str(caught.value), caught.value
    assert any(word in str(caught.value) for word in words), caught.value


ERRORS = [one for one in vars(bpipe.errors).values() if inspect.isclass(one) and issubclass(one, BPipeError)]


@pytest.mark.parametrize("kind", [*ERRORS, RankLeftError])
def test_errors_come_out_of_a_process_as_they_went_in(kind: type[BPipeError]) -> None:
    """`torch.multiprocessing`, `concurrent.futures` and pytest-xdist pickle an error to bring it to the parent."""
    error = kind("it went wrong")
    error.__dict__.update({name: 3 for name in ("rank", "step") if hasattr(error, name)})
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind and again.args == error.args and vars(again) == vars(error)


PICKLED: dict[str, Callable[[], Any]] = {
    "a balanced schedule": lambda: bpipe.Balanced(_alone()),
    "a loopback": lambda: bpipe.Loopback(2),
    "a rank of a loopback": lambda: bpipe.Loopback(2).rank(1),
    "a schedule that has stepped": lambda: _stepped(_alone()),
    "a stage whose schedule has stepped": lambda: _stepped(_alone()).stages[0],
    "a module that keeps its schedule": lambda: _keeps_its_schedule(),
    "a trace": lambda: bpipe.trace(_alone()),
}


def _stepped(schedule: bpipe.OneFOneB) -> bpipe.OneFOneB:
    schedule.step(torch.ones(4, W), target=torch.ones(4, W))
    return schedule


def _keeps_its_schedule() -> nn.Module:
    module = nn.Linear(W, W)
    module.schedule = _alone(module)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())])
@pytest.mark.parametrize("name", PICKLED)
def test_what_belongs_to_a_process_is_copied_or_refused_by_what_it_is(name: str, how: Callable[[Any], Any]) -> None:
    """A copy works, or the error says which object of bpipe it is; never what is inside of it, such as a lock."""
    try:
        how(PICKLED[name]())
    except (BPipeError, TypeError, pickle.PicklingError) as error:
        text = str(error)
        assert "lock" not in text and "weak" not in text and "local object" not in text, text


STRINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "stages of one name each": (lambda: bpipe.split_model(_chain(), ["0", "1"]), "list"),
    "one name for all layers": (lambda: bpipe.measure_layers(_chain(), torch.ones(2, W), layers="01"), "layers"),
    "users of a skip": (lambda: bpipe.PipelineStage(nn.Linear(W, W), 0, 4, "cpu", skips={"a": "03"}), "skip"),
    "a budget with a unit": (lambda: bpipe.Balanced(_alone(), budget="10GB"), "budget"),
    "numbers of stages": (lambda: _auto(stages_per_rank="12"), "stages_per_rank"),
    "sizes of microbatches": (lambda: _auto(microbatch_sizes="24"), "microbatch_sizes"),
    "nodes of the ranks": (lambda: _auto(nodes="0"), "nodes"),
    "slots": (lambda: _alone(slots="4"), "slots"),
    "a specification for each argument": (lambda: _alone(args_chunk_spec="0"), "args_chunk_spec"),
    "a timeout": (lambda: _alone(timeout_s="30"), "timeout_s"),
}


def _chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(W, W), nn.Linear(W, W))


def _auto(**options: Any) -> Any:
    return bpipe.auto(_chain(), torch.ones(8, W), F.mse_loss, target=torch.ones(8, W), group=bpipe.Loopback(1).rank(0), **options)


@pytest.mark.parametrize("name", STRINGS)
def test_a_text_is_not_read_letter_by_letter(name: str) -> None:
    """A text where a list or a number belongs is refused by the argument's name, before anything is measured."""
    work, word = STRINGS[name]
    _is_clear(work, word)


NUMBERS: dict[str, Any] = {
    "an array": lambda: np.array([4, 2, 2]),
    "numpy's numbers": lambda: [np.int64(4), np.int64(2), np.int64(2)],
    "tensors without dimensions": lambda: [torch.tensor(4), torch.tensor(2), torch.tensor(2)],
    "a size": lambda: torch.Size([4, 2, 2]),
    "shares as an array": lambda: np.array([0.5, 0.25, 0.25]),
    "a generator": lambda: (n for n in (4, 2, 2)),
    "a function that returns an array": lambda: lambda n: np.array([n // 2, n // 4, n // 4]),
    "numpy's function of the length": lambda: lambda n: torch.tensor([n // 2, n // 4, n // 4]),
}


class Sliced(nn.Linear):
    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:  # type: ignore[override]
        return super().forward(x), None


@pytest.mark.parametrize("name", NUMBERS)
def test_lengths_of_slices_are_numbers_of_any_library(name: str) -> None:
    """Lengths out of numpy or torch are lengths: outputs are those of the list, or the argument is refused by its name."""
    torch.manual_seed(0)
    module, x = Sliced(W, W), torch.randn(2, 8, W)

    def step() -> torch.Tensor:
        stage = bpipe.PipelineStage(module, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
        schedule = bpipe.Seq1F1B(stage, 2, loss_fn=F.mse_loss, slices=3, options=bpipe.Options(slice_lengths=NUMBERS[name]()))
        return schedule.step(x, target=x)  # type: ignore[no-any-return]

    try:
        assert torch.allclose(step(), nn.functional.linear(x, module.weight, module.bias), atol=1e-6)
    except ConfigurationError as error:
        assert "slice_lengths" in str(error)  # noqa: PT017


def _plan_text() -> str:
    return build("1f1b", num_stages=2, num_microbatches=4).to_csv()


CSVS: dict[str, Callable[[str], str]] = {
    "Windows' ends of lines": lambda text: text.replace("\n", "\r\n"),
    "a mark of the byte order": lambda text: "\ufeff" + text,
    "no newline at the end": lambda text: text.rstrip("\n"),
    "spaces behind commas": lambda text: text.replace(",", ", "),
    "a comma at the end of each line": lambda text: text.replace("\n", ",\n"),
    "quoted cells": lambda text: "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in text.splitlines()) + "\n",
    "blank lines at both ends": lambda text: "\n\n" + text + "\n\n",
    "a line of commas alone": lambda text: text + ",,,\n",
}


@pytest.mark.parametrize("name", CSVS)
def test_a_table_that_an_editor_has_saved_is_the_plan_that_it_was(name: str, tmp_path: Path) -> None:
    """What spreadsheets and editors do to a CSV changes nothing, or is refused with the line."""
    path = tmp_path / "plan.csv"
    path.write_bytes(CSVS[name](_plan_text()).encode())
    plain = from_csv(_plan_text())
    try:
        assert from_csv(path.read_bytes().decode()).to_csv() == plain.to_csv()
    except BPipeError as error:
        assert "line" in str(error) or "row" in str(error) or "rank" in str(error)  # noqa: PT017


def _timelines() -> list[Any]:
    return [simulate(build("1f1b", 2, 4), Costs(forward_s=0.1))]


FILES: dict[str, Callable[[str], Any]] = {
    "a trace": lambda path: bpipe.save_trace(_timelines(), path),
    "a table of the plan": lambda path: _alone().dump_csv(path),
}


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_said_with_the_name_of_the_file(name: str, tmp_path: Path) -> None:
    """A link to /dev/full stands for a disk without room: the error has the file's name."""
    path = tmp_path / "file.json"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"file\.json|/dev/full"):
        FILES[name](str(path))


def test_a_run_s_trace_says_which_file_a_full_disk_has_cut(tmp_path: Path) -> None:
    """The step is done by then; what is left of the file is none that reads as a whole trace."""
    (tmp_path / "rank-0.json").symlink_to("/dev/full")
    schedule = _alone()
    try:
        with bpipe.trace(schedule, tmp_path):
            _stepped(schedule)
    except OSError as error:
        assert "rank-0.json" in str(error)  # noqa: PT017
    else:
        assert len(bpipe.load_trace(tmp_path)) == 1  # the link was replaced by a file that has room


class Options(nn.Module):
    """A model with optional arguments of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: torch.Tensor, mask: Any = None, scale: float = 1.0, causal: bool = False) -> torch.Tensor:
        y = self.a(x)
        if mask is not None:
            y = y * mask
        if causal:
            y = y.cumsum(0)
        return self.b(y) * scale  # type: ignore[no-any-return]


OPTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "None by position": ((None,), {}),
    "None and a number by position": ((None, 2.0), {}),
    "a number by name": ((), {"scale": 2.0}),
    "a flag": ((), {"causal": True}),
    "None and a flag by name": ((), {"mask": None, "causal": False}),
    "a mask by name": ((), {"mask": torch.full((2, W), 0.5)}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_optional_arguments_of_a_traced_model_are_as_in_the_example(name: str) -> None:
    """Whatever kind an optional argument has, the parts compute what the model does with it."""
    args, kwargs = OPTIONS[name]
    torch.manual_seed(0)
    model, x = Options(), torch.randn(2, W)
    try:
        (first, last), skips = bpipe.split_traced(model, [["a"], ["b"]], (x, *args), kwargs)
    except ConfigurationError as error:
        assert any(word in str(error) for word in ("mask", "scale", "causal"))  # noqa: PT017
        return
    assert not skips
    passed = first(x, *args, **kwargs)
    assert torch.equal(last(*passed) if isinstance(passed, tuple) else last(passed), model(x, *args, **kwargs))


def _outside(rank: int) -> dict[str, str]:
    """What each helper says to a rank that is not in its group."""
    group = dist.new_group([0])
    if rank == 0:
        return {}
    module = nn.Linear(W, W)
    module.weight.grad = torch.ones(W, W)
    calls: dict[str, Callable[[], Any]] = {
        "a stage": lambda: bpipe.OneFOneB(bpipe.PipelineStage(module, 0, 1, "cpu", group=group), 2, loss_fn=F.mse_loss),
        "a norm": lambda: bpipe.clip_grad_norm_(module.parameters(), 1.0, group=group),
        "tied weights": lambda: bpipe.TiedWeights({"w": module.weight}, group=group),
        "a loss": lambda: bpipe.share_loss([torch.ones(())], group=group),
        "a checkpoint": lambda: bpipe.training_state(module, group=group)["model"].state_dict(),
        "a stream": lambda: bpipe.Stream(bpipe.PipelineStage(module, 0, 1, "cpu", group=group), F.mse_loss),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "works"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_a_rank_outside_of_a_group_is_told_so_by_every_helper() -> None:
    """torch gives such a rank a group that is none; each helper names that, and none waits or speaks of something else."""
    for name, said in run_ranks(_outside, 2)[1].items():
        assert said.startswith("ConfigurationError") and "group" in said, (name, said)


def _scalers(rank: int) -> dict[str, tuple[bool, float]]:
    """Whether a rank has stepped, and its scale, where one rank's optimizer has nothing to unscale."""
    found = {}
    for name in ("no gradients in this step", "no parameters left", "switched off", "saved and loaded"):
        weight = nn.Parameter(torch.zeros(2))
        if rank == 0 or name not in ("no gradients in this step", "no parameters left"):
            weight.grad = torch.ones(2)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        if name == "no parameters left" and rank == 1:
            optimizer.param_groups[0]["params"].clear()
        scaler = bpipe.GradScaler("cpu", init_scale=4.0, growth_interval=1, enabled=name != "switched off")
        if name == "saved and loaded":
            scaler.load_state_dict(copy.deepcopy(scaler.state_dict()))
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found[name] = bool((weight != 0).any()), scaler.get_scale()
    return found


def test_a_scaler_goes_on_where_a_rank_has_nothing_to_unscale() -> None:
    """Frozen stages, experts without tokens: the other ranks step, and the scale grows alike on all of them."""
    first, second = run_ranks(_scalers, 2)
    for name in first:
        assert first[name][0], name
        assert first[name][1] == second[name][1] == (1.0 if name == "switched off" else 8.0), name


def _threadless(rank: int) -> dict[str, str]:
    """What is said where a process cannot start a thread: in a step, a pair, a fill job, and at the end."""
    found, start = {}, threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def said(call: Callable[[], Any]) -> str:
        threading.Thread.start = refuse  # type: ignore[method-assign]
        try:
            call()
            return "works"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]

    x = torch.ones(12, W)
    stages = [bpipe.PipelineStage(nn.Linear(W, W), s, 4, "cpu") for s in (rank, 3 - rank)]
    schedule = bpipe.DualPipeV(stages, 6, loss_fn=F.mse_loss, overlapped=True)
    schedule.step(x, target=x)
    schedule.overlap = TwoThreads()
    found["a pair"] = said(lambda: schedule.step(x, target=x))
    found["closing a pair's schedule"] = said(schedule.close)
    plain = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(W, W), rank, 2, "cpu"), 2, loss_fn=F.mse_loss)
    for _ in range(4):
        plain.step(x, target=x)

    def set_job() -> None:
        plain.fill = bpipe.fill.Pieces(lambda: iter([None] * 9), unknown_s=0.0)
        plain.step(x, target=x)

    found["a fill job"] = said(set_job)
    found["closing"] = said(plain.close)
    return found


def test_a_process_without_threads_is_told_of_its_limit() -> None:
    """Where a thread is needed the error names the limit; where none is needed, or at the end, it works."""
    for ranks in run_ranks(_threadless, 2):
        for name, said in ranks.items():
            assert said == "works" or "limit of threads" in said, (name, said)
            assert not (name.startswith("closing") and said != "works"), (name, said)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "60 s", [60]])
@pytest.mark.parametrize("name", ["timeout_s", "slow_s"])
def test_seconds_that_are_none_are_refused_by_name(name: str, value: Any) -> None:
    """A timeout of zero, a negative one, no number: refused when the schedule is made, by the argument's name."""
    _is_clear(lambda: _alone(**{name: value}), name)


def test_the_number_of_descriptors_does_not_grow_with_closed_schedules() -> None:
    """Twenty schedules that were made, stepped and closed leave no descriptor behind."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        _stepped(_alone()).close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def _states(rank: int) -> dict[str, str]:
    """For each way to give modules and optimizers: 'same' if a state that was taken comes back, else what is said."""
    found = {}

    def made() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        whole = nn.ModuleDict({"a": nn.Linear(W, W), "b": nn.Linear(W, 2)})
        first, second = torch.optim.AdamW(whole["a"].parameters()), torch.optim.SGD(whole["b"].parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            whole["b"](whole["a"](torch.ones(1, W))).sum().backward()
            first.step()
            second.step()
        return whole, [first, second]

    class Stage(nn.Module):
        def __init__(self, name: str, layer: nn.Module) -> None:
            super().__init__()
            self.add_module(name, layer)

    ways: dict[str, Callable[[Any, Any], Any]] = {
        "tuples": lambda modules, both: (tuple(modules), tuple(both)),
        "generators": lambda modules, both: ((one for one in modules), (one for one in both)),
        "a ModuleList": lambda modules, both: (nn.ModuleList(modules), both),
        "a dict of optimizers by stage": lambda modules, both: (modules, dict(enumerate(both))),
        "a dict's views": lambda modules, both: (dict(enumerate(modules)).values(), dict(enumerate(both)).values()),
        "a scheduler of the rate": lambda modules, both: (modules, torch.optim.lr_scheduler.StepLR(both[0], 1)),
        "one optimizer twice": lambda modules, both: (modules, [both[0], both[0]]),
        "None among them": lambda modules, both: (modules, [both[0], None]),
    }
    for name, way in ways.items():
        whole, both = made()
        parts = [Stage("a", whole["a"]), Stage("b", whole["b"])]
        try:
            state = bpipe.training_state(*way(parts, both))
            taken = {key: copy.deepcopy(one.state_dict()) for key, one in state.items()}
            momentum = both[1].state[whole["b"].weight]["momentum_buffer"]
            moved = momentum.clone()
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter.zero_()
                momentum.zero_()
            for key, one in state.items():
                one.load_state_dict(taken[key])
            again = {key: one.state_dict() for key, one in state.items()}
            same = all(torch.equal(again["model"][key], value) for key, value in taken["model"].items())
            same &= torch.equal(both[1].state[whole["b"].weight]["momentum_buffer"], moved) or name == "one optimizer twice"
            found[name] = "same" if same and taken["model"] and bool(whole["a"].weight.any()) else "other"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


REFUSED_STATES = {"a scheduler of the rate", "one optimizer twice", "None among them"}


def test_modules_and_optimizers_come_in_any_container() -> None:
    """A state that was taken of several stages and optimizers comes back; what is none is refused by what it is."""
    (found,) = run_ranks(_states, 1)
    for name, said in found.items():
        if name in REFUSED_STATES:
            assert said == "same" or (said.startswith("ConfigurationError") and "optimizer" in said), (name, said)
        else:
            assert said == "same" or (name == "a ModuleList" and said.startswith("ConfigurationError")), (name, said)


def _limited(rank: int) -> dict[str, tuple[str, bool]]:
    """For each limit of rank 1's process: what is said, and whether gradients are those without it."""
    found: dict[str, tuple[str, bool]] = {}
    right: list[torch.Tensor] = []

    def limits(kind: int, value: int) -> Callable[[], object]:
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (value, hard))
        return lambda: resource.setrlimit(kind, (soft, hard))

    def no_folder() -> Callable[[], object]:
        here, gone = os.getcwd(), tempfile.mkdtemp()
        os.chdir(gone)
        os.rmdir(gone)
        return lambda: os.chdir(here)

    def mask() -> Callable[[], object]:
        before = os.umask(0o777)
        return lambda: os.umask(before)

    kinds: dict[str, Callable[[], Callable[[], object]]] = {
        "no limit": lambda: lambda: None,
        "files of no byte": lambda: limits(resource.RLIMIT_FSIZE, 0),
        "no locked memory": lambda: limits(resource.RLIMIT_MEMLOCK, 0),
        "files that nobody may open": mask,
        "a folder that is gone": no_folder,
        "no more descriptors": lambda: limits(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 1),
    }
    for name, limit in kinds.items():
        torch.manual_seed(rank)
        module = nn.Linear(256, 256)
        schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 2, "cpu"), 2, loss_fn=F.mse_loss)
        x = torch.ones(2048, 256)
        lift, begun = limit() if rank else (lambda: None), time.process_time()
        try:
            schedule.step(x, target=x, return_outputs=False)
            said = "works"
        except BPipeError as error:
            said = str(error)
        finally:
            lift()
            schedule.close()
        assert time.process_time() - begun < 5.0, name  # nobody spins
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        right = right or gradients
        found[name] = said, len(gradients) == 2 and all(map(torch.equal, gradients, right))
    return found


def test_a_process_at_a_limit_of_its_system_works_or_names_the_limit_on_every_rank() -> None:
    """Shared memory that cannot be made is replaced by sockets; where no socket can be made, both ranks say who lacks what."""
    first, second = run_ranks(_limited, 2)
    for name in first:
        if name == "no more descriptors":
            assert "rank 1" in first[name][0] and "open files" in first[name][0] and "open files" in second[name][0]
        else:
            assert first[name] == second[name] == ("works", True), name
