"""Profiles as data: JSON and back, and costs of a plan."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.estimate import Measurement, Profile, costs_of
from bpipe.schedules import Action, Link, Op, build, simulate
from tests.estimate.samples import ONE, STAGE

counts = st.integers(0, 2**50)
times = st.floats(1e-9, 1e3)
measurements = st.builds(
    Measurement,
    microbatch_size=st.integers(1, 64),
    own_bytes=st.integers(2**49, 2**50),
    movable_bytes=st.integers(0, 2**49),
    shared_bytes=counts,
    output_bytes=counts,
    input_gradient_bytes=counts,
    forward_s=times,
    backward_s=times,
)
measurements |= st.builds(lambda one, i, w: replace(one, input_s=i, weight_s=w), measurements, times, times)


def in_order(found: list[Measurement]) -> tuple[Measurement, ...]:
    return tuple(sorted(found, key=lambda one: one.microbatch_size))


profiles = st.builds(
    Profile,
    name=st.text(max_size=9),
    device=st.text(max_size=9),
    num_parameters=st.integers(2**49, 2**50),
    num_trainable=st.integers(0, 2**49),
    parameter_bytes=st.integers(2**49, 2**50),
    trainable_bytes=st.integers(0, 2**49),
    gradient_bytes=counts,
    buffer_bytes=counts,
    measurements=st.lists(measurements, min_size=1, max_size=3, unique_by=lambda one: one.microbatch_size).map(in_order),
)


@given(profiles)
def test_json_and_back(one: Profile) -> None:
    assert Profile.from_json(one.to_json()) == one


def changed(name: str, value: object) -> str:
    """A profile's JSON with another value for a field, of the profile or of its measurement."""
    fields = json.loads(STAGE.to_json())
    (fields if name in fields else fields["measurements"][0])[name] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "5", "null", '{"measurements": [1]}', "[" * 100_000, '{"a":' * 100_000, None, 5, b"\xff", "9" * 5000),
        *(STAGE.to_json().replace("own_bytes", "other_bytes"), changed("measurements", []), changed("measurements", {})),
        *(changed("name", 5), changed("num_trainable", 11), changed("trainable_bytes", 41), changed("parameter_bytes", "40")),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_json_that_is_no_profile(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a profile"):
        Profile.from_json(text)


@given(
    st.sampled_from(sorted(set(json.loads(STAGE.to_json())) | set(asdict(ONE)))), st.sampled_from([-1, -0.5, True, [], {}, None])
)
def test_fields_that_make_no_profile(name: str, value: object) -> None:
    if name in ("input_s", "weight_s") and value is None:
        return  # not measured
    with pytest.raises(ConfigurationError, match="not a profile"):
        Profile.from_json(changed(name, value))


@pytest.mark.parametrize(
    "changes",
    [
        *({"forward_s": 0}, {"forward_s": float("inf")}, {"forward_s": 10**400}, {"backward_s": float("nan")}),
        *({"backward_s": False}, {"movable_bytes": 101}, {"microbatch_size": 0}, {"own_bytes": 1.0}),
        *({"input_s": 1.0}, {"weight_s": 1.0}, {"input_s": 0.0, "weight_s": 1.0}, {"weight_s": -1.0, "input_s": 1.0}),
    ],
)
def test_impossible_measurements(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        replace(ONE, **changes)


def test_measurements_are_one_a_size() -> None:
    for sizes in ([2, 1], [2, 2]):
        with pytest.raises(ConfigurationError, match="increasing order"):
            replace(STAGE, measurements=tuple(replace(ONE, microbatch_size=size) for size in sizes))


def test_forwards_alone_are_no_step() -> None:
    alone = replace(STAGE, measurements=(replace(ONE, backward_s=0.0),))
    with pytest.raises(ConfigurationError, match="only the forward of Stage was measured"):
        costs_of([STAGE, alone], 2)


def test_static_bytes() -> None:
    assert STAGE.static_bytes() == 40 + 32 + 5 + 8 * 8
    half = replace(STAGE, parameter_bytes=20, trainable_bytes=16, gradient_bytes=16)
    assert half.static_bytes() == 20 + 16 + 5 + 8 * 12
    assert STAGE.static_bytes(18) == 8 * 18 + 2 * 4 + 5


def test_adapters_in_fp32_on_a_frozen_base_in_16_bits() -> None:
    """LoRA: 1000 frozen parameters of 2 bytes, 10 trainable ones of 4, which are their own fp32 copies."""
    lora = replace(STAGE, num_parameters=1010, num_trainable=10, parameter_bytes=2040, trainable_bytes=40, gradient_bytes=40)
    assert lora.static_bytes() == 2040 + 40 + 5 + 10 * 8
    assert lora.static_bytes(18) == 2000 + 10 * 18 + 5
    mixed = replace(lora, num_trainable=14, trainable_bytes=48, gradient_bytes=48)  # and 4 trainable ones of 2 bytes
    assert mixed.static_bytes() == 2040 + 48 + 5 + 14 * 8 + 4 * 4


def test_costs() -> None:
    last = replace(STAGE, measurements=(replace(ONE, output_bytes=0, input_gradient_bytes=13, forward_s=3.0),))
    costs = costs_of([STAGE, STAGE, last], 2, link=Link(bytes_per_s=5.0))
    assert [costs.seconds(Op.F, x, 0) for x in range(3)] == [1.0, 1.0, 3.0]
    assert (costs.saved(0), costs.movable(0), costs.static(0)) == (100, 90, STAGE.static_bytes() + 7)
    assert [costs.carried(Action(Op.SEND_F, x, 0)) for x in (0, 1)] == [10, 10]
    assert [costs.carried(Action(Op.SEND_B, x, 0)) for x in (1, 2)] == [11, 13]
    assert simulate(build("1f1b", 3, 4), costs).device_peak_bytes(0) == 3 * 100 + STAGE.static_bytes() + 7


def test_costs_of_halves() -> None:
    """Measured ones, or half of a backward each, as in profiles of earlier versions, whose JSON has none."""
    halved = replace(STAGE, measurements=(replace(ONE, input_s=1.25, weight_s=0.5),))
    fields = json.loads(STAGE.to_json())
    for name in ("input_s", "weight_s"):
        del fields["measurements"][0][name]
    costs = costs_of([halved, Profile.from_json(json.dumps(fields))], 2)
    assert [[costs.seconds(op, stage, 0) for op in (Op.B, Op.I, Op.W)] for stage in (0, 1)] == [[2.0, 1.25, 0.5], [2.0, 1.0, 1.0]]
    assert simulate(build("zb_h1", 2, 1), costs).work_s(0) == 1.0 + 1.25 + 0.5


def test_equal_stages_take_exactly_as_long() -> None:
    """Sums of those before would round the later ones, and so decide which of two equal plans is the faster one."""
    odd = replace(STAGE, measurements=(replace(ONE, forward_s=0.1, backward_s=0.24, input_s=0.13, weight_s=0.11),))
    costs = costs_of([odd] * 5, 2)
    assert [{*series} for series in (costs.forward_s, costs.backward_s, costs.input_s, costs.weight_s)] == [
        {0.1},
        {0.24},
        {0.13},
        {0.11},
    ]


def test_sizes_that_were_not_measured() -> None:
    with pytest.raises(ConfigurationError, match=r"microbatch size 4 of Stage was not measured, only 2"):
        costs_of([STAGE], 4)
    with pytest.raises(ConfigurationError, match="no profiles"):
        costs_of([], 2)
