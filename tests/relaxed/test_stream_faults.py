"""Faults of streams: each ends on all ranks, by an error that says where it happened; and promptly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import (
    AgreementError,
    CommError,
    ConfigurationError,
    PipelineBrokenError,
    RankFailedError,
    RankLostError,
    StageError,
    TransferTimeoutError,
)
from tests.over import nested
from tests.patience import until
from tests.ranks import run_ranks

P, WHEN, TIMEOUT_S = 3, 5, 2.0
X = torch.ones(2, 4)
Seen = tuple[type[BaseException], str]  # an error, and its text with its notes


class Stage(nn.Linear):
    """A linear layer that does something else in one tick, forward or backward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.forward_fault: Callable[[torch.Tensor], Any] = lambda output: output
        self.backward_fault: Callable[[torch.Tensor], Any] = lambda gradient: None
        self.at = -1

    def forward(self, x: torch.Tensor) -> Any:
        self.at -= 1
        output = super().forward(x)
        if self.at == 0 and output.requires_grad:
            output.register_hook(self.backward_fault)
        return self.forward_fault(output) if self.at == 0 else output


def boom(value: torch.Tensor) -> Any:
    raise ValueError("boom")


def lingering(stream: bpipe.Stream) -> Callable[[torch.Tensor], Any]:
    """Code that takes its time, until the stream has failed because of that."""

    def linger(value: torch.Tensor) -> torch.Tensor:
        control = stream._transport.control
        until(lambda: control.failure, "the others give up a rank whose own code does not end")
        return value

    return linger


def dying(value: torch.Tensor) -> Any:
    os._exit(1)


def new(rank: int, fault_on: int = -1, loss_fn: Any = F.mse_loss, **options: Any) -> tuple[Stage, bpipe.Stream]:
    torch.manual_seed(0)
    module = Stage()
    module.at = WHEN - rank + 1 if rank == fault_on else -1  # of its forwards, which begin in tick `rank`
    return module, bpipe.Stream(bpipe.PipelineStage(module, rank, P, "cpu"), loss_fn, **nested(options))


def pushing(stream: bpipe.Stream, ticks: int = 2 * WHEN) -> Seen | None:
    return caught(lambda: [stream.push(X, target=X) for _ in range(ticks)])


def caught(call: Callable[[], Any]) -> Seen | None:
    try:
        call()
    except Exception as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", ())])
    return None


# Each makes a stream and its fault on this rank, and returns what was raised.


def raises_in_a_forward(rank: int) -> Seen | None:
    module, stream = new(rank, 1)
    module.forward_fault = boom
    seen = pushing(stream)
    again = caught(lambda: stream.push(X, target=X))
    assert again is not None and again[0] is PipelineBrokenError and "close() this stream" in again[1], again
    stream.close()
    return seen


def raises_in_a_backward(rank: int) -> Seen | None:
    module, stream = new(rank, 0)
    module.backward_fault = boom
    return pushing(stream)


def raises_in_an_optimizer(rank: int) -> Seen | None:
    class Optimizer:
        def zero_grad(self) -> None: ...

        def step(self) -> None:
            if rank == 0:
                boom(X)

    return pushing(new(rank, optimizer=Optimizer())[1])


def returns_what_cannot_be_sent(rank: int) -> Seen | None:
    module, stream = new(rank, 1)
    module.forward_fault = lambda output: object()
    return pushing(stream)


def returns_another_shape(rank: int) -> Seen | None:
    module, stream = new(rank, 1)
    module.forward_fault = lambda output: output[:1]
    return pushing(stream)


def changes_what_is_being_sent(rank: int) -> Seen | None:
    module, stream = new(rank, loss_fn=None)
    held = torch.zeros(2, 4)
    if rank == 0:
        module.register_forward_hook(lambda module, args, output: held.add_(output.detach()))
    return caught(lambda: [stream.push(X) for _ in range(WHEN)])


def has_a_loss_that_is_no_number(rank: int) -> Seen | None:
    return pushing(new(rank, loss_fn=lambda output, target: output - target)[1])


def has_a_loss_without_a_gradient(rank: int) -> Seen | None:
    return pushing(new(rank, loss_fn=lambda output, target: target.sum())[1])


def gives_no_target(rank: int) -> Seen | None:
    stream = new(rank)[1]
    return pushing(stream, WHEN) or caught(lambda: [stream.push(X, target=X if rank == 0 else None) for _ in range(3)])


def gives_no_input(rank: int) -> Seen | None:
    stream = new(rank)[1]
    return caught(lambda: stream.push(target=X)) if rank == 0 else pushing(stream)


def learns_without_gradients(rank: int) -> Seen | None:
    with torch.no_grad() if rank == 1 else nullcontext():
        return pushing(new(rank)[1])


def drains_without_gradients(rank: int) -> Seen | None:
    stream = new(rank)[1]
    with torch.inference_mode() if rank == 0 else nullcontext():
        return caught(stream.drain)


def returns_other_strides(rank: int) -> Seen | None:
    module, stream = new(rank, 1)
    module.forward_fault = lambda output: output.t().contiguous().t()
    return pushing(stream)


def differs_in_the_last_tick(rank: int) -> Seen | None:
    stream = new(rank)[1]
    return pushing(stream, WHEN) or caught(lambda: stream.push(X, target=X, learn=rank == 0)) or caught(stream.close)


def pushes_while_another_drains(rank: int) -> Seen | None:
    stream = new(rank)[1]
    return pushing(stream, WHEN) or (pushing(stream, 4) if rank == 0 else caught(stream.drain))


def drains_while_another_pushes(rank: int) -> Seen | None:
    stream = new(rank, loss_fn=None)[1]
    if rank:
        return caught(lambda: [stream.push(X) for _ in range(4)])
    stream.drain()  # this rank gets no messages
    time.sleep(0.5)
    return caught(lambda: stream.push(X))


def learns_while_another_does_not(rank: int) -> Seen | None:
    stream = new(rank)[1]
    return caught(lambda: [stream.push(X, target=X, learn=rank != 2) for _ in range(4)])


def closes_while_others_push(rank: int) -> Seen | None:
    stream = new(rank)[1]
    seen = pushing(stream, WHEN)
    return caught(stream.close) if rank == 1 else seen or pushing(stream, 4)


def differs_from_the_others(rank: int) -> Seen | None:
    return pushing(new(rank, loss_fn=None if rank == 1 else F.mse_loss)[1])


def is_beside_a_schedule(rank: int) -> Seen | None:
    if rank:
        return pushing(new(rank)[1])
    stage = bpipe.PipelineStage(Stage(), 0, P, "cpu")
    return caught(lambda: bpipe.OneFOneB(stage, 1, F.mse_loss).step(X, target=X))


def hangs(rank: int) -> Seen | None:
    module, stream = new(rank, 1, timeout_s=TIMEOUT_S)
    module.forward_fault = lingering(stream)
    return pushing(stream)


def dies(rank: int) -> Seen | None:
    module, stream = new(rank, 1)
    module.forward_fault = dying
    return pushing(stream)


class Outcome(NamedTuple):
    """What a fault leads to.

    Args:
        rank: where it happens; None if all ranks raise alike.
        here: the error there; None if none is raised.
        says: what its text and its notes say.
        told: what those of the other ranks say.
        there: the errors of the other ranks.
    """

    rank: int | None
    here: type[BaseException] | None
    says: tuple[str, ...]
    told: tuple[str, ...] = ()
    there: type[BaseException] = RankFailedError


def alike(there: type[BaseException], *told: str) -> Outcome:
    return Outcome(None, None, (), told, there)


FAULTS: dict[Callable[[int], Seen | None], Outcome] = {
    raises_in_a_forward: Outcome(
        1, ValueError, ("boom", "stage 1, tick 5, action 1F0"), ("rank 1 failed in step 5, stage 1, tick 5, action 1F0: Value",)
    ),
    raises_in_a_backward: Outcome(0, ValueError, ("boom",), ("rank 0 failed in step 5, stage 0, tick 5, action 0B0: ValueError",)),
    raises_in_an_optimizer: Outcome(0, ValueError, ("boom",), ("rank 0 failed in step 4, stage 0, tick 4, action 0B0: Value",)),
    returns_what_cannot_be_sent: Outcome(1, StageError, ("stage 1, tick 5 returned a builtins.object",), ("tick 5, action 1F0",)),
    returns_another_shape: Outcome(
        1, StageError, ("float32[2, 4], requires grad), and is", "[1, 4]", "drain() the stream"), ("rank 1", "tick 5, action 1F0")
    ),
    changes_what_is_being_sent: Outcome(
        0, StageError, ("shape [2, 4] was modified in place while it was being sent. Return a clone",), ("rank 0", "tick 1")
    ),
    has_a_loss_that_is_no_number: Outcome(2, StageError, ("of shape [2, 4] for tick 2",), ("rank 2", "tick 2, action 2F0")),
    has_a_loss_without_a_gradient: Outcome(2, StageError, ("the loss of tick 2 needs no gradient",), ("rank 2", "tick 2, action")),
    gives_no_target: Outcome(2, ConfigurationError, ("push() got no target on the last stage",), ("rank 2", "tick 5, action 2F0")),
    gives_no_input: Outcome(0, ConfigurationError, ("push() got no input on the first stage",), ("rank 0", "tick 0, action 0F0")),
    learns_without_gradients: Outcome(
        1, ConfigurationError, ("push() learns, but gradients are disabled here",), ("rank 1 failed", "tick 0, action 1F0")
    ),
    drains_without_gradients: Outcome(0, ConfigurationError, ("drain() learns, but gradients",), ("tick 0, action 0F0",)),
    returns_other_strides: Outcome(
        1, StageError, ("strides [(4, 1)], and is", "strides [(1, 2)]", "return .contiguous()"), ("tick 5, action 1F0",)
    ),
    differs_in_the_last_tick: Outcome(2, None, (), (" learning in tick 5 while this one pushes", "WAIT_RECV_"), AgreementError),
    pushes_while_another_drains: alike(
        CommError, "drains with learning in tick 5", "pushes with learning in tick 5", "make the same calls on all ranks"
    ),
    drains_while_another_pushes: alike(CommError, "rank 0 drains without learning in tick 0 while this one pushes without"),
    learns_while_another_does_not: alike(CommError, "without learning in tick 0", "with learning in tick 0", "make the same calls"),
    closes_while_others_push: Outcome(1, None, (), ("rank 1 closed this pipeline in the middle of step ",), RankLostError),
    differs_from_the_others: alike(AgreementError, "rank 0 has a loss_fn, and rank 1 has none: give the Stream one on all ranks"),
    is_beside_a_schedule: alike(AgreementError, "the ranks disagree on the schedule: rank 0 has 1f1b, rank 1 has stream"),
    hangs: alike(
        *(TransferTimeoutError, "in step 6, stage ", "tick 6, action ", f"for rank 1: longer than timeout_s={TIMEOUT_S:g}"),
        *("rank 1 has been computing 1F0 for ", " s, in step 5"),
    ),
    dies: Outcome(1, None, (), ("rank 1 was lost while rank ", ", tick "), RankLostError),  # 5 or 6: as far as others are by then
}
PROMPT_S = 10.0


def timed(rank: int, fault: Callable[[int], Seen | None]) -> tuple[Seen | None, float]:
    """What a fault raises on this rank, and the seconds that it takes, from the making of its stream on."""
    start = time.monotonic()
    return fault(rank), time.monotonic() - start


def in_turn(rank: int) -> list[tuple[Seen | None, float]]:
    return [timed(rank, fault) for fault in FAULTS if fault is not dies]


@pytest.fixture(scope="module")
def seen() -> dict[str, Sequence[tuple[Seen | None, float]]]:
    """By fault, what comes of it on each rank. One process group has all of them, so a new stream works after each."""
    names = [fault.__name__ for fault in FAULTS if fault is not dies]
    found = dict(zip(names, zip(*run_ranks(in_turn, P)), strict=True))
    raised = run_ranks(timed, P, dies, expect_errors=True)
    return {**found, "dies": [one if isinstance(one, tuple) else (None, 0.0) for one in raised]}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault(fault: Callable[[int], Seen | None], seen: dict[str, Sequence[tuple[Seen | None, float]]]) -> None:
    outcome = FAULTS[fault]
    for rank, (found, _) in enumerate(seen[fault.__name__]):
        if rank == outcome.rank and outcome.here is None:
            assert found is None
            continue
        kind, words = (outcome.here, outcome.says) if rank == outcome.rank else (outcome.there, outcome.told)
        assert found is not None and kind is not None and issubclass(found[0], kind), (rank, found)
        assert all(word in found[1] for word in words), (rank, found[1], words)


def test_faults_end_promptly(seen: dict[str, Sequence[tuple[Seen | None, float]]]) -> None:
    assert max(seconds for of_ranks in seen.values() for _, seconds in of_ranks) < PROMPT_S
