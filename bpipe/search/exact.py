"""The fastest order of a small problem, and a bound that proves it, by constraint programming (OR-tools' CP-SAT).

It needs the extra `search`. Some hundred computations take seconds or minutes; for more, `bpipe search` finds orders without proof.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.extras import how_to_install
from bpipe.search.job_shop import SAME_RANK, JobShop, Lanes

__all__: list[str] = []

TICKS = 1_000_000  # in the first order's step: times are whole numbers of ticks


class Proven(NamedTuple):
    """An order, how long it takes, and what none can beat."""

    lanes: Lanes
    step_s: float
    least_s: float


def exact(shop: JobShop, limits: Sequence[int | None], first: Lanes, *, seconds: float = 30.0) -> Proven:
    """Return the fastest order within limits of memory, or the best one that is found in some seconds.

    Args:
        shop: the work: computations, without evictions.
        limits: the most memory of each rank's own microbatches, in the plan's unit; None: no limit.
        first: an order that ends and fits, to start from.
        seconds: after which the search ends without a proof; Ctrl-C waits for its end.

    Raises:
        ConfigurationError: OR-tools is not installed.

    Example:
        >>> from bpipe.schedules import Costs, build
        >>> shop = JobShop(build("1f1b", num_stages=2, num_microbatches=3), Costs())
        >>> found = exact(shop, limits=[2, 2], first=shop.lanes)
        >>> found.step_s, round(found.least_s, 2)
        (12.0, 12.0)
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigurationError(f"exact orders need OR-tools: {how_to_install('search')}") from None
    times = shop.run(first)
    assert times is not None, "the first order ends"
    model, tick_s = cp_model.CpModel(), times.step_s / TICKS
    begins = _modelled(model, shop, limits, tick_s, round(1.01 * TICKS))
    for number, begin_s in enumerate(times.begin_s):
        model.add_hint(begins[number], int(begin_s / tick_s))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # or Ctrl-C would end the process at once ever after
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proven(first, times.step_s, solver.best_objective_bound * tick_s)
    places = {number: place for lane in first for place, number in enumerate(lane)}
    lanes = [sorted(lane, key=lambda number: (solver.value(begins[number]), places[number])) for lane in shop.lanes]
    found = shop.run(lanes)
    if found is None or found.step_s > times.step_s or not all(map(shop.fits, lanes, limits)):
        lanes, found = first, times
    return Proven(lanes, found.step_s, min(found.step_s, solver.best_objective_bound * tick_s))


def _modelled(model: Any, shop: JobShop, limits: Sequence[int | None], tick_s: float, horizon: int) -> list[Any]:
    """Add the work to a model that makes the step short, and return when each item begins, in ticks.

    Times are rounded down, so that a bound of the model is a bound of the step.
    """
    ticks = [int(seconds / tick_s) for seconds in shop.seconds]
    begins = [model.new_int_var(0, horizon, "") for _ in ticks]
    step = model.new_int_var(0, horizon, "")
    on_link: dict[int, list[Any]] = defaultdict(list)
    for number, consumers in enumerate(shop.consumers):
        ended = begins[number] + ticks[number]
        model.add(step >= ended)
        for other in shop.earlier[number]:
            model.add(begins[number] >= begins[other] + ticks[other])
        for consumer, link, seconds, latency_s in consumers:
            takes, latency = int(seconds / tick_s), int(latency_s / tick_s)
            if link == SAME_RANK or not takes:
                model.add(begins[consumer] >= ended + takes + latency)
                continue
            leaves = model.new_int_var(0, horizon, "")
            model.add(leaves >= ended)
            model.add(begins[consumer] >= leaves + takes + latency)
            on_link[link].append(model.new_fixed_size_interval_var(leaves, takes, ""))
    for intervals in on_link.values():
        model.add_no_overlap(intervals)
    for lane, limit in zip(shop.lanes, limits):
        model.add_no_overlap([model.new_fixed_size_interval_var(begins[number], ticks[number], "") for number in lane])
        if limit is not None:
            changes = [(begins[number], shop.takes[number]) for number in lane if shop.takes[number]]
            changes += [(begins[number] + ticks[number], -shop.gives[number]) for number in lane if shop.gives[number]]
            model.add_reservoir_constraint([at for at, _ in changes], [by for _, by in changes], 0, limit)
    model.minimize(step)
    return begins
