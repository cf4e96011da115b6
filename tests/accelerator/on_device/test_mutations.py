"""The checker finds bpipe's orderings where they are removed: each is one that a GPU needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from operator import attrgetter

import pytest

from tests.accelerator import mutations
from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.mutations import BY_COPIES, IN_LOOPBACK, INTO_LENT_MEMORY, OVER_GLOO, OVER_NCCL, Mutation
from tests.ranks import run_ranks
from tests.tries import holds_in_one_try

name_of = attrgetter("name")


def in_loopback(rank: int, mutation: Mutation) -> list[str]:
    mutations.apply(mutation)
    from tests.accelerator import work

    simulator.configure(True, 500, 0.1, 0)
    if mutation.fails:
        work.failing_in_loopback(mutation.schedule)
    else:
        work.in_loopback(mutation.schedule, KIND, steps=2)
    return reports()


def over(rank: int, mutation: Mutation, nccl: bool, copies: bool = False) -> list[str]:
    mutations.apply(mutation)
    from tests.accelerator import nccl as transports
    from tests.accelerator import work

    transports.install(nccl=nccl, lends=copies or work.lends(mutation.schedule), copies=copies)
    simulator.configure(True, 500, 0.1, rank)
    # Where messages are lost, ranks may fail: what was reported before is what counts.
    with nullcontext() if mutation.harmless else suppress(Exception):
        if mutation.fails:
            work.failing_as_rank(rank, mutation.schedule, num_ranks=4)
        else:
            how = {"transfers_at_once": mutation.at_once} if mutation.at_once else {}
            work.as_rank(rank, mutation.schedule, KIND, num_ranks=4, steps=2, **how)
    return reports()


def check(mutation: Mutation, run: Callable[..., list[str]], num_ranks: int, *args: object) -> None:
    """Some rank's checker finds a missing order, which a kernel that failed does not show; none does where nothing is missing.

    Where memory is freed too early, that shows only if what still uses it is late, so that it may take another try.
    """

    def found() -> list[str]:
        reported = run_ranks(run, num_ranks, mutation, *args)
        return [report for of_rank in reported for report in of_rank if report.startswith(("race:", "reuse:"))]

    if mutation.harmless:
        assert not found()
    else:
        holds_in_one_try(found, bool)


@pytest.mark.parametrize("mutation", IN_LOOPBACK, ids=name_of)
def test_in_the_loopback(mutation: Mutation) -> None:
    check(mutation, in_loopback, 1)


@pytest.mark.parametrize("mutation", OVER_GLOO, ids=name_of)
def test_over_gloo(mutation: Mutation) -> None:
    check(mutation, over, 4, False)


@pytest.mark.parametrize("mutation", OVER_NCCL, ids=name_of)
def test_over_nccl(mutation: Mutation) -> None:
    check(mutation, over, 4, True)


@pytest.mark.skipif(KIND != "cuda", reason="only CUDA's memory is lent")
@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("mutation", INTO_LENT_MEMORY, ids=name_of)
def test_into_lent_memory(mutation: Mutation, nccl: bool) -> None:
    check(mutation, over, 4, nccl)


@pytest.mark.skipif(KIND != "cuda", reason="only CUDA's devices copy messages to each other")
@pytest.mark.parametrize("mutation", BY_COPIES, ids=name_of)
def test_by_copies(mutation: Mutation) -> None:
    check(mutation, over, 4, True, True)
