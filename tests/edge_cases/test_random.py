"""Random modules and loops: the same bits as a single process, under a random schedule."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.edge_cases.random_loops import Loop, alone, loops, piped

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = int(os.environ.get("BPIPE_RANDOM_LOOPS", "50"))  # 2,000 took a quarter of an hour


@settings(max_examples=EXAMPLES, derandomize=EXAMPLES == 50, suppress_health_check=[*HealthCheck])
@given(loop=loops())
def test_random_loops_equal_a_single_process(loop: Loop) -> None:
    assert piped(loop).differences(alone(loop)) == []
