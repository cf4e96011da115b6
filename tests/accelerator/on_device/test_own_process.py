"""What needs a process of its own: one hardware queue, which is set before the first stream, and devices that nobody has used."""

from __future__ import annotations

import importlib
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tests.accelerator.device import KIND, MODULE, reports, simulator
from tests.patience import PATIENCE_S

SIZE = 1024


def in_own_process(function: Callable[[], Any]) -> Any:
    device = "tests.accelerator.device"  # is there before torch, which this module imports
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=importlib.import_module, initargs=(device,)) as pool:
        return pool.submit(function).result(timeout=200)


def across_devices() -> tuple[float, list[str]]:
    simulator.configure(True, 500, 0.3, 0)
    x = torch.ones(SIZE, device=f"{KIND}:0")
    y = x.to(f"{KIND}:1") + 1
    x.copy_(y)
    y.zero_()
    return float(x.sum().item()), reports()


def test_copies_between_devices_are_ordered() -> None:
    assert in_own_process(across_devices) == (2 * SIZE, [])


def is_held_up(for_s: float) -> bool:
    """Whether a stream gets nowhere for so long while another one, on which it does not depend, waits for its kernel."""
    first, second = MODULE.Stream(), MODULE.Stream()
    gate = threading.Event()
    simulator.enqueue(first.stream_id, "gate", [], [], lambda _: gate.wait())
    first.record_event()
    done = second.record_event()
    until = time.monotonic() + for_s
    while time.monotonic() < until and not done.query():
        time.sleep(0.001)
    held_up = not done.query()
    gate.set()
    MODULE.synchronize()
    assert done.query()
    return held_up


def with_one_queue() -> bool:
    simulator.set_connections(1)
    return is_held_up(0.2)


def test_streams_of_one_hardware_queue_hold_each_other_up() -> None:
    assert in_own_process(with_one_queue)


def test_streams_with_queues_of_their_own_do_not() -> None:
    assert not is_held_up(PATIENCE_S)
