"""Find the smallest budget that works, and name it in the error for a budget that is too small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from bpipe.errors import BudgetError
from bpipe.plan.amounts import show_each
from bpipe.plan.plan import Plan

__all__: list[str] = []

FINENESS = 1024  # a peak is found to within this fraction of it

Budgets = tuple[int | None, ...]
T = TypeVar("T")


def smallest(attempt: Callable[[int], tuple[int, T] | None], least: int, found: tuple[int, T], highest: int) -> tuple[int, T]:
    """Find the smallest amount that works by bisection, because an amount that works is rare below one that does not.

    Args:
        attempt: returns the result for an amount, and the amount that the result needs, or None if the amount does not work.
        least: no smaller amount is tried.
        found: an amount that works, and its result.
        highest: the highest peak; the result is exact to within 1/1024 of it.

    Returns:
        The amount that is needed, and its result.
    """
    while found[0] - least >= max(1, highest // FINENESS):
        middle = (least + found[0]) // 2
        tried = attempt(middle)
        if tried is None:
            least = middle + 1
        else:
            found = tried
    return found


def raised(budgets: Budgets, more: int) -> Budgets:
    """Raise all budgets by `more`."""
    return tuple(None if one is None else one + more for one in budgets)


def refusal(plan: Plan, given: Budgets, lacking: str, smallest: Budgets) -> BudgetError:
    """Return the error for budgets that cannot be met; it names the smallest ones that can."""
    is_slots = plan.sizes is None
    argument = f"{'slots' if is_slots else 'budgets'}={shown(smallest)}"
    named = argument if is_slots else f"{argument} ({show_each(smallest)})"
    return BudgetError(
        f"{shown(given)} {'slots' if is_slots else 'bytes'} are too few for {plan.name} "
        f"with {plan.num_stages} stages and {plan.num_microbatches} microbatches: {lacking}. "
        f"{'The' if len(set(given)) == 1 else 'With all raised alike, the'} smallest budget that works here is {named}.",
        smallest=smallest,
        argument=argument,
    )


@contextmanager
def asked_as_budget() -> Iterator[None]:
    """Let the error for budgets in bytes speak of `budget=`, as `Balanced` calls the argument."""
    try:
        yield
    except BudgetError as error:
        error.said_as(f"budget={shown(error.smallest)}")
        raise


def shown(budgets: Budgets) -> str:
    """Format the budgets, as one number if all are the same."""
    return str(budgets[0]) if len(set(budgets)) == 1 else str(budgets)
