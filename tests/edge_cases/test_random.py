"""Random modules and loops: the same bits as a single process, under a random schedule."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.edge_cases.random_loops import Loop, alone, loops, many, piped, some

pytestmark = pytest.mark.usefixtures("one_thread")


@some(25)
@given(loop=loops())
def test_random_loops_equal_a_single_process(loop: Loop) -> None:
    assert piped(loop).differences(alone(loop)) == []


@pytest.mark.timeout(1800)
@many(75)
@given(loop=loops())
def test_many_random_loops(loop: Loop) -> None:
    assert piped(loop).differences(alone(loop)) == []
