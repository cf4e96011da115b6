"""One rank of a routed pipeline under a torchrun of its own: `SEAT=... PORT=... torchrun ... -m tests.relaxed.job`."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bpipe.relaxed import Routes
from tests.relaxed.runs import KILLED, alone, train, wait_for_newcomers

NUM_STEPS, NUM_REPLICAS = 8, 2


def main() -> None:
    torch.set_num_threads(1)
    seat, store = int(os.environ["SEAT"]), dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=False)

    def then(routes: Routes, where: str) -> None:
        if where == "forward" and seat == 2 and routes.num_steps == 2 and store.add("test/killed", 1) == 1:
            os._exit(KILLED)
        if where == "between steps" and len(routes.seats) < 2 * NUM_REPLICAS:
            store.wait(["test/again"], timedelta(seconds=100))  # until torchrun has started it again
            wait_for_newcomers(routes)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        store.set("test/again", "")
    found = train(seat, store, NUM_STEPS, then, NUM_REPLICAS)["curve"]
    curve, _ = alone(NUM_STEPS)
    assert list(found.values()) == pytest.approx(curve[min(found) :], rel=1e-10)
    print(f"restarted {os.environ['TORCHELASTIC_RESTART_COUNT']} times, {len(found)} steps: exact", flush=True)


if __name__ == "__main__":
    main()
