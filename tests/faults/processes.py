"""A process that ends, stops, or is slow: the other ranks say which, and do not wait for it longer than they were told to."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from bpipe.api.options import Options
from bpipe.errors import AgreementError, CommError, RankFailedError, RankLostError, TransferTimeoutError
from tests.faults.case import BOUND_S, FROZEN_S, After, Case, Fate, Setup, Strike
from tests.faults.effects import Effect, calling, raising, send, signalling, until_given_up
from tests.faults.scene import Leave, Scene, until_the_strike
from tests.patience import PATIENCE_S, until


def between_steps(effect: Effect) -> Callable[[Scene], None]:
    """What strikes a rank after a healthy step."""

    def play(scene: Scene) -> None:
        pipeline = scene.open()
        pipeline.step()
        if scene.is_culprit:
            effect(scene, None)
        pipeline.step()

    return play


# Killed.


def lost(name: str, rank: int, **more: Any) -> Case:
    """A rank's process ends without a word."""
    case = Case(
        name=name,
        outcome="the other ranks raise RankLostError with its rank",
        num_ranks=3,
        culprits=frozenset({rank}),
        there=RankLostError,
        says=(f"rank {rank}",),
        fate=Fate.ENDS,
    )
    return replace(case, **more)


def killed(name: str, rank: int, *, microbatch: int = 2, step: int = 1, **more: Any) -> Case:
    """Likewise in a forward."""
    strike = Strike(stage=rank, microbatch=microbatch, step=step, effect=signalling(signal.SIGKILL))
    return lost(name, rank, strike=strike, **more)


def leaves_a_child(scene: Scene) -> None:
    """A fork, as a loader of data makes them: it holds all that was open, and lives until the others have raised."""
    if not (child := os.fork()):
        time.sleep(2 * PATIENCE_S)
        os._exit(0)
    store().set("child", str(child))
    send(signal.SIGKILL, os.getpid())


def end_the_child(scene: Scene) -> None:
    try:
        until_the_strike(scene)
    finally:
        if scene.rank == 0:
            os.kill(int(store().get("child")), signal.SIGKILL)  # it has lived until now


def store() -> Any:
    """The store of the process group."""
    return dist.distributed_c10d._get_default_store()


KILLED = [
    killed("SIGKILL of the first stage, in a step", 0),
    killed("SIGKILL of a middle stage, in a step", 1),
    killed("SIGKILL of the last stage, in a step", 2),
    killed("SIGKILL in the first step", 1, step=0),
    killed("SIGKILL of the store's host, in a step", 0, store_on=0),
    killed("SIGKILL while large messages are under way", 1, microbatch=0, num_ranks=2, setup=Setup(rows=2**17)),
    lost("SIGKILL between steps", 1, play=between_steps(signalling(signal.SIGKILL))),
    lost("SIGKILL of the store's host between steps", 0, play=between_steps(signalling(signal.SIGKILL)), store_on=0),
    lost(
        "SIGKILL, and a forked child lives on",
        1,
        strike=Strike(stage=1, step=1, effect=calling(leaves_a_child)),
        play=end_the_child,
    ),
    Case(
        name="a rank's program ends while the others step on",
        outcome="AgreementError with its rank on the others",
        num_ranks=3,
        play=between_steps(raising(Leave)),
        there=AgreementError,
        says=("rank 1 closed",),
        after=After.LEFT,
        fate=Fate.ENDS,
    ),
]

# Stopped.

PATIENT = Setup(options={"options": Options(timeout_s=FROZEN_S)})


def frozen(name: str, rank: int, **more: Any) -> Case:
    """A rank's process is stopped."""
    case = Case(
        name=name,
        outcome="after timeout_s the other ranks raise TransferTimeoutError with its rank, frozen",
        num_ranks=3,
        setup=PATIENT,
        culprits=frozenset({rank}),
        there=(TransferTimeoutError, RankFailedError),
        says=(f"rank {rank}", "frozen"),
        fate=Fate.STOPS,
        bound_s=FROZEN_S + BOUND_S,
    )
    return replace(case, **more)


def stopped_in_step(rank: int) -> Strike:
    return Strike(stage=rank, step=1, effect=signalling(signal.SIGSTOP))


def never_comes(scene: Scene) -> None:
    pipeline = scene.open()
    scene.fired()
    if scene.is_culprit:
        send(signal.SIGKILL, scene.pids[scene.rank])
    pipeline.step()


STOPPED = [
    frozen("SIGSTOP in a step", 1, strike=stopped_in_step(1)),
    frozen("SIGSTOP of the store's host, in a step", 0, strike=stopped_in_step(0), store_on=0),
    frozen("SIGSTOP between steps", 1, play=between_steps(signalling(signal.SIGSTOP))),
    frozen(
        "SIGSTOP in a step, and SIGCONT later",
        1,
        strike=stopped_in_step(1),
        here=CommError,
        says=("rank",),
        fate=Fate.THAWS,
        outcome="after timeout_s the other ranks raise TransferTimeoutError; the continued one raises too",
    ),
    frozen(
        "a rank is killed before its first step",
        1,
        play=never_comes,
        there=CommError,
        says=("1",),
        fate=Fate.ENDS,
        outcome="after timeout_s the other ranks say who has not come to the first step",
    ),
    frozen(
        "a rank's own code takes longer than timeout_s, in a step",
        1,
        strike=Strike(stage=1, step=1, effect=until_given_up),
        here=CommError,
        says=(),
        says_not=("frozen",),
        fate=Fate.LIVES,
        outcome="after timeout_s the other ranks raise TransferTimeoutError, its rank busy; it raises when its own code returns",
    ),
    frozen(
        "a rank's own code takes longer than timeout_s, between steps",
        1,
        play=between_steps(until_given_up),
        here=CommError,
        says=(),
        says_not=("frozen",),
        fate=Fate.LIVES,
        outcome="after timeout_s the other ranks raise TransferTimeoutError, its rank busy; it raises when it comes",
    ),
]

# Slow.


class Heard(logging.Handler):
    """Keeps what is logged, and lets the other rank know."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        store().set("warned", "")


def wait_for_a_warning(scene: Scene) -> None:
    until(lambda: store().check(["warned"]), "a rank that waits longer than slow_s warns")
    time.sleep(SLOW_S)  # long enough for a second one


SLOW_S = 1.0


def slow(scene: Scene) -> None:
    """The rank that waits warns once, and says for whom and what each rank does."""
    heard = Heard()
    logging.getLogger("bpipe").addHandler(heard)
    try:
        pipeline = scene.open()
        pipeline.step()
        pipeline.check_step()
    finally:
        logging.getLogger("bpipe").removeHandler(heard)
    if scene.rank == 0:
        assert len(heard.texts) == 1, heard.texts
        warning = heard.texts[0]
        assert "1F0" in warning and "0WAIT_RECV_B0" in warning, warning


SLOW = [
    Case(
        name="a slow rank",
        outcome="works; after slow_s one warning with a grid of what each rank does",
        setup=Setup(options={"options": Options(slow_s=SLOW_S)}),
        strike=Strike(stage=1, microbatch=0, step=1, effect=calling(wait_for_a_warning)),
        play=slow,
        after=After.WHOLE,
    )
]

CASES = [*KILLED, *STOPPED, *SLOW]
