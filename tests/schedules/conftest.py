"""What tests of schedules share."""

from collections.abc import Iterator

import pytest

from bpipe.passes.balance import problem


@pytest.fixture(scope="module")
def little_effort() -> Iterator[None]:
    """Random plans in bytes are many, and judged by whether they are sound: a short search for cheaper ones does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "SEARCH_BUDGET", 2_000)
        yield
