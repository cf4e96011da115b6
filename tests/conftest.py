"""Hypothesis for two busy cores: fewer examples, no deadline for one, no store of failures. One thread where bits count."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("bpipe", max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bpipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write docs/faults.md from this run of tests/faults")
    parser.addoption("--write-transformers", action="store_true", help="write docs/transformers.md from a sweep over all classes")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let both workers of a run, each of which begins with one half, run first what runs alone.

    So no worker waits until a long test of the other one has ended.
    """
    alone = [item for item in items if item.get_closest_marker("alone")]
    others = [item for item in items if not item.get_closest_marker("alone")]
    middle = len(items) // 2 - len(alone[::2])
    items[:] = alone[::2] + others[:middle] + alone[1::2] + others[middle:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests run two at a time, but for those that are marked `alone`."""
    with turn(is_alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def turn(*, is_alone: bool) -> Iterator[None]:
    """Wait for one's turn among the workers of a run: with others, or alone. Who waits to be alone goes before who comes later."""
    name = Path(tempfile.gettempdir()) / f"bpipe-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    with open(f"{name}-gate", "w") as gate, open(f"{name}-turn", "w") as mine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(mine, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the ranks of `run_ranks`: sums are split, and so rounded, by the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
