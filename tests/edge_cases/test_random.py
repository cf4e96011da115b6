"""Random modules and loops: the same bits as a single process, under a random schedule."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.edge_cases.random_loops import Loop, alone, loops, piped

pytestmark = pytest.mark.usefixtures("one_thread")

MANY = int(os.environ.get("BPIPE_RANDOM_LOOPS", "500"))  # 2,000 by hand; other ones in each run


@settings(max_examples=50, derandomize=True, suppress_health_check=[*HealthCheck])
@given(loop=loops())
def test_random_loops_equal_a_single_process(loop: Loop) -> None:
    assert piped(loop).differences(alone(loop)) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, suppress_health_check=[*HealthCheck])
@given(loop=loops())
def test_many_random_loops(loop: Loop) -> None:
    assert piped(loop).differences(alone(loop)) == []
