"""The simulated device itself: it reports what nothing orders, whatever the delays were, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.accelerator.device import KIND, MODULE, reports, simulator

SIZE = 1024


@pytest.fixture(autouse=True)
def fresh(one_thread: None) -> Iterator[None]:  # autograd's thread for the device begins here, and keeps the number of threads
    simulator.configure(True, 500, 0.3, 0)
    simulator.synchronize_device(-1)
    simulator.clear_reports()
    yield
    simulator.synchronize_device(-1)
    simulator.clear_reports()


def kinds() -> list[str]:
    return [report.split(":")[0] for report in reports()]


def test_results_and_gradients_are_the_cpus():
    x = torch.randn(16, 8, requires_grad=True)
    y = x.detach().to(KIND).requires_grad_()
    for one in (x, y):
        (torch.nn.functional.gelu(one @ one.T).softmax(-1).sum(0) ** 2).mean().backward()
    assert torch.equal(x.grad, y.grad.cpu()) and not reports()


def test_bf16_normalisation_is_the_cpus():
    x = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True)
    y = x.detach().to(KIND).requires_grad_()
    for one in (x, y):
        torch.nn.functional.layer_norm(one, [16]).square().sum().backward()
    assert torch.equal(x.grad, y.grad.cpu())


def test_a_number_of_python_does_not_widen_one_of_the_device():
    x = torch.tensor(2.5082428)
    assert torch.equal(x * 0.1, (x.cuda() * 0.1).cpu())


def test_memory_that_was_not_written_is_poison():
    assert torch.empty(SIZE, device=KIND).isnan().all()


def test_a_race_is_reported():
    side, x = MODULE.Stream(), torch.zeros(SIZE, device=KIND)
    with MODULE.stream(side):
        x.add_(1)
    assert kinds() == ["race"] * len(kinds()) and "add on stream" in reports()[0] and "test_checker" in reports()[0]


def test_what_waits_is_no_race():
    side, x = MODULE.Stream(), torch.zeros(SIZE, device=KIND)
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        x.add_(1)
    MODULE.current_stream().wait_stream(side)
    assert x.sum().item() == SIZE and not reports()


def test_an_event_orders_what_was_queued_before_it_only():
    side, x = MODULE.Stream(), torch.zeros(SIZE, device=KIND)
    event = MODULE.current_stream().record_event()
    x.add_(1)
    side.wait_event(event)
    with MODULE.stream(side):
        x.mul_(2)
    assert "race" in kinds()


def test_parts_of_a_block_are_told_apart():
    side, x = MODULE.Stream(), torch.zeros(SIZE, device=KIND)
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        x[: SIZE // 2].add_(1)
    x[SIZE // 2 :].add_(1)
    assert not reports()


def freed_while_another_stream_reads(*, record: bool) -> None:
    side, x = MODULE.Stream(), torch.ones(SIZE, device=KIND)
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        x.sum()
    if record:
        x.record_stream(side)
    del x
    torch.empty(SIZE, device=KIND)


def test_memory_that_is_used_again_too_early_is_reported():
    freed_while_another_stream_reads(record=False)
    assert "reuse" in kinds()


@pytest.mark.parametrize("waits", [True, False])
def test_memory_may_be_used_again_by_any_thread_if_who_frees_it_has_waited(waits):
    """Another thread frees it, and the one that takes it next has heard nothing from that thread."""
    side, held = MODULE.Stream(), [torch.ones(SIZE, device=KIND)]
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        held[0].sum()
    freed = threading.Event()

    def free() -> None:
        if waits:
            side.synchronize()
        held.clear()
        freed.set()

    threading.Thread(target=free, daemon=True).start()
    freed.wait()
    torch.empty(SIZE, device=KIND)
    assert kinds() == ([] if waits else ["reuse"])


def test_recorded_memory_is_not_used_again_too_early():
    freed_while_another_stream_reads(record=True)
    assert not reports()


def test_recorded_memory_counts_until_the_host_has_seen_its_event():
    allocated = MODULE.memory_allocated()
    side, x = MODULE.Stream(), torch.ones(SIZE, device=KIND)
    x.record_stream(side)
    del x
    assert MODULE.memory_allocated() == allocated and MODULE.memory_reserved() >= allocated + 4 * SIZE
    MODULE.synchronize()
    torch.empty(1, device=KIND)
    assert MODULE.memory_reserved() < allocated + 4 * SIZE


def test_a_full_device_waits_and_then_raises():
    before, retries = simulator.statistics(0)["capacity"], simulator.statistics(0)["retries"]
    simulator.set_capacity(0, MODULE.memory_reserved() + 2 * SIZE)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(SIZE, device=KIND)
    finally:
        simulator.set_capacity(0, before)
    assert simulator.statistics(0)["retries"] == retries + 1


def test_pinned_memory_that_is_still_written_is_reported():
    x = torch.ones(SIZE, device=KIND)
    host = torch.empty(SIZE, pin_memory=True)
    host.copy_(x, non_blocking=True)
    simulator.host_touch(host, False, "a send")
    assert kinds() == ["race"]


def test_pinned_memory_may_be_read_after_the_host_has_waited():
    x = torch.ones(SIZE, device=KIND)
    host = torch.empty(SIZE, pin_memory=True)
    host.copy_(x, non_blocking=True)
    MODULE.current_stream().record_event().synchronize()
    simulator.host_touch(host, False, "a send")
    assert not reports() and host.sum().item() == SIZE


def test_reports_do_not_depend_on_the_delays():
    found = []
    for seed in range(3):
        simulator.configure(True, 1000, 0.5, seed)
        freed_while_another_stream_reads(record=False)
        found.append(len(reports()))
        simulator.clear_reports()
    assert found[0] and len(set(found)) == 1
