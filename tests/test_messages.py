"""Messages as a user meets them: they name the arguments that were given, and their tracebacks show the user's own code."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.cleanup import OWN_FILES
from bpipe.errors import BPipeError, BudgetError, ConfigurationError
from bpipe.model import chunks
from bpipe.schedules import Costs, Sizes
from tests.ranks import run_ranks

ROOMS = ["bpipe", *(f"bpipe.{name}" for name in ("schedules", "estimate", "slices", "fill", "overlap", "partition"))]
# What messages may name besides parameters of bpipe's public functions: attributes that users set, what modules and passes of a
# user take, what plans write, and torch's and torchtitan's own arguments.
OTHERS = {
    *("overlap", "fill", "past", "phase", "apply", "microbatches"),
    *("create_graph", "sparse", "inplace", "use_reentrant", "use_cache"),
    *("local_batch_size", "pipeline_parallel_microbatch_size", "balanced", "auto"),
}
MSE = nn.functional.mse_loss


def stages(
    p: int, loopback: bpipe.Loopback, num_stages: int = 0, module: type[nn.Module] = nn.Identity
) -> list[bpipe.PipelineStage]:
    layers = [nn.Sequential(nn.Linear(8, 8), module()) for _ in range(p)]
    return [bpipe.PipelineStage(one, x, num_stages or p, "cpu", loopback.rank(x)) for x, one in enumerate(layers)]


def pipeline(p: int, module: type[nn.Module] = nn.Identity, loss: Any = MSE) -> tuple[bpipe.Loopback, list[bpipe.OneFOneB]]:
    loopback = bpipe.Loopback(p)
    return loopback, [bpipe.OneFOneB(one, 4, loss) for one in stages(p, loopback, module=module)]


# A pipeline of another size than its group


@pytest.mark.parametrize(
    "num_stages, num_ranks, ways",
    [
        (8, 4, "make a Loopback of 8 ranks, give each rank a list of 2 stages, with a schedule such as Interleaved1F1B, or cut the "
         "model into num_stages=4"),
        (8, 3, "make a Loopback of 8 ranks, or cut the model into num_stages=3"),
        (4, 8, "give the stages group=, the process group of their own pipeline, if the other ranks train other ones, or cut the "
         "model into num_stages=8"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_ranks_says_what_would_fit(num_stages: int, num_ranks: int, ways: str) -> None:
    stage = stages(1, bpipe.Loopback(num_ranks), num_stages)[0]
    with pytest.raises(ConfigurationError) as refusal:
        bpipe.OneFOneB(stage, 8)
    needs = f"num_stages={num_stages} with 1 on each rank needs {num_stages} ranks, but the group has {num_ranks}"
    assert str(refusal.value) == f"{needs}: {ways}"


def test_several_stages_on_a_rank_count() -> None:
    loopback = bpipe.Loopback(2)
    given = [bpipe.PipelineStage(nn.Linear(8, 8), x, 8, "cpu", loopback.rank(0)) for x in (0, 4)]
    with pytest.raises(ConfigurationError, match=r"num_stages=8 with 2 on each rank needs 4 ranks, .* list of 4 .* num_stages=4$"):
        bpipe.Interleaved1F1B(given, 8)


# The arguments that messages name


def test_a_budget_is_named_as_balanced_calls_it() -> None:
    loopback, schedules = pipeline(4)
    balanced = [bpipe.Balanced(one, budget=100) for one in schedules]
    x = torch.randn(8, 8)
    with pytest.raises(BudgetError, match=r"The smallest budget that works here is budget=\d+ \(.*\)\.$") as refusal:
        loopback.step(balanced, x, target=x)
    assert f"budget={refusal.value.smallest[0]} " in str(refusal.value)


@pytest.mark.parametrize("more", [{}, {"by": "recompute"}, {"by": "evict_or_recompute", "costs": Costs(saved_bytes=8)}])
def test_every_way_to_keep_a_budget_names_it_alike(more: dict[str, Any]) -> None:
    _, schedules = pipeline(4)
    with pytest.raises(BudgetError, match=r" budget=\d+ \("):
        bpipe.Balanced(schedules[0], budget=7, sizes=Sizes.of([8] * 4), **more)


def test_optimizer_states_keep_the_smallest_budget() -> None:
    from bpipe.api.measured_plans import naming

    with pytest.raises(BudgetError, match="of optimizer states") as refusal, naming([1, 2]):
        raise BudgetError("too few", smallest=(24, 24))
    assert refusal.value.smallest == (24, 24)


def parameters_of(one: Any) -> Iterator[str]:
    for function in [one, *(vars(kind) for kind in one.__mro__[:-1])] if isinstance(one, type) else [one]:
        for each in function.values() if not callable(function) else [function]:
            each = getattr(each, "__func__", each)
            if callable(each):
                try:
                    yield from inspect.signature(each).parameters
                except (TypeError, ValueError):
                    continue


def test_messages_name_no_argument_that_nobody_can_give() -> None:
    public = [getattr(room, name) for room in map(import_module, ROOMS) for name in room.__all__]
    known = {name for one in public if callable(one) for name in parameters_of(one)} | OTHERS
    unknown = {}
    for path in Path(OWN_FILES).rglob("*.py"):
        raised = [node.exc for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Raise)]
        for node in filter(None, raised):
            texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
            named = set(re.findall(r"(?<![\w.-])([a-z_][a-z_0-9]*)=(?!=)", " ".join(texts)))
            unknown |= dict.fromkeys(named - known, f"{path.name}:{node.lineno}")
    assert unknown == {}


# Tracebacks


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the user's own")


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def mistakes() -> Iterator[BaseException]:
    """Make a mistake in each phase: when a schedule is constructed, when a call is prepared, and in the user's module and loss."""
    loopback = bpipe.Loopback(4)
    with pytest.raises(BudgetError) as refusal:
        bpipe.OneFOneB(stages(4, loopback)[0], 8, options=bpipe.Options(slots=1))
    yield refusal.value
    with pytest.raises(ConfigurationError) as refusal:
        bpipe.Interleaved1F1B(stages(1, loopback, 8), 8, slices=2)  # a class with a constructor of its own
    yield refusal.value
    with pytest.raises(ConfigurationError) as refusal:
        bpipe.Stream(stages(4, loopback)[0], MSE, optimizer=3)
    yield refusal.value
    for wrong, module, loss in ((7, nn.Identity, MSE), (8, Breaks, MSE), (8, nn.Identity, lambda output, target: output)):
        loopback, schedules = pipeline(2, module, loss)
        with pytest.raises((BPipeError, ArithmeticError)) as failure:
            loopback.step(schedules, torch.randn(wrong, 8), target=torch.randn(wrong, 8))
        yield failure.value


def test_tracebacks_lead_from_the_users_call_to_the_users_code() -> None:
    for error in mistakes():
        assert not [name for name in files_of(error) if name.startswith(OWN_FILES)], error
        shown = "".join(traceback.format_exception(error))
        assert "direct cause" not in shown and "another exception" not in shown
        last = traceback.extract_tb(error.__traceback__)[-1].name
        assert last == ("forward" if isinstance(error, ArithmeticError) else "mistakes")


def test_a_defect_of_bpipes_own_shows_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback, schedules = pipeline(2)
    monkeypatch.setattr(chunks, "_divided", None)
    with pytest.raises(TypeError) as failure:
        loopback.step(schedules, torch.randn(8, 8), target=torch.randn(8, 8))
    assert sum(name.startswith(OWN_FILES) for name in files_of(failure.value)) > 3
    monkeypatch.setattr(chunks, "_divided", textwrap.indent)  # what a library raises says where it was called
    with pytest.raises(AttributeError, match="splitlines") as failure:
        loopback.step(schedules, torch.randn(8, 8), target=torch.randn(8, 8))
    assert [Path(name).name for name in files_of(failure.value) if name.startswith(OWN_FILES)] == ["chunks.py"]


def test_the_environment_asks_for_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BPIPE_TRACEBACKS", "full")
    for error in mistakes():
        assert [name for name in files_of(error) if name.startswith(OWN_FILES)], error


def failing_step(rank: int) -> str:
    """What a rank prints of a step that fails in the module of rank 1."""
    stage = bpipe.PipelineStage(Breaks() if rank == 1 else nn.Linear(8, 8), rank, 4, "cpu")
    schedule = bpipe.OneFOneB(stage, 8, MSE)
    x = torch.randn(8, 8)
    with pytest.raises((ArithmeticError, BPipeError)) as failure:
        schedule.step(x, target=x)
    return "".join(traceback.format_exception(failure.value))


def test_four_ranks_report_one_mistake_in_a_few_lines() -> None:
    """Each rank says what it knows: the error's own rank where it is, the others whose it was, and where they noticed."""
    for rank, printed in enumerate(run_ranks(failing_step, 4)):
        assert "ArithmeticError: the user's own" in printed and "in forward" in printed
        assert rank == 1 or "RankFailedError: rank 1 failed in step 0, stage 1, microbatch 0, action 1F0: " in printed
        assert rank == 1 or f"noticed on rank {rank}" in printed
        assert printed.count("\n") <= 14 and OWN_FILES not in printed and "direct cause" not in printed
