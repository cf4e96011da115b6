"""A job that torchrun starts again after a rank was killed in some phase: `torchrun ... -m tests.attacks.job PHASE`.

Rank 1 or rank 0 is killed in the first attempt. Where activations move, it is the rank that stores them, and in the second attempt
the one that evicts them. They may be in another phase than the rest, and have made other numbers of pipelines, over one store.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import bpipe
from bpipe.comm.rendezvous.outgoing import OutgoingConnections
from bpipe.comm.transport import c10d
from bpipe.engine import remembered
from bpipe.engine.evictions import Evictions
from bpipe.session.session import Session
from tests.faults.case import Setup, Where
from tests.faults.pipeline import Pipeline

LENT = {  # by attempt, what a victim is killed in place of where activations move; None: a backward while another rank's are here
    "lending": [(remembered, "offer"), (remembered, "accept_offer")],
    "lent": [None, (Evictions, "load")],
}
PLACES: dict[str, tuple[Any, str]] = {  # what a victim is killed in place of
    "meeting": (OutgoingConnections, "open"),
    "groups": (c10d.C10dTransport, "_connect_gloo"),
    "agreeing": (Session, "agree"),
    "connecting": (c10d, "open_connections"),
    "connected": (c10d.C10dTransport, "receive"),
}
PHASES = ["making", *PLACES, *LENT, "forward", "backward", "between steps", "closing"]


def victims_of(phase: str, size: int) -> list[int]:
    """The rank that is killed, by attempt."""
    return [size - 1, 0] if phase in LENT else [PHASES.index(phase) % 2]


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def join(rank: int, size: int, attempt: int) -> None:
    """Join the default group. Over a store that earlier attempts have used, gloo would take their addresses for this one's."""
    torch.set_num_threads(1)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for key in store.list_keys():
        if key.endswith(f"//cpu//0/{rank}"):
            store.delete_key(key)
    store.add(f"cleared/{attempt}", 1)
    while store.add(f"cleared/{attempt}", 0) < size:
        time.sleep(0.01)
    dist.init_process_group("gloo")


def main(phase: str) -> None:
    rank, size, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    victims = victims_of(phase, size)
    is_victim = attempt < len(victims) and victims[attempt] == rank
    join(rank, size, attempt)

    def struck(stage: int, where: Where, call: int, value: Any) -> Any:
        is_storing = phase == "lent" and attempt == 0 and where == "backward" and call == 1
        if is_victim and ((where == phase and call == 5) or is_storing):
            kill()
        return value

    schedule = bpipe.BalancedOneFOneB if phase in LENT else bpipe.OneFOneB
    pipelines = [
        Pipeline(rank, size, Setup(schedule=schedule, rows=1000, options={"options": bpipe.Options(timeout_s=20.0)}), struck)
    ]
    if is_victim and phase == "making":
        pipelines += [Pipeline(rank, size, Setup()) for _ in range(2)]
        kill()
    if is_victim and phase in PLACES:
        setattr(*PLACES[phase], kill)
    if is_victim and phase in LENT and (place := LENT[phase][attempt]) is not None:
        setattr(*place, kill)
    for index in range(3):
        pipelines[0].check_step()
        if is_victim and phase == "between steps" and index == 1:
            kill()
    if is_victim and phase == "closing":
        c10d.C10dTransport.close = kill  # type: ignore[method-assign]
    pipelines[0].schedule.close()
    dist.barrier()
    print(f"attempt {attempt}, rank {rank}: exact", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
