"""Random models, plans and features take what their plans say, at every action; `random_memory` runs more of them."""

from __future__ import annotations

import pytest

from tests.together.random_memory import differences

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(60))
def test_a_random_model_takes_what_its_plan_says(seed: int) -> None:
    assert not differences(seed)
