"""The numbers of a step, plain enough for any logger."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from bpipe.engine.remembered import Memory
from bpipe.engine.run import Run
from bpipe.memory.ledger import Key
from bpipe.memory.peaks import peak
from bpipe.memory.saved.footprint import Footprint
from bpipe.memory.static import bytes_under
from bpipe.plan.meter import occupancy
from bpipe.schedules import Op, Plan

__all__: list[str] = []


class Stats:
    """Count what one rank uses, step by step."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._planned: _Planned | None = None
        self._taken: tuple[object, ...] = ()  # what the peaks of the latest step were computed from, besides the plan
        self._peaks = (0, 0, 0)  # on the device, as counted and as predicted; of activations alone, as predicted

    def of(self, run: Run, static_bytes: int, seconds: float) -> dict[str, float]:
        """Compute the numbers of a step: the memory that the rank used, and how long it waited.

        Args:
            static_bytes: its parameters, their gradients, its buffers, and the states that optimizers have made for them.

        Returns:
            Bytes, of two kinds. All that the device holds at once: `device_peak_bytes`, the sum of `static_bytes` (parameters,
            gradients, buffers, optimizer states, other tensors of the modules, outputs and losses that are returned),
            `remote_buffer_bytes` (buffers kept for other ranks), saved activations and messages between stages.
            Activations: `peak_bytes`, saved and remote ones alone, with `held_bytes` (saved and not movable, each storage once).
            Also `host_peak_bytes`, this rank's buffers in its host's memory; `evicted_bytes`, `loaded_bytes`. Microbatches:
            `peak_slots`. Each peak has a second entry with the prefix `predicted_`, computed from the plan: with the plan's sizes,
            or if it has none with the largest memory that microbatches of each shape took before.

            In no peak, because no plan knows of it, as of the buffers of NCCL, gloo and the kernel: `shared_message_bytes`, the
            memory through which messages travel between ranks of a host. On CPU it is the host's, 8 MiB for each channel over which
            this rank has sent a large message; on GPUs the device's, 16 MiB for each channel over which this rank receives.

            Optimizer states count once their optimizer has stepped while a schedule was open, including states that were loaded
            before. Gradients count before they exist, buffers before their first remote activation arrives, and in a step with
            new shapes messages count as if their shapes were known.

            How peaks are known, in microbatches, each of which counts once on each stage of the rank: `microbatches_measured` were
            measured in this step; `microbatches_assumed` count like a measured one of the same stage and shapes, because their
            graphs have as many nodes; `microbatches_unknown` are not counted, because their graphs have a new number of nodes
            and do not show everything that they save: if there are any, the true peaks may be higher.

            Seconds: `step_s`, and those during which this rank's compute lane waited, by kind of transfer. If the device waits and
            the host does not, as over NCCL, the host runs ahead: these are the latest known ones, of step `wait_step` (-1: none
            yet), and `step_s` is the host's.
        """
        ledger, waited, of_step = run.evictions.ledger, run.traffic.waited_s, run.step
        if (waits := self._memory.device_waits) is not None:
            of_step, waited = waits.finish(run.step)
        plan, planned, memory = run.plan, self._plan(run), self._memory
        device, predicted_device, predicted = self._peaks_of(run, run.evictions.predicted())
        static = static_bytes + ledger.held_bytes + bytes_under(run.results.returned)
        always = static + memory.remote_buffer_bytes + run.exchanges.held_bytes
        stored = memory.remote_buffer_bytes + ledger.held_bytes
        return {
            "step": run.step,
            "step_s": seconds,
            "device_peak_bytes": always + device,
            "predicted_device_peak_bytes": always + predicted_device if planned.device_bytes is None else planned.device_bytes,
            "host_peak_bytes": memory.host_bytes,
            "predicted_host_peak_bytes": memory.host_bytes if planned.host_bytes is None else planned.host_bytes,
            "peak_bytes": ledger.peak_bytes + stored,
            "predicted_peak_bytes": predicted + stored,
            "peak_slots": ledger.peak_slots + planned.remote_buffers,
            "predicted_peak_slots": planned.slots + planned.remote_buffers if plan.has_backward else 0,
            **run.evictions.counts(),
            "static_bytes": static,
            "evicted_bytes": ledger.evicted_bytes,
            "loaded_bytes": ledger.loaded_bytes,
            "held_bytes": ledger.held_bytes,
            "remote_buffer_bytes": memory.remote_buffer_bytes,
            "shared_message_bytes": run.traffic.transport.shared_message_bytes(),
            "wait_forward_s": waited[Op.WAIT_RECV_F],
            "wait_backward_s": waited[Op.WAIT_RECV_B],
            "wait_send_s": waited[Op.WAIT_SEND_F] + waited[Op.WAIT_SEND_B],
            "wait_evict_s": waited[Op.WAIT_EVICT],
            "wait_load_s": waited[Op.WAIT_LOAD],
            "wait_exchange_s": waited[Op.WAIT_REDUCE_GRAD],
            "wait_step": of_step,
        }

    def _peaks_of(self, run: Run, predicted: Mapping[Key, Footprint]) -> tuple[int, int, int]:
        """Return the peaks of a step, computed again only when the plan, or what a microbatch takes, has changed."""
        taken = footprints, exchanged = run.evictions.ledger.footprints, run.exchanges.exchanged
        if self._taken != (*taken, predicted):
            of = partial(peak, run.plan, run.rank)
            self._taken = *taken, predicted
            self._peaks = (
                of(footprints, exchanged, with_messages=True),
                of(predicted, exchanged, with_messages=True),
                of(predicted, with_messages=False),
            )
        return self._peaks

    def _plan(self, run: Run) -> _Planned:
        """Return the plan's own numbers for this rank, computed once because they are the same in every step."""
        if self._planned is None or self._planned.plan is not run.plan:
            self._taken = ()
            plan, rank = run.plan, run.rank
            self._planned = _Planned(
                plan=plan,
                slots=max(occupancy(plan.actions[rank]), default=0),
                remote_buffers=sum(map(len, plan.remote_buffers(rank).values())),
                device_bytes=None if plan.sizes is None else plan.device_peak_bytes[rank],
                host_bytes=None if plan.sizes is None else plan.host_bytes(rank),
            )
        return self._planned


class _Planned(NamedTuple):
    """The numbers of a plan for one rank: its own microbatches at once, remote buffers, and the peaks, if the plan counts bytes."""

    plan: Plan
    slots: int
    remote_buffers: int
    device_bytes: int | None
    host_bytes: int | None
