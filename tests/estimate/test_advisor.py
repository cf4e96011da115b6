"""Advice: what is ranked, and clear words for what cannot be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from bpipe.api.options import Options
from bpipe.errors import ConfigurationError
from bpipe.estimate.advisor import advise
from bpipe.estimate.devices import GIB, device_named
from bpipe.schedules import build, rules
from tests.estimate.samples import MODEL, SETUP, STAGE, between, first_line, stage


def test_everything_is_ranked() -> None:
    advice = advise(MODEL, attention="materialised", microbatch_sizes=[1, 2, 4], **SETUP)
    seen = {(one.schedule, one.is_balanced, one.microbatch_size, one.recomputation) for one in advice.candidates}
    ways = [("gpipe", False), ("1f1b", False), ("1f1b", True)]
    assert {one for one in seen if one[2] < 4} == {
        (*way, b, how) for way in ways for b in (1, 2) for how in ("none", "selective", "full")
    }
    said = next(text for text in advice.assumptions if text.startswith("Ranked are "))
    assert {one.schedule for one in advice.candidates} == {rule.name for rule in rules() if re.search(rf"\b{rule.name}\b", said)}
    fits = [one.fits for one in advice.candidates]
    assert fits == sorted(fits, reverse=True) and len(set(fits)) == 2
    for group in (True, False):
        steps = [one.step_s for one in advice.candidates if one.fits is group]
        assert all(before <= after * (1 + 1e-8) for before, after in pairwise(steps))
    for one in advice.candidates:
        assert one.fits is (max(one.device_peak_bytes) + max(advice.reserved_bytes, one.working_bytes) <= advice.memory_bytes)
        assert one.num_microbatches * one.microbatch_size == 32 and len(one.device_peak_bytes) == 8
        assert one.reason.startswith(f"rank {one.device_peak_bytes.index(max(one.device_peak_bytes))} needs")
        plan = build(one.schedule, one.num_stages, one.num_microbatches, slots=one.slots)
        assert any(plan.served) is one.is_balanced is (one.hides_at_bytes_per_s is not None)


def test_more_memory_never_makes_it_slower() -> None:
    steps = []
    for memory in (0.9, 1.2, 1.5, 1.8, 2.1, 2.5, 9):
        best = advise(MODEL, memory_bytes=round(memory * GIB), efficiency={1: 0.3, 2: 0.4, 4: 0.45}, **SETUP).best
        steps.append(best.step_s if best else float("inf"))
    assert steps == sorted(steps, reverse=True) and len(set(steps)) > 2


def test_recomputing_a_layer_needs_room() -> None:
    """What is set aside is not enough for a layer's recomputation: then that much is."""
    setup: dict[str, Any] = SETUP | {"recomputations": ["full"], "microbatch_sizes": [4], "attention": "materialised"}
    found = next(one for one in advise(MODEL, **setup).candidates if one.schedule == "1f1b" and not one.is_balanced)
    for missing in (0, 1):
        memory = max(found.device_peak_bytes) + found.working_bytes - missing
        advice = advise(MODEL, memory_bytes=memory, options=Options(reserve_bytes=found.working_bytes // 2), **setup)
        one = next(one for one in advice.candidates if one.schedule == "1f1b" and not one.is_balanced)
        assert one.fits is (missing == 0) and "are for recomputing a layer" in one.reason


def test_many_microbatches_are_tried_where_nothing_larger_fits() -> None:
    """1024 microbatches of 1 take long, and gain 1% at most where 2 fit plain with the same recomputation."""
    setup: dict[str, Any] = SETUP | {"num_stages": 4, "batch": 1024, "recomputations": ["none", "full"]}
    tried = {(one.microbatch_size, one.recomputation) for one in advise(MODEL, memory_bytes=4 * GIB, **setup).candidates}
    assert (2, "none") in tried and (1, "none") not in tried and max(tried) == (512, "none")
    tight = advise(MODEL, memory_bytes=_just_enough(1), **setup)
    tried = {(one.microbatch_size, one.recomputation) for one in tight.candidates}
    assert (1, "none") in tried and (1, "full") not in tried
    assert tight.best_plain is not None and (tight.best_plain.microbatch_size, tight.best_plain.recomputation) == (1, "none")


def _just_enough(size: int) -> int:
    """Memory in which a microbatch of `size` fits plain on 4 stages."""
    found = advise(MODEL, **(SETUP | {"num_stages": 4, "microbatch_sizes": [size], "recomputations": ["none"]})).candidates
    return round(next(max(one.device_peak_bytes) for one in found if one.schedule == "1f1b" and not one.is_balanced) / 0.95) + 2**20


def test_a_roomier_budget_is_taken_where_a_slow_link_makes_it_faster() -> None:
    """Between 5 slots and plain's 8 there are budgets that fit and move less."""
    setup: dict[str, Any] = SETUP | {"recomputations": ["none"], "microbatch_sizes": [2], "memory_bytes": between(1)}
    slow = [one for one in advise(MODEL, link=2e9, **setup).candidates if one.fits]
    assert [one.slots for one in slow] == [7, 5] and slow[0].step_s < slow[1].step_s
    fast = [one for one in advise(MODEL, **setup).candidates if one.fits]
    assert [one.slots for one in fast] == [5, 7]  # equally fast: the one that needs less is first


def test_several_numbers_of_stages_share_the_devices() -> None:
    advice = advise(MODEL, **(SETUP | {"num_stages": [4, 8]}))
    batches = {one.num_stages: one.num_microbatches * one.microbatch_size for one in advice.candidates}
    assert batches == {4: 16, 8: 32}  # of 8 devices: two pipelines of 4, one of 8
    assert all(one.sequences_per_s * one.step_s == pytest.approx(32) for one in advice.candidates)
    assert {one.num_stages for one in advise(MODEL, num_devices=16, **SETUP).candidates} == {8}


def test_links_across_nodes() -> None:
    """Pairs on one node: a slow network does not slow evictions down. Pairs apart: it does."""
    setup: dict[str, Any] = SETUP | {"microbatch_sizes": [1], "recomputations": ["none"], "cross_link": 1e9}
    exposed = []
    for nodes in ([0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]):
        found = [one for one in advise(MODEL, nodes=nodes, **setup).candidates if one.is_balanced]
        exposed.append(found[0].exposed_s / found[0].step_s)
    assert exposed[0] < 0.01 < exposed[1]


def test_json() -> None:
    advice = advise(MODEL, link=float("inf"), **SETUP)
    read = json.loads(advice.to_json())
    assert len(read["candidates"]) == len(advice.candidates) and read["verdict"] == advice.verdict
    assert read["link_bytes_per_s"] is None and read["candidates"][0]["name"] == advice.candidates[0].name
    assert (read["decision"], read["gain"]) == (advice.decision, advice.gain)
    assert advice.best and advice.best_plain and advice.best_balanced
    assert read["best"] == advice.best.name and read["best_plain"] == advice.best_plain.name
    assert read["best_balanced"] == advice.best_balanced.name and read["breaks_even_bytes_per_s"] is None
    nothing = advise(MODEL, memory_bytes=GIB // 2, **SETUP).to_dict()
    assert (nothing["decision"], nothing["gain"], nothing["best"]) == ("nothing fits", None, None)


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    advise(MODEL, microbatch_sizes=[1, 2], options=Options(progress=lambda *told: seen.append(told)), **SETUP)
    assert seen == [(done, 4) for done in range(5)]  # none and full; fused attention has nothing to recompute selectively


# From measurements.


def test_measured_stages() -> None:
    static = STAGE.static_bytes()
    setup: dict[str, Any] = {"batch": 64, "num_stages": 8, "options": Options(reserve_bytes=0), "memory_bytes": static + 1200}
    gains = advise(stage({1: 1.0, 2: 1.6}), **setup)  # plain: 8 x 100 or 16 x 100; balanced: 10 x 100
    assert first_line(gains).startswith("Balance: ") and "gains 25.0% per stage" in first_line(gains)
    assert {one.recomputation for one in gains.candidates} == {"as measured"}
    assert first_line(advise([stage({1: 1.0, 2: 2.0})] * 8, **(setup | {"num_stages": None}))).startswith(
        "Don't balance: it allows"
    )
    found = next(one for one in gains.candidates if one.schedule == "1f1b" and not one.is_balanced and one.microbatch_size == 1)
    assert found.device_peak_bytes[0] == static + 800 and found.step_s == pytest.approx((64 + 7) * 3.0)
    assert "took alone" in " ".join(gains.assumptions)


def test_measured_stages_of_unequal_length() -> None:
    advice = advise([stage({1: 1.0}), stage({1: 2.0})], batch=4, memory_bytes=10000)
    assert advice.candidates[0].step_s == pytest.approx(4 * 6.0 + 3.0)


# Bad input: one clear error.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt3-96"}, "did you mean 'gpt3-96b'"),
        ({"model": 5}, "model= is of type int"),
        ({"model": []}, "model= is of type list"),
        ({"device": "a100-80g"}, "did you mean 'a100-80gb'"),
        ({"device": 5}, "no device is called 5"),
        ({"device": None}, "how much memory"),
        ({"device": None, "memory_bytes": GIB}, "how fast is a device"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"options": Options(reserve_bytes=5 * GIB)}, "leaves nothing"),
        ({"options": Options(effort=5)}, "advise does not use effort"),
        ({"num_stages": None}, "into how many stages"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_stages": []}, "num_stages is empty"),
        ({"num_stages": 17}, "16 layers do not fill 17 stages"),
        ({"num_stages": [3, 8]}, "8 devices do not divide into pipelines of 3 stages"),
        ({"num_devices": 4}, "4 devices do not divide"),
        ({"num_devices": 24}, "32 sequences does not divide over 3 pipelines"),
        ({"batch": 0}, "batch=0"),
        ({"batch": "many"}, "batch='many'"),
        ({"tensor_parallel": 0}, "tensor_parallel=0"),
        ({"tensor_parallel": 32}, "16 heads of small do not divide"),
        ({"microbatch_sizes": [3]}, "does not divide into microbatches of 3"),
        ({"microbatch_sizes": [0]}, "microbatch size=0"),
        ({"microbatch_sizes": []}, "microbatch_sizes is empty"),
        ({"microbatch_sizes": [1, 2], "efficiency": {1: 0.4}}, "nothing is known about microbatch size 2"),
        ({"efficiency": {3: 0.4}}, r"none of the microbatch sizes \[3\] divides"),
        ({"efficiency": {}}, "efficiency={}"),
        ({"efficiency": 45}, "at most 1"),
        ({"efficiency": {1: 0}}, r"efficiency\[1\]=0"),
        ({"efficiency": "fast"}, "efficiency='fast'"),
        ({"attention": "flsh"}, "did you mean 'flash'"),
        ({"attention": "selective"}, "is a way to recompute"),
        ({"recomputations": ["som"]}, "no recomputation is called 'som'"),
        ({"recomputations": "selektive"}, "did you mean 'selective'"),
        ({"recomputations": []}, "recomputations is empty"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"precision": "fp32", "device": "a100-80gb"}, "known for 16 bits"),
        ({"layers": [1, 2]}, "give 8 numbers that make 16"),
        ({"layers": 5}, r"layers=\(5,\)"),
        ({"link": "nvlnk3"}, "did you mean 'nvlink3'"),
        ({"link": 0}, "link=0"),
        ({"cross_link": -1}, "cross_link=-1"),
        ({"cross_link": "pcie4"}, r"cross_link= needs nodes=.* such as nodes=\[0, 0, 1"),
        ({"nodes": [0, 1]}, "nodes has 2 entries"),
        ({"nodes": 5}, "nodes has 1 entries"),
        ({"nodes": ["a"] * 8}, "nodes='a'"),
        ({"nodes": [0] * 8, "num_stages": [4, 8]}, "nodes has 8 entries: give one for each of 4 ranks, and one number of stages"),
        ({"link": 10**400}, "link="),
        ({"sequence": 0}, "sequence=0"),
        ({"model": STAGE, "efficiency": 0.4}, "efficiency= says how to calculate"),
        ({"model": STAGE, "attention": "materialised"}, "attention= says how to calculate"),
        ({"model": STAGE, "precision": "fp32"}, "precision= says how to calculate"),
        ({"model": STAGE, "batch": 3}, r"none of the microbatch sizes \[2\] divides"),
        ({"model": [STAGE, STAGE]}, "2 profiles for 8 stages"),
        ({"model": [STAGE, 5]}, "model= is of type list"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    arguments = {"model": MODEL, **SETUP, **changes}
    with pytest.raises(ConfigurationError, match=message):
        advise(arguments.pop("model"), **arguments)


def test_recomputation_by_name() -> None:
    assert {one.recomputation for one in advise(MODEL, recomputations="full", **SETUP).candidates} == {"full"}  # type: ignore[arg-type]


def test_precision_of_a_device_of_ones_own() -> None:
    half, full = (advise(MODEL, precision=precision, **SETUP).candidates[0] for precision in ("bf16", "fp32"))
    assert full.device_peak_bytes[0] > half.device_peak_bytes[0]
    assert device_named("h100").memory_bytes == 80 * GIB


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; from bpipe.estimate.advisor import advise; import bpipe.estimate\n"
        "advise('gpt2', batch=8, num_stages=4, device='a100-80gb')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
