"""The state that the steps of one rank share: its stages, its transport, and everything it remembers between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.comm.health.agreement import StepRecord
from bpipe.comm.transport.base import Transport
from bpipe.device import is_asynchronous
from bpipe.device.waits import DeviceWaits
from bpipe.engine.lanes import Lanes
from bpipe.engine.remembered import Memory
from bpipe.engine.run import MakeConvention
from bpipe.logs import RankLog
from bpipe.memory.optimizers import States
from bpipe.memory.static import StaticBytes
from bpipe.model.call import CutBatch, Loss, Specs
from bpipe.model.plain_numbers import CountedNumbers
from bpipe.model.stage import ModuleSnapshot, PipelineStage
from bpipe.plan.plan import Plan
from bpipe.session.guard import Guard

__all__: list[str] = []

Once = Callable[[object, Callable[[], Plan]], Plan]  # makes a plan once for all ranks of this process that ask for the same one


class Cutter:
    """Cuts microbatches once more, if stages do not take them whole. This one leaves them whole; a room's own overrides it.

    Attributes:
        is_whole: whether it does.
    """

    is_whole = True

    def check(self, stages: Mapping[int, PipelineStage], parts: Mapping[int, ModuleSnapshot]) -> None:
        """Raise a ConfigurationError if some stages do not take what this cuts; `parts` is what they are when a step begins."""

    def cut(self, given: CutBatch) -> CutBatch:
        """Cut all microbatches of a call."""
        return given

    def agreed(self, records: Sequence[StepRecord]) -> None:
        """Take from the records of all ranks what they have agreed on."""

    def conventions(self) -> Sequence[MakeConvention]:
        """Return what makes the conventions by which a step's stages are called."""
        return ()

    def merged(self, outputs: Mapping[int, Any]) -> list[Any]:
        """Return the outputs of the microbatches that this rank has, given those of all pieces, by their numbers."""
        return list(outputs.values())

    def expected(self, output: Any) -> list[Any]:
        """Return what the outputs of microbatches will look like, given the first piece's."""
        return [output]


@dataclass(slots=True, kw_only=True)
class RankContext:
    """The state that the steps of one rank share."""

    stages: Mapping[int, PipelineStage]  # the stages on this rank, by index
    loss_fn: Loss  # called on the last stage, or None
    transport: Transport  # carries the rank's messages
    plan_rank: int  # this rank's number in the plan
    specs: Specs = field(default_factory=Specs)  # how batches are cut and outputs merged
    cutter: Cutter = field(default_factory=Cutter)  # cuts microbatches further, and puts outputs and losses together again
    scale_grads: bool = True  # whether the loss of each of m microbatches is scaled by 1/m
    group: Any = None  # the process group, or the rank's place in a loopback
    once: Once = lambda asked, make: make()  # makes a plan once for all ranks in this process
    group_ranks: list[int] = field(default_factory=list)  # the ranks of the group by rank of the plan; empty before the first step
    memory: Memory = field(default_factory=Memory)  # the sizes and buffers of its microbatches
    # the plain numbers among its inputs, and which of them affect memory or messages
    numbers: CountedNumbers = field(default_factory=CountedNumbers)
    only_evaluates: bool = False  # whether `step` runs no backward, although there is a loss
    held_bytes: int = 0  # the most bytes of gradients of earlier steps that a step has set aside, where ranks add some up
    lanes: Lanes = field(init=False)  # run its actions
    guard: Guard = field(init=False)  # lets its steps run one at a time, and refuses steps after an error
    states: States = field(init=False)  # counts the bytes of optimizer states
    static: StaticBytes = field(init=False)  # counts the bytes that stay between steps, without optimizer states

    def __post_init__(self) -> None:
        device = self.transport.device
        if self.transport.waits_on_device and is_asynchronous(device):
            self.memory.device_waits = DeviceWaits(device)
        self.lanes, self.states, self.static = Lanes(self.transport), States(device), StaticBytes(device)
        self.guard = Guard(self.transport, self.lanes)

    def modules(self) -> list[torch.nn.Module]:
        """Return the current modules of the stages."""
        return [stage.submod for stage in self.stages.values()]

    def last_modules(self) -> list[torch.nn.Module]:
        """Return the current modules of those stages that return the pipeline's outputs."""
        return [stage.submod for stage in self.stages.values() if stage.is_last]

    @property
    def trains(self) -> bool:
        """Whether `step` runs backwards."""
        return self.loss_fn is not None and not self.only_evaluates

    @property
    def group_rank(self) -> int:
        """This rank's number in the group."""
        return self.group_ranks[self.plan_rank]

    def log(self) -> RankLog:
        """Return the log of this rank."""
        return RankLog(self.group_rank)
