"""The checker finds bpipe's orderings where they are removed: each is one that a GPU needs."""

from __future__ import annotations

import pytest

from tests.accelerator import mutations
from tests.accelerator.device import reports, simulator
from tests.accelerator.mutations import IN_LOOPBACK, OVER_GLOO, OVER_NCCL, Mutation
from tests.ranks import run_ranks


def in_loopback(rank: int, mutation: Mutation) -> list[str]:
    mutations.apply(mutation)
    from tests.accelerator.work import in_loopback as run

    simulator.configure(True, 500, 0.1, 0)
    run(mutation.schedule, "cuda", steps=2)
    return reports()


def over(rank: int, mutation: Mutation, nccl: bool) -> list[str]:
    mutations.apply(mutation)
    from tests.accelerator import nccl as transports
    from tests.accelerator.work import as_rank

    transports.install(nccl=nccl)
    simulator.configure(True, 500, 0.1, rank)
    as_rank(rank, mutation.schedule, "cuda", num_ranks=4, steps=2)
    return reports()


def by_name(mutation: Mutation) -> str:
    return mutation.name


def assert_found(reported: list[list[str]]) -> None:
    """Some rank's checker found a missing order; that a kernel failed is not enough."""
    assert any(report.startswith(("race:", "reuse:")) for of_rank in reported for report in of_rank), reported


@pytest.mark.parametrize("mutation", IN_LOOPBACK, ids=by_name)
def test_in_the_loopback(mutation: Mutation) -> None:
    [reported] = run_ranks(in_loopback, 1, mutation)
    assert_found([reported])


@pytest.mark.parametrize("mutation", OVER_GLOO, ids=by_name)
def test_over_gloo(mutation: Mutation) -> None:
    assert_found(run_ranks(over, 4, mutation, False))


@pytest.mark.parametrize("mutation", OVER_NCCL, ids=by_name)
def test_over_nccl(mutation: Mutation) -> None:
    assert_found(run_ranks(over, 4, mutation, True))
