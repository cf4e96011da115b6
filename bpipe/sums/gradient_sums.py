"""Gradients of weights that stages on several ranks hold: the ranks exchange them within the step, and add them up.

    0B6   REDUCE_GRAD: both ends post what they have       ...   WAIT_REDUCE_GRAD: .grad = .grad + that of the other end
    8B7   REDUCE_GRAD                                      ...   WAIT_REDUCE_GRAD

Twins hold the same weights and run different microbatches; other stages have tied weights in common, as an embedding and a head
have. Addition of two numbers has the same bits either way round, and more of them are sorted first, so that all copies have the
same gradients, and after the same optimizer step the same weights. What was in `.grad` before the step is set aside meanwhile,
because all have it already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire.dtensor import local
from bpipe.engine.run import Operations
from bpipe.engine.setup import Setup
from bpipe.errors import StageError
from bpipe.model.state.checksums import sum_of_bits
from bpipe.parallel.fsdp import Sharding, trained
from bpipe.parallel.replicas import COPY, dense_gradient
from bpipe.plan.sizes import Amount, gradients
from bpipe.schedules import Action, Channel, Op, Purpose
from bpipe.torch_private.fsdp_states import all_groups, free

__all__: list[str] = []

LATER = "_bpipe_sums_later"  # the attribute of a parameter whose gradient waits for a step that reduces it over replicas
SORTED = 2**16  # numbers that are sorted at a time

End = tuple[int, int]  # the stage and the part of an exchange


class _Exchange:
    """An exchange under way.

    Args:
        sent: flags of the parameters that have gradients, checksums of tied weights, and the gradients.
        received: likewise.
    """

    def __init__(self, sent: list[torch.Tensor], received: list[torch.Tensor], transfers: list[Transfer]) -> None:
        self.sent, self.received, self.transfers = sent, received, transfers


class GradientSums(Operations):
    """The exchanges of gradients of one rank of a plan during one step."""

    def __init__(self, setup: Setup, *_: object) -> None:
        plan, rank, parts, shared = setup.plan, setup.rank, setup.parts, setup.shared
        self._plan, self._rank, self._traffic, self._shared = plan, rank, setup.traffic, shared
        self._parameters: dict[End, list[nn.Parameter]] = {}  # one that twins of a rank share goes with the last of them
        self._is_copy: dict[int, bool] = {}  # by parameter: whether another rank counts its gradient
        seen: set[int] = set()
        for stage, part in ((one.stage, one.part) for one in reversed(plan.actions[rank]) if one.is_exchange and not one.part):
            all_of_stage = trained(parts[stage].modules, parts[stage].parameters)
            self._parameters[stage, part] = [one for one in all_of_stage if one.requires_grad and id(one) not in seen]
            self._is_copy |= dict.fromkeys(map(id, self._parameters[stage, part]), stage >= plan.depth)
            seen.update(map(id, self._parameters[stage, part]))
        for holders, weights in shared.weights.items() if plan.flow.sums else ():
            firsts = {plan.stage_ranks[stage]: stage for stage in reversed(holders)}
            for other in (stage for one, stage in firsts.items() if rank in firsts and one != rank):
                self._parameters.setdefault((firsts[rank], other + 1), []).extend(weights)
                self._is_copy |= dict.fromkeys(map(id, weights), firsts[rank] != holders[0])
        self.exchanged: dict[int, tuple[Amount, ...]] = {}
        self._compares = self._traffic.step.bit_count() < 2  # in steps 0, 1, 2, 4, 8 and so on, because the host waits for it
        self._before: dict[int, torch.Tensor] = {}  # by parameter: its gradient from earlier steps
        self.held_bytes = 0  # of those gradients, which stay beside the ones of this step
        self._later: set[int] = set()  # parameters whose gradients are added up in a later step
        self._under_way: dict[End, _Exchange] = {}

    @property
    def _all(self) -> list[nn.Parameter]:
        """All parameters whose gradients are added up, each once."""
        return list({id(one): one for parameters in self._parameters.values() for one in parameters}.values())

    @contextmanager
    def in_charge(self, sharding: Sharding | None) -> Iterator[None]:
        """Set aside the gradients of earlier steps; if the step fails, give those back to which nothing was added yet.

        A gradient that DistributedDataParallel averages in a later step (`no_sync`) is added up then, with that of this step.
        What an exchange still sends or receives stays in `_under_way`: a device may not have come to it.
        """
        self._later = set() if sharding is None else {id(one) for one in sharding.averaged_later()}
        new: list[nn.Parameter] = []
        for parameter in self._all:
            if id(parameter) in self._later:
                if not hasattr(parameter, LATER):
                    self._check_not_summed(parameter)
                    setattr(parameter, LATER, True)
                    new.append(parameter)
            elif parameter.grad is not None and not getattr(parameter, LATER, False):
                self._before[id(parameter)], parameter.grad = parameter.grad, None
        self.held_bytes = sum(local(gradient).nbytes for gradient in self._before.values())
        try:
            yield
        except BaseException:
            for parameter in self._all:
                parameter.grad = self._before.pop(id(parameter), parameter.grad)
            for parameter in new:
                delattr(parameter, LATER)
            raise

    def _check_not_summed(self, parameter: nn.Parameter) -> None:
        """Raise if a gradient that was added up already would be added up again with what a step leaves for a later one."""
        if parameter.grad is not None and bool(local(parameter.grad).any()):
            raise StageError(
                "a step under no_sync() adds to gradients that an earlier step has added up over stages already, and a later step "
                "would add them up again: zero the gradients before no_sync(), or reduce in every step"
            )

    @torch.no_grad()
    def begin(self) -> None:
        """Give all copies of a shared weight the value of the first stage's, where they begin with other ones."""
        for holders, weights in self._shared.weights.items():
            ranks = list(dict.fromkeys(self._plan.stage_ranks[stage] for stage in holders))
            unequal = [weight for weight in weights if id(weight) in self._shared.unequal]
            if not unequal:
                continue
            transport, (first, *others) = self._traffic.transport, ranks
            if self._rank == first:
                wire = [local(weight).contiguous() for weight in unequal]
                for transfer in [transport.send(Channel(Purpose.TWIN, first, rank), wire) for rank in others]:
                    transfer.wait()
                continue
            wire = [torch.empty_like(local(weight), memory_format=torch.contiguous_format) for weight in unequal]
            transport.receive(Channel(Purpose.TWIN, first, self._rank), wire).wait()
            for weight, value in zip(unequal, wire):
                local(weight).copy_(value)
                _free_gathered(weight)

    @torch.no_grad()
    def run(self, action: Action, state: Any) -> None:
        (self._start if action.op is Op.REDUCE_GRAD else self._complete)(action)

    def _start(self, action: Action) -> None:
        """Post gradients of this stage, and the receive of the other end's; nothing may change them until `_complete`."""
        assert action.peer is not None
        key, transport = (action.stage, action.part), self._traffic.transport
        parameters = self._parameters.get(key, [])
        has = [parameter.grad is not None and id(parameter) not in self._later for parameter in parameters]
        flags = torch.tensor([True, *has], dtype=torch.uint8, device=transport.device)  # never empty
        values = [self._checksums(parameters)] if action.part else []  # twins are compared by records
        made = [dense_gradient(one, f"stage {action.stage}", is_there=there) for one, there in zip(parameters, has)]
        sent = [flags, *values, *made]
        received = [torch.empty_like(tensor) for tensor in sent]
        send = partial(transport.send, Channel(Purpose.TWIN, self._rank, action.peer), sent)
        receive = partial(transport.receive, Channel(Purpose.TWIN, action.peer, self._rank), received)
        # One rank sends first, the other receives first: a send on a device may end only with its receive.
        transfers = [post() for post in ((send, receive) if self._rank < action.peer else (receive, send))]
        # Zeros take the place of gradients that are still to come, and are counted among the static bytes.
        copies = [one for one, there, p in zip(made, has, parameters) if there and not local(p.grad).is_contiguous()]
        num_bytes = sum(one.nbytes for one in (*received, flags, *values, *copies))
        self.exchanged[action.stage] = (*self.exchanged.get(action.stage, ()), Amount(gradients(action.part), num_bytes))
        self._under_way[key] = _Exchange(sent, received, transfers)

    def _checksums(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return a checksum of each parameter, int64, without a wait of the host; zeros in steps that compare none."""
        device = self._traffic.transport.device
        if not self._compares:
            return torch.zeros(len(parameters), dtype=torch.int64, device=device)
        return torch.stack([torch.as_tensor(sum_of_bits(local(one)), device=device) for one in parameters])

    def _complete(self, action: Action) -> None:
        """Wait for the gradients of the other end, and once those of all ends are there, add them."""
        key = action.stage, action.part
        for transfer in self._under_way[key].transfers:
            self._traffic.timed(action.op, transfer.wait)
        if action.part and self._compares:
            self._check_values(key)
        self._under_way[key].transfers = []
        together = [one for one in self._under_way if one[0] == action.stage]
        if len(together) < sum(stage == action.stage for stage, _ in self._plan.flow.exchanges):
            return
        if any(self._under_way[one].transfers for one in together):
            return
        for parameter in {id(one): one for one in (p for each in together for p in self._parameters.get(each, ()))}.values():
            self._add_up(parameter, together)
        for one in together:
            del self._under_way[one]

    def _add_up(self, parameter: nn.Parameter, keys: Sequence[End]) -> None:
        """Add what came for a parameter to its gradient, and that to the gradient of earlier steps, in the tensor of that."""
        if id(parameter) in self._later:
            return
        parts: list[torch.Tensor] = []
        for key in keys:
            places = [i for i, one in enumerate(self._parameters.get(key, ()), 1) if one is parameter]
            for place in places:
                exchange, at = self._under_way[key], place - len(self._parameters[key]) - 1
                if parameter.grad is None and exchange.received[0][place]:  # the host waits only for what it does not know
                    parameter.grad = torch.zeros_like(parameter, dtype=exchange.sent[at].dtype)
                parts = [*(parts or [exchange.sent[at]]), exchange.received[at]]
        if parameter.grad is not None:
            _sum(parts, local(parameter.grad))  # zeros are added, too: a sum has no negative zero then
        before = self._before.pop(id(parameter), None)
        if before is not None:
            if parameter.grad is not None:
                before += parameter.grad
            parameter.grad = before
        setattr(parameter, COPY, self._is_copy[id(parameter)])
        if getattr(parameter, LATER, False):
            delattr(parameter, LATER)

    def _check_values(self, key: End) -> None:
        """Raise if copies of a weight have become different ones."""
        exchange = self._under_way[key]
        if not torch.equal(exchange.sent[1], exchange.received[1]):
            raise StageError(
                f"stages {key[0]} and {key[1] - 1} share a weight, and their copies have different values now: give all of them "
                "the same optimizer and settings, clip by one norm (bpipe.clip_grad_norm_), and load the same values into all"
            )


def _sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Put the sum of some tensors into one, whatever their order: more than two numbers are sorted first."""
    if len(parts) == 2:
        torch.add(*parts, out=out)
        return
    total = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    for *some, into in zip(*(part.view(-1).split(SORTED) for part in (*parts, total))):
        first, *others = torch.stack(some).sort(0).values
        for other in others:
            first += other
        into.copy_(first)
    if total is not out:
        out.copy_(total)


def _free_gathered(weight: nn.Parameter) -> None:
    """Free what FSDP2 has gathered of a sharded weight, because its value has changed."""
    for group in all_groups():
        if not group.is_sharded and any(one.sharded_param is weight for one in group.fsdp_params):
            free(group)
