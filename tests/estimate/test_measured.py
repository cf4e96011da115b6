"""Profiles as data: JSON and back, and costs of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.estimate import Measurement, Profile
from bpipe.estimate.measured import costs_of
from bpipe.schedules import Link, Op, build, simulate

counts = st.integers(0, 2**50)
times = st.floats(0, 1e3, allow_nan=False)
measurements = st.builds(
    Measurement,
    microbatch_size=st.integers(1, 64),
    own_bytes=counts,
    movable_bytes=counts,
    shared_bytes=counts,
    output_bytes=counts,
    input_gradient_bytes=counts,
    forward_s=times,
    backward_s=times,
)
profiles = st.builds(
    Profile,
    name=st.text(max_size=9),
    device=st.text(max_size=9),
    num_parameters=counts,
    num_trainable=counts,
    parameter_bytes=counts,
    gradient_bytes=counts,
    buffer_bytes=counts,
    measurements=st.lists(measurements, max_size=3).map(tuple),
)

ONE = Measurement(
    microbatch_size=2,
    own_bytes=100,
    movable_bytes=90,
    shared_bytes=7,
    output_bytes=10,
    input_gradient_bytes=11,
    forward_s=1.0,
    backward_s=2.0,
)
STAGE = Profile(
    name="Stage",
    device="cpu",
    num_parameters=10,
    num_trainable=8,
    parameter_bytes=40,
    gradient_bytes=32,
    buffer_bytes=5,
    measurements=(ONE,),
)


@given(profiles)
def test_json_and_back(one: Profile) -> None:
    assert Profile.from_json(one.to_json()) == one


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"measurements": [1]}', STAGE.to_json().replace("own_bytes", "other_bytes")])
def test_json_that_is_no_profile(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no profile"):
        Profile.from_json(text)


def test_static_bytes() -> None:
    assert STAGE.static_bytes() == 40 + 32 + 5 + 8 * 8
    assert replace(STAGE, parameter_bytes=20, gradient_bytes=16).static_bytes() == 20 + 16 + 5 + 8 * 12
    assert STAGE.static_bytes(18) == 8 * 18 + 2 * 4 + 5


def test_costs() -> None:
    last = replace(STAGE, measurements=(replace(ONE, output_bytes=0, input_gradient_bytes=13, forward_s=3.0),))
    costs = costs_of([STAGE, STAGE, last], 2, link=Link(bytes_per_s=5.0))
    assert [costs.seconds(Op.F, x, 0) for x in range(3)] == [1.0, 1.0, 3.0]
    assert (costs.saved(0), costs.movable(0), costs.static(0)) == (100, 90, STAGE.static_bytes() + 7)
    assert [costs.message(Op.SEND_F, x) for x in (0, 1)] == [10, 10]
    assert [costs.message(Op.SEND_B, x) for x in (1, 2)] == [11, 13]
    assert simulate(build("1f1b", 3, 4), costs).peak_bytes(0) == 3 * 100 + STAGE.static_bytes() + 7


def test_sizes_that_were_not_measured() -> None:
    with pytest.raises(ConfigurationError, match=r"microbatch size 4 of Stage was not measured, only 2"):
        costs_of([STAGE], 4)
    with pytest.raises(ConfigurationError, match="no profiles"):
        costs_of([], 2)
