"""Inference of another model, layer by layer, in the time in which a rank waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from bpipe.errors import ConfigurationError
from bpipe.fill.counted import Counted, strided_in
from bpipe.fill.iterated import Pieces
from bpipe.fill.job import Job, OnError
from bpipe.fill.own_state import OwnState
from bpipe.torch_private.owners_and_versions import address_of

__all__ = ["Inference"]


class Inference(Pieces):
    """Evaluate a model on batches, or compute embeddings, without gradients; each layer's call on a batch is a piece.

    The first batch runs once when the job is made, which measures the seconds and bytes of each layer: later ones must not take
    more bytes. The outputs are those of the layers called one after the other, to the bit. Put the modules in eval mode, and on the
    rank's device, as you would there.

    Args:
        layers: the model as a chain, such as an `nn.Sequential`: each layer gets what the one before has returned.
        batches: inputs of the first layer, such as a `DataLoader`; a tuple is passed as several arguments.
        on_output: called with the output of each batch, in order.
        kept_bytes: what `on_output` keeps of the device at most, of all outputs together. The job takes them from the beginning, so
            it may need a `budget` with room for them.
        name: `Job.name`.
        on_error: `Job.on_error`.
        budget: `Job.budget`.
        grace_s: `Job.grace_s`.

    Raises:
        ConfigurationError: there is no layer or no batch.

    Example:
        >>> import torch
        >>> outputs = []
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
        >>> job = Inference(model, [torch.zeros(2, 4)] * 3, on_output=outputs.append)  # then: schedule.fill = job
        >>> while not job.is_over:
        ...     _ = job.step(seconds=60.0, num_bytes=2**30)  # what a schedule calls while its rank waits
        >>> len(outputs)
        3
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        batches: Iterable[Any],
        on_output: Callable[[Any], object],
        *,
        kept_bytes: int = 0,
        name: str = "inference",
        on_error: OnError = "fail",
        budget: int | None = None,
        grace_s: float = Job.grace_s,
    ) -> None:
        self._layers = list(layers)
        tensors = [one for layer in self._layers for one in chain(layer.parameters(), layer.buffers())]
        device = tensors[0].device if tensors else torch.device("cpu")
        with OwnState(device).active():  # a DataLoader draws numbers when it begins, and layers may: training's stay the same
            others = iter(batches)
            with (made := Counted(device)):
                first = next(others, None)
            if first is None or not self._layers:
                raise ConfigurationError("inference takes at least one layer and one batch")
            between, during, seconds = _measured(self._layers, first, device, _bytes_of_batch(first, made, device))
        super().__init__(
            lambda: _run(self._layers, chain([first], others), on_output),
            num_bytes=during - between,
            name=name,
            on_error=on_error,
            budget=budget,
            held_bytes=between + kept_bytes,
            static_bytes=_bytes_of(tensors, device),
            grace_s=grace_s,
        )
        for index, took in enumerate(seconds):
            self._known.learn(index, took)
        self._next = 0


def _measured(layers: Sequence[nn.Module], batch: Any, device: torch.device, own: int) -> tuple[int, int, list[float]]:
    """Return the bytes of a batch between layers at most, those during a layer at most, and the seconds of each layer."""
    counted, seconds = Counted(device), list[float]()
    between = during = 0
    pieces = _run(layers, [batch], lambda output: None)
    for _ in layers:
        began = time.perf_counter()
        with counted:
            counted.begin()
            next(pieces)
        seconds.append(time.perf_counter() - began)
        between, during = max(between, counted.live_bytes()), max(during, counted.peak_bytes)
    return between + own, during + own, seconds  # later batches are made in a piece


def _run(layers: Sequence[nn.Module], batches: Iterable[Any], on_output: Callable[[Any], object]) -> Iterator[Hashable]:
    """Yield behind each layer's call the index of the next one."""
    for batch in batches:
        given = batch if isinstance(batch, tuple) else (batch,)
        del batch
        for index, layer in enumerate(layers, start=1):
            with torch.no_grad():
                made = layer(*given)
            given = made if isinstance(made, tuple) else (made,)
            if index < len(layers):
                del made
                yield index
        on_output(made)
        del made, given
        yield 0


def _bytes_of_batch(batch: Any, made: Counted, device: torch.device) -> int:
    """Return the bytes that were made for a batch, and of tensors that were there before, such as a data set, those of its part."""
    tensors = strided_in(batch)
    new = [one for one in tensors if made.has_counted(one)]
    there = [one for one in tensors if one.device == device and not made.has_counted(one)]
    return _bytes_of(new, device) + sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in there)


def _bytes_of(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes of the storages of tensors on a device, each counted once."""
    storages = [one.untyped_storage() for one in tensors if one.device == device]
    return sum({address_of(one): one.nbytes() for one in storages}.values())
