"""The lengths of slices by cost: equal to brute force, and to the simulated step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random

import pytest

from bpipe.errors import ConfigurationError
from bpipe.partition.sequence import MOST_SLICES, Order, SliceCost, slice_lengths
from bpipe.schedules import Costs, build, simulate


def attention(share: float, num_tokens: int, overhead: float = 0.0) -> SliceCost:
    """Of a sequence that costs 1, causal attention takes this share, and each slice costs something for itself."""

    def cost(length: int, context: int) -> float:
        return overhead + (1 - share) * length / num_tokens + share * (2 * context * length + length**2) / num_tokens**2

    return cost


def costs_of(lengths: tuple[int, ...], cost: SliceCost) -> list[float]:
    return [cost(length, sum(lengths[:s])) for s, length in enumerate(lengths)]


def step_s(order: Order, lengths: tuple[int, ...], cost: SliceCost, p: int, m: int) -> float:
    slices = costs_of(lengths, cost)
    return (m * len(slices) + p - 1) * max(slices) if order == "seq_1f1b" else m * sum(slices) + (p - 1) * max(slices)


def all_lengths(num_tokens: int, k: int | None) -> Iterator[tuple[int, ...]]:
    for number in range(1, num_tokens + 1) if k is None else (k,):
        for cuts in combinations(range(1, num_tokens), number - 1):
            yield tuple(end - begin for begin, end in pairwise((0, *cuts, num_tokens)))


@pytest.mark.parametrize("seed", range(100))
def test_no_other_lengths_are_faster(seed: int) -> None:
    """Any costs, monotonous or not, in both orders, for a number of slices or the best one."""
    random = Random(seed)
    num_tokens, p, m = random.randint(1, 9), random.randint(1, 9), random.randint(1, 3)
    k = random.choice([None, random.randint(1, num_tokens)])
    table = {(n, c): random.choice([random.random(), n * (1 + c)]) for n in range(1, 10) for c in range(10)}
    costs = [attention(random.random(), num_tokens, random.choice([0.0, 0.05])), lambda n, c: table[n, c]]
    cost = random.choice(costs)
    for order in ("seq_1f1b", "tera_pipe"):
        found = slice_lengths(num_tokens, cost, num_stages=p, num_microbatches=m, num_slices=k, order=order, tolerance=0.0)
        least = min(step_s(order, lengths, cost, p, m) for lengths in all_lengths(num_tokens, k))
        assert sum(found) == num_tokens and len(found) == (k or len(found))
        assert step_s(order, found, cost, p, m) == pytest.approx(least)


@pytest.mark.parametrize("order", ["seq_1f1b", "tera_pipe"])
def test_lengths_where_attention_takes_half(order: Order) -> None:
    lengths = slice_lengths(500, attention(0.5, 500), num_stages=8, num_slices=4, order=order, tolerance=0.0)
    assert [length / 500 for length in lengths] == pytest.approx([0.366, 0.252, 0.205, 0.177], abs=0.0025)
    assert costs_of(lengths, attention(0.5, 500)) == pytest.approx([0.25] * 4, abs=3e-3)


def test_without_attention_slices_are_equal() -> None:
    assert slice_lengths(120, attention(0.0, 120), num_stages=4, num_slices=3) == (40, 40, 40)


@pytest.mark.parametrize("order", ["seq_1f1b", "tera_pipe"])
def test_what_a_slice_costs_for_itself_limits_their_number(order: Order) -> None:
    few, many = (
        slice_lengths(96, attention(0.3, 96, overhead), num_stages=8, order=order, num_microbatches=2, multiple_of=2)
        for overhead in (0.03, 0.003)
    )
    assert 1 < len(few) < len(many) <= MOST_SLICES


def test_one_sequence_alone_is_almost_p_over_overhead_times_faster() -> None:
    """TeraPipe's case: p = 8, one sequence, 1% overhead for each slice."""
    cost = attention(0.2, 64, 0.01)
    lengths = slice_lengths(64, cost, num_stages=8, order="tera_pipe")
    assert 8 * cost(64, 0) / step_s("tera_pipe", lengths, cost, 8, 1) == pytest.approx(4.9, abs=0.15)


def test_the_step_is_the_simulated_one() -> None:
    p, m, cost = 4, 3, attention(0.6, 60, 0.01)
    for order in ("seq_1f1b", "tera_pipe"):
        lengths = slice_lengths(60, cost, num_stages=p, num_microbatches=m, num_slices=5, order=order)
        plan = build(order, p, m, slices=5)
        step = simulate(plan, Costs(forward_s=[costs_of(lengths, cost)] * p)).makespan_s
        told = 3 * step_s(order, lengths, cost, p, m)  # a backward takes two forwards
        assert step == pytest.approx(told) if order == "tera_pipe" else 0.95 * told < step <= told


def test_lengths_are_multiples_but_for_the_last() -> None:
    lengths = slice_lengths(1000, attention(0.5, 1000), num_stages=4, num_slices=4, multiple_of=64)
    assert sum(lengths) == 1000 and all(length % 64 == 0 for length in lengths[:-1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_stages": 0}, "num_stages=0: give a whole number of at least 1"),
        ({"num_slices": True}, "num_slices=True"),
        ({"num_slices": 9}, "num_slices=9: 64 tokens in multiples of 8 make at most 8 slices"),
        ({"order": "1f1b"}, "order='1f1b': choose 'seq_1f1b' or 'tera_pipe'"),
    ],
)
def test_what_cannot_be_cut_is_refused(given: dict[str, int], message: str) -> None:
    arguments = {"num_stages": 2, "multiple_of": 8, **given}
    with pytest.raises(ConfigurationError, match=message):
        slice_lengths(64, attention(0.0, 64), **arguments)  # type: ignore[arg-type]
