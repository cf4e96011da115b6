"""Strangers at every port of processes that train: no step is slower for them, and none fails."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import pytest
import torch.distributed as dist

from tests.attacks.strangers import WORDS, Place
from tests.faults.case import Setup
from tests.faults.pipeline import Pipeline
from tests.ranks import run_ranks
from tests.tries import holds_in_one_try

LISTENS = "0A"  # a state of /proc/net/tcp
BLOCK, NUM_BLOCKS = 4, 9  # steps in a block
WAYS = [(False, ""), (True, ""), (True, "open sesame"), (False, "open sesame")]  # shared memory, and a secret
KINDS = ["silent", "garbage", "http", "another frame"]
NOISE = 1.25  # the median over blocks beside each other, on two cores that also run the strangers


def ports_of_this_process() -> list[Place]:
    """The loopback ports at which this process listens, as the kernel lists them."""
    descriptors = Path("/proc/self/fd")
    inodes = {os.readlink(descriptors / name) for name in os.listdir(descriptors) if (descriptors / name).exists()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [("127.0.0.1", int(row[1][-4:], 16)) for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in inodes]


def steps_among_strangers(
    rank: int, kind: str, shares_memory: bool, secret: str, num_blocks: int = NUM_BLOCKS
) -> tuple[list[float], list[float], int]:
    """The seconds of steps, quiet and disturbed in turn, and how many ports this process listens at because of the pipeline.

    Before each disturbed step a stranger comes to each port, from this process but not while it is timed, and stays for a while.
    """
    os.environ |= {"BPIPE_SHARED_MEMORY": str(int(shares_memory)), "BPIPE_SECRET": secret}  # without that memory, gloo has ports
    before = ports_of_this_process()
    pipeline = Pipeline(rank, 2, Setup())
    pipeline.check_step()
    ports = ports_of_this_process()
    quiet: list[float] = []
    disturbed: list[float] = []
    for _ in range(num_blocks):
        quiet += [timed(pipeline) for _ in range(BLOCK)]
        with ExitStack() as strangers:
            for _ in range(BLOCK):
                for place in ports:
                    stranger = strangers.enter_context(socket.create_connection(place))
                    with suppress(OSError):
                        for piece in WORDS[kind]():
                            stranger.sendall(piece)
                disturbed.append(timed(pipeline))
    dist.barrier()
    pipeline.schedule.close()
    dist.barrier()
    return quiet, disturbed, len(set(ports) - set(before))


def timed(pipeline: Pipeline) -> float:
    began = time.perf_counter()
    pipeline.check_step()
    return time.perf_counter() - began


@pytest.mark.parametrize(
    "shares_memory, secret, kind",
    [(*way, kind) for way in WAYS for kind in KINDS],
)
def test_strangers_slow_no_step(shares_memory: bool, secret: str, kind: str) -> None:
    def measure() -> list[float]:
        slower = []
        for quiet, disturbed, num_ports in run_ranks(steps_among_strangers, 2, kind, shares_memory, secret):
            print(f"{kind}: {1000 * median(quiet):.2f} ms a step, {1000 * median(disturbed):.2f} ms among strangers")
            assert num_ports == (0 if shares_memory else 2)  # those of gloo, one for each channel: bpipe's own are closed by then
            blocks = range(0, len(quiet), BLOCK)
            slower.append(median(median(disturbed[at:][:BLOCK]) / median(quiet[at:][:BLOCK]) for at in blocks))
        return slower

    holds_in_one_try(measure, lambda slower: max(slower) < NOISE)
