"""What the replicas of a stage exchange: sums of gradients, with the same bits on all of them, and the state of a stage."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import combinations
from typing import Any

import torch
from torch import nn

from bpipe.comm.transport.base import Transport
from bpipe.errors import PipelineBrokenError, StageError
from bpipe.parallel.replicas import dense_gradient
from bpipe.plan.action import Channel, Purpose

__all__: list[str] = []

Tensors = Mapping[int, Sequence[torch.Tensor]]  # by seat


def channels_between(seats: Sequence[int], depth: int) -> list[Channel]:
    """Return the channels between all replicas of each stage, in the same order on all ranks."""
    pairs = [pair for pair in combinations(sorted(seats), 2) if pair[0] % depth == pair[1] % depth]
    return [Channel(Purpose.TWIN, *ends) for one, other in pairs for ends in ((one, other), (other, one))]


def givers_of(seats: Sequence[int], able: Collection[int], depth: int, num_steps: int) -> dict[int, int]:
    """Return for each stage the replica that gives its state to those that have come back: the first one that has it.

    Before the first step nobody has changed anything, so there the first replica has it in any case.

    Args:
        seats: of all who are there, in ascending order.
        able: of those who have been there after all steps.
        num_steps: how many steps are complete.

    Raises:
        PipelineBrokenError: no replica of a stage has its state.
    """
    givers: dict[int, int] = {}
    for seat in [*(one for one in seats if one in able), *(seats if not num_steps else [])]:
        givers.setdefault(seat % depth, seat)
    for stage in range(depth):
        if stage not in givers:
            raise PipelineBrokenError(
                f"no replica of stage {stage} has its weights after step {num_steps}: load a checkpoint in a new run, with a new "
                "store"
            )
    return givers


class Replicas:
    """The replicas of a stage that take part, seen from the one with a seat; `transport` has their channels open."""

    def __init__(self, transport: Transport, seat: int, seats: Sequence[int]) -> None:
        self._transport, self._seat, self._seats = transport, seat, list(seats)
        self._others = [one for one in seats if one != seat]

    @torch.no_grad()
    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each parameter the sum of its gradients on all replicas. Collective between them; blocks the host.

        Each replica adds up one piece, in the order of the replicas, and gives the sum to the others: so all have the same bits,
        and send as little as can be. A parameter without a gradient on all replicas keeps none.
        """
        if not self._others:
            return
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        groups = list(by_dtype.values())
        has = torch.tensor([one.grad is not None for group in groups for one in group], dtype=torch.int32)
        place = "replicas of a stage"
        flat = (torch.cat([dense_gradient(one, place).reshape(-1).to(one.dtype) for one in group]) for group in groups)
        counts, *sums = self._summed([has, *flat])
        there = iter(counts.tolist())
        for group, total in zip(groups, sums):
            for parameter, piece in zip(group, total.split([one.numel() for one in group])):
                parameter.grad = piece.view_as(parameter).clone() if next(there) else None

    def _summed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums of some flat tensors, of which all replicas have ones that look alike."""
        cut = [tensor.tensor_split(len(self._seats)) for tensor in tensors]
        pieces = {seat: [pieces[index] for pieces in cut] for index, seat in enumerate(self._seats)}
        found = self._exchange(pieces, dict.fromkeys(self._seats, pieces[self._seat]))
        own = [reduce(torch.add, each) for each in zip(*(found[seat] for seat in self._seats))]
        found = self._exchange(dict.fromkeys(self._seats, own), pieces)
        return [torch.cat(each) for each in zip(*(found[seat] for seat in self._seats))]

    def _exchange(self, sent: Tensors, like: Tensors) -> Tensors:
        """Send tensors to each other replica, and receive from each what looks like others; this replica's own stay."""
        received = {seat: [torch.empty_like(one) for one in like[seat]] for seat in self._others}
        transfers = [self._transport.receive(Channel(Purpose.TWIN, seat, self._seat), received[seat]) for seat in self._others]
        transfers += [self._transport.send(Channel(Purpose.TWIN, self._seat, seat), sent[seat]) for seat in self._others]
        for transfer in transfers:
            transfer.wait()
        return {**received, self._seat: sent[self._seat]}

    def give(self, data: torch.Tensor, seats: Iterable[int]) -> None:
        """Send bytes to some replicas."""
        for transfer in [self._transport.send(Channel(Purpose.TWIN, self._seat, seat), [data]) for seat in seats]:
            transfer.wait()

    def take(self, num_bytes: int, seat: int) -> torch.Tensor:
        """Receive bytes from a replica."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._transport.device)
        self._transport.receive(Channel(Purpose.TWIN, seat, self._seat), [data]).wait()
        return data


def packed_state(module: nn.Module, objects: Sequence[Any]) -> torch.Tensor:
    """Return the state of a stage as bytes: its module, its gradients of steps that nobody has used yet, and some objects."""
    states = [one.state_dict() for one in objects]
    gradients = [parameter.grad for parameter in module.parameters()]
    buffer = io.BytesIO()
    torch.save({"module": module.state_dict(), "gradients": gradients, "objects": states}, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def load_state(data: torch.Tensor, module: nn.Module, objects: Sequence[Any]) -> None:
    """Load what `packed_state` has made. It reads tensors and plain values, and nothing that could run code.

    Raises:
        StageError: there is something else in it.
    """
    try:
        state = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise StageError(
            "the state of a replica has more than tensors and plain values, which is not read from another process: let the "
            "state_dict of what is in state= and of the module return only these, without NumPy arrays or objects of your own"
        ) from error
    module.load_state_dict(state["module"])
    for parameter, gradient in zip(module.parameters(), state["gradients"], strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    for one, own in zip(objects, state["objects"], strict=True):
        one.load_state_dict(own)


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Set the gradients of earlier steps aside; what is found inside is added to them if the given function is called."""
    before = [parameter.grad for parameter in parameters]
    is_kept = False

    def keep() -> None:
        nonlocal is_kept
        is_kept = True

    for parameter in parameters:
        parameter.grad = None
    try:
        yield keep
    finally:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, before):
                if is_kept and gradient is not None and parameter.grad is not None:
                    gradient += parameter.grad
                if not is_kept or gradient is not None:
                    parameter.grad = gradient
