"""Hypothesis, set for two busy cores: no deadline for one example, no store of earlier failures. One thread where bits count."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("bpipe", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bpipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write docs/faults.md from this run of tests/faults")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the ranks of `run_ranks`: sums are split, and so rounded, by the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
