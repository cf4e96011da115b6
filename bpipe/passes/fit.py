"""The budgets that a pass is asked to keep; the smallest ones that work, and the error that names them if those are too small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from bpipe.checks import budgets_of
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.plan.amounts import show_each
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes

__all__: list[str] = []

FINENESS = 1024  # a peak is found to within this fraction of it

Budgets = tuple[int | None, ...]
Given = int | Sequence[int | None] | None
T = TypeVar("T")


def budgets_to_keep(plan: Plan, slots: Given, sizes: Sizes | None, budgets: Given) -> Budgets | None:
    """Return one budget per rank, in microbatches or in bytes; None if bytes are to be as few as possible.

    Raises:
        ConfigurationError: neither or both of slots and sizes are given, or budgets or sizes do not fit the ranks or stages.
    """
    if (slots is None) == (sizes is None) or (sizes is None and budgets is not None):
        raise ConfigurationError("give slots=, or sizes= and budgets=")
    if sizes is None:
        return budgets_of("slots", slots, plan.num_ranks)
    sizes.check(plan.num_stages, plan.num_ranks, plan.units)
    return None if budgets is None else budgets_of("budgets", budgets, plan.num_ranks)


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


def least_raised(
    attempt: Callable[[Budgets], T | None], budgets: Budgets, highest: int, enough: tuple[int, T] | None = None
) -> tuple[Budgets, T]:
    """Find the smallest budgets that work, which are the given ones all raised alike.

    Args:
        attempt: returns the result for budgets, or None if they do not work.
        highest: the highest peak, by which a rise is always enough.
        enough: a smaller rise that is known to be enough, and its result.

    Returns:
        The smallest budgets, and the result for them.
    """

    def raised_by(more: int) -> tuple[int, T] | None:
        result = attempt(raised(budgets, more))
        return None if result is None else (more, result)

    enough = enough or raised_by(highest)
    assert enough is not None, "with its own peak as the budget, a plan needs neither evictions nor recomputations"
    more, result = smallest(raised_by, 1, enough, highest)
    return raised(budgets, more), result


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
