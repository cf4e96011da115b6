"""An error in the user's code on one rank: it keeps its type there, and the others name it and its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch

import bpipe
from bpipe.comm.health.activity import State
from bpipe.errors import RankFailedError, SavedTensorError, StageError
from tests.faults.case import Case, Setup, Strike, Where
from tests.faults.effects import Effect, boom, changing, given_up, raising, send, signalling, until_given_up
from tests.faults.scene import Scene
from tests.patience import until

BALANCED = Setup(schedule=bpipe.BalancedOneFOneB, m=8)
TOLD = "the others raise too"


def raised(
    name: str,
    kind: type[BaseException],
    effect: Effect,
    *,
    stage: int = 1,
    where: Where = "forward",
    microbatch: int = 2,
    step: int = 1,
    error: str = "",
    outcome: str = "",
    **more: Any,
) -> Case:
    """A strike that ends in an error on its rank, of which the others raise too."""
    case = Case(
        name=name,
        outcome=f"{outcome or f'{kind.__name__} there'}; {TOLD}",
        strike=Strike(where=where, stage=stage, microbatch=microbatch, step=step, effect=effect),
        num_ranks=3,
        culprits=frozenset({stage}),
        here=kind,
        there=RankFailedError,
        error=error or kind.__name__,
    )
    return replace(case, **more)


def places() -> Iterator[Case]:
    """Everywhere that the user's code runs."""
    boomed: dict[str, Any] = {"error": "ValueError: boom"}
    for when, step in (("first step", 0), ("later step", 2)):
        for which, stage in (("first", 0), ("middle", 1), ("last", 2)):
            for where in ("forward", "backward"):
                name = f"raise in a {where}, {which} stage, {when}"
                yield raised(name, ValueError, raising(boom), where=where, stage=stage, step=step, **boomed)
        yield raised(f"raise in the loss, {when}", ValueError, raising(boom), where="loss", stage=2, step=step, **boomed)
    yield raised("raise in a gradient hook", ValueError, raising(boom), where="weight", **boomed)
    halves = Setup(schedule=bpipe.ZBH1)
    yield raised(
        "raise in a backward's weight half", ValueError, raising(boom), where="weight", action="1W2", setup=halves, **boomed
    )
    looped = Setup(schedule=bpipe.Interleaved1F1B, num_stages=4)
    second: dict[str, Any] = {"stage": 3, "culprits": frozenset({1}), "num_ranks": 2, "setup": looped}
    yield raised("raise in a rank's second stage", ValueError, raising(boom), **second, **boomed)
    evaluated: dict[str, Any] = {"step": 0, "play": lambda scene: scene.open().eval(), **boomed}
    yield raised("raise in eval, first stage", ValueError, raising(boom), stage=0, **evaluated)
    early = "ValueError there; if the first rank has returned, it raises in its next call"
    yield raised("raise in eval, middle stage", ValueError, raising(boom), early=frozenset({0}), outcome=early, **evaluated)


# In 0's lane: EVICT1 ... WAIT_EVICT1 F3 ... B0 ... LOAD1. While 3B0 takes its time, rank 0 gets no further than to B0.
ON_ACCEPTOR: dict[str, Any] = {"where": "backward", "stage": 3, "microbatch": 0, "num_ranks": 4, "setup": BALANCED}
ON_EVICTOR: dict[str, Any] = {"stage": 0, "microbatch": 3, "num_ranks": 4, "setup": BALANCED}


def exhausted() -> BaseException:
    try:
        bytearray(2**60)
    except MemoryError as error:
        return error
    return AssertionError("this machine has an exbibyte")


def modify_saved(y: torch.Tensor) -> torch.Tensor:
    z = y * y
    y.add_(1)
    return z


MEASURED = Setup(m=8, balanced={"budget": "lowest", "options": bpipe.Options(parts=2)})


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


KINDS = [
    raised("raise on the acceptor while it keeps an activation", ValueError, raising(boom, after_s=0.3), **ON_ACCEPTOR),
    raised("MemoryError on the acceptor while it keeps an activation", MemoryError, raising(exhausted, after_s=0.3), **ON_ACCEPTOR),
    raised("raise on the evictor between evict and load", ValueError, raising(boom), **ON_EVICTOR),
    raised("raise in a step that measures", ValueError, raising(boom), step=0, num_ranks=4, setup=MEASURED),
    raised(
        "raise in a forward while a part is away",
        ValueError,
        raising(boom),
        stage=0,
        microbatch=7,
        step=2,
        num_ranks=4,
        setup=MEASURED,
    ),
    raised("a device's memory is full", torch.OutOfMemoryError, raising(lambda: torch.OutOfMemoryError("full"))),
    raised("KeyboardInterrupt in a computation", KeyboardInterrupt, signalling(signal.SIGINT)),
    raised("sys.exit in a forward", SystemExit, raising(lambda: SystemExit(3))),
    raised("an error of a million letters", ValueError, raising(lambda: ValueError("boom" * 250_000))),
    raised("an error that cannot be printed", UnprintableError, raising(UnprintableError)),
    raised("a saved tensor is changed in place", RuntimeError, changing(modify_saved), action="1B2"),
    raised(
        "a saved tensor that is evicted is changed in place",
        SavedTensorError,
        changing(modify_saved),
        stage=0,
        microbatch=1,
        num_ranks=4,
        setup=BALANCED,
        action="0B1",
    ),
]


def needing_a_gradient_now(scene: Scene) -> None:
    """The first stage has nothing to train; in the second step it uses a leaf that is none of its parameters."""
    pipeline, is_first, leaf = scene.open(), True, torch.ones((), requires_grad=True)

    def scaled(cell: Any, _: Any, y: torch.Tensor) -> torch.Tensor:
        if is_first or cell.stage != 0:
            return y
        scene.fired()
        return y * leaf

    for module in pipeline.modules:
        module.requires_grad_(cast(Any, module).stage != 0)
        module.register_forward_hook(scaled)
    pipeline.step()
    is_first = False
    pipeline.step()


SENDER = "StageError on the sender, with what was agreed and what came"
OUTPUTS = [
    raised(
        f"an output {what} for inputs that look the same",
        StageError,
        changing(change),
        action="1SEND_F2",
        outcome=SENDER,
        says=("float32[2, 8], requires grad", f"got {form}"),
    )
    for what, change, form in (
        ("changes its shape", lambda y: torch.cat([y, y]), '"T" of (float32[4, 8], requires grad)'),
        ("changes its dtype", torch.Tensor.double, '"T" of (float64[2, 8], requires grad)'),
        ("changes its strides", lambda y: y.t().contiguous().t(), '"T" of (float32[2, 8], requires grad), strides [(1, 2)]'),
    )
] + [
    Case(
        name="an output needs a gradient, where there was nothing to train",
        outcome=f"StageError on the sender, with the way out; {TOLD}",
        play=needing_a_gradient_now,
        num_ranks=3,
        culprits=frozenset({0}),
        here=StageError,
        there=RankFailedError,
        error="StageError",
        action="0SEND_F0",
        says=("no trainable parameters", "Parameter"),
    ),
    raised(
        "an output that cannot be sent",
        StageError,
        changing(lambda y: {"y": {1, 2}}),
        outcome="StageError there, with the type and its place in the output",
        says=("builtins.set", "output['y']"),
    ),
    raised("a loss that is no number", StageError, changing(lambda loss: loss.expand(2)), where="loss", stage=2),
]


# Interrupts while this rank runs nothing of the user's.


def interrupt_the_wait(scene: Scene) -> None:
    """Interrupt this rank once it waits, in the case's action or else for the others to come."""
    activity, action = scene.pipelines[-1].schedule.session.context.transport.control.activity, scene.case.action

    def waits() -> bool:
        return str(activity.action()) == action if action else activity.state is State.MEETING

    def interrupt() -> None:
        until(waits, f"rank {scene.rank} waits")
        time.sleep(0.1)  # it is in the wait by then, most likely
        scene.fired()
        send(signal.SIGINT, scene.pids[scene.rank])

    threading.Thread(target=interrupt, daemon=True).start()


def interrupted(scene: Scene, *, comes: bool = True) -> None:
    """The wait itself ends, not what it waits for: the other rank goes on, or comes, only when the pipeline has failed."""
    pipeline = scene.open()
    pipeline.step()
    if scene.is_culprit:
        interrupt_the_wait(scene)
    elif not comes:
        given_up(scene)
    pipeline.step()


def interrupt_all(scene: Scene, value: Any) -> Any:
    scene.fired()
    send(signal.SIGINT, *(pid for pid in scene.pids if pid != os.getpid()), os.getpid())
    return value


INTERRUPTS = [
    Case(
        name="KeyboardInterrupt while waiting for a slow peer",
        outcome="KeyboardInterrupt there; the slow rank raises when its own code returns",
        strike=Strike(stage=1, microbatch=0, step=1, effect=until_given_up),
        play=interrupted,
        culprits=frozenset({0}),
        here=KeyboardInterrupt,
        there=RankFailedError,
        error="KeyboardInterrupt",
        action="0WAIT_RECV_B0",
    ),
    Case(
        name="KeyboardInterrupt while the others have not come to the step",
        outcome="KeyboardInterrupt there; the others raise when they come",
        play=lambda scene: interrupted(scene, comes=False),
        culprits=frozenset({0}),
        here=KeyboardInterrupt,
        there=RankFailedError,
        error="KeyboardInterrupt",
    ),
    Case(
        name="KeyboardInterrupt on all ranks, as from a terminal",
        outcome="KeyboardInterrupt on all",
        num_ranks=3,
        strike=Strike(stage=1, step=1, effect=interrupt_all),
        culprits=frozenset({0, 1, 2}),
        here=KeyboardInterrupt,
    ),
]

CASES = [*places(), *KINDS, *OUTPUTS, *INTERRUPTS]
