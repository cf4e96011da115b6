"""The table of what PyTorch's tests say is true: every test of ours in it exists, and every difference is as it says."""

from __future__ import annotations

import ast
import inspect

import pytest
from torch.distributed import pipelining

from tests.dry_run.fake_group import fake_group
from tests.house.source import HERE
from tests.torch_api import test_ranks as ranks
from tests.torch_api.table import DIFFERENCES, RANKS, SAYS, Difference, page


def functions(path: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((HERE / path).read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_of_ours_exists() -> None:
    named = {ours for tests in SAYS.values() for some in tests.values() for ours in some}
    named |= {one.shown_by for one in DIFFERENCES if one.shown_by}
    missing = [one for one in named if one.split("::")[1] not in functions(one.split("::")[0])]
    assert len(named) > 25 and not missing


def test_statements_over_processes_run() -> None:
    """Those are no tests by themselves: one test runs them all."""
    named = {ours.split("::")[1] for tests in SAYS.values() for some in tests.values() for ours in some if ours.startswith(RANKS)}
    assert named - {"equals_torchs_own"} == {statement.__name__ for statement in ranks.STATEMENTS} - {
        "keyword_arguments_that_no_stage_uses"
    }


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch's tracer
@pytest.mark.parametrize("one", [one for one in DIFFERENCES if one.show is not None], ids=lambda one: one.tests.split(",")[0])
def test_what_differs_is_refused_in_words_that_name_the_way_out(one: Difference) -> None:
    assert one.show is not None
    with fake_group(0, size=3), pytest.raises((ValueError, AttributeError, TypeError)) as refusal:
        one.show()
    assert one.message and one.message in str(refusal.value)


@pytest.mark.parametrize("name", ["pass_stage_and_microbatch_indices", "executor"])
def test_arguments_that_the_installed_torch_does_not_have_either(name: str) -> None:
    """Once it has them, they are no longer only in its tests: bpipe has to say something about them."""
    if name in inspect.signature(pipelining.ScheduleGPipe).parameters | inspect.signature(pipelining.PipelineStage).parameters:
        pytest.fail(f"torch has {name} now: accept it, or refuse it with the way out")


def test_the_page_is_the_table() -> None:
    assert (HERE / "docs/torch-tests.md").read_text() == page()
