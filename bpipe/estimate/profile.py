"""Measure one stage alone: its saved bytes, counted as the runtime counts them, and the seconds of its forward and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from bpipe.checks import counts_of
from bpipe.cleanup import note
from bpipe.device import name_of
from bpipe.estimate.bench import Bench, Loss
from bpipe.estimate.measurement import Measurement, Profile
from bpipe.memory.saved.storages import element_bytes
from bpipe.model.preserve_state import preserved_state

__all__ = ["profile"]


def profile(
    stage_module: torch.nn.Module,
    example: Any,
    microbatch_sizes: Sequence[int] = (1,),
    *,
    loss_fn: Loss | None = None,
    target: Any = None,
    is_first: bool | None = None,
    backward: bool = True,
    repeats: int = 5,
) -> Profile:
    """Run a stage alone, count what it saves for the backward, and time its forward, its backward, and both halves of a split one.

    Bytes are counted with the code that a pipeline uses, so that they equal what a run's ledger shows for the same stage. The
    module is left as it was: gradients, buffers, random numbers and modes; only what else it does to itself (attributes that its
    forward sets) stays. Blocks the host; runs in the caller's modes and autocast.

    Args:
        stage_module: the partition, where it will run: parameters on the device, in the precision, trainable and in train mode
            as in training.
        example: its input, or a tuple of positional arguments: a pytree with tensors [rows, ...] whose rows are repeated to each
            size, for any number of rows, and anything else.
        microbatch_sizes: rows of a microbatch.
        loss_fn: for the last stage: `loss_fn(output, target)`, counted and timed with the stage.
        target: what `loss_fn` gets, with rows repeated likewise.
        is_first: whether it is the first stage, whose input needs no gradient and is the user's own; default: if no tensor of the
            example has floating point numbers.
        backward: False to run forwards only; their times are not those of a step, so `advise` refuses them.
        repeats: timed runs of each size, after one that is not timed; the median counts.

    Returns:
        A `Profile`, which `bpipe.advise` takes, alone or as one for each stage.

    Raises:
        ConfigurationError: not a module, an example without tensors or rows, sizes that make no microbatch, parameters that are not
            there yet, or hooks that would change the parameters during a backward.
        StageError: nothing in the output needs a gradient; or the module returned something that cannot be sent.

    What the module itself raises is passed on, with a note that names the microbatch size.

    Example:
        >>> from torch import nn
        >>> measured = profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(1, 8), microbatch_sizes=[1, 2])
        >>> [one.own_bytes for one in measured.measurements]  # the input and the output, 8 floats each
        [64, 128]
    """
    bench = Bench.of(
        "profile", stage_module, example, repeats, loss_fn=loss_fn, target=target, is_first=is_first, has_backward=backward
    )
    sizes = counts_of("microbatch_sizes", microbatch_sizes, of_one="microbatch size")
    with preserved_state([stage_module], bench.device), torch.enable_grad():
        measurements = tuple(_measured(bench, size, repeats) for size in sizes)
        gradient_bytes = sum(element_bytes(parameter.grad) for parameter in stage_module.parameters() if parameter.grad is not None)
    parameters = list(stage_module.parameters())
    return Profile(
        name=type(stage_module).__name__,
        device=name_of(bench.device),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(map(element_bytes, parameters)),
        trainable_bytes=sum(element_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        gradient_bytes=gradient_bytes,
        buffer_bytes=sum(map(element_bytes, stage_module.buffers())),
        measurements=measurements,
    )


def _measured(bench: Bench, size: int, repeats: int) -> Measurement:
    try:
        footprint, output_bytes, input_gradient_bytes = bench.counted(size)
        times = [bench.timed(size) for _ in range(repeats)]
        halves = [bench.timed_halves(size) for _ in range(repeats + 1)][1:] if bench.has_backward else []
    except Exception as error:
        note(error, f"while bpipe.profile ran {type(bench.module).__name__} on a microbatch of {size}")
        raise
    return Measurement(
        microbatch_size=size,
        own_bytes=footprint.own_bytes,
        movable_bytes=footprint.movable_bytes,
        shared_bytes=footprint.shared_bytes,
        output_bytes=output_bytes,
        input_gradient_bytes=input_gradient_bytes,
        forward_s=median(forward_s for forward_s, _ in times),
        backward_s=median(backward_s for _, backward_s in times),
        input_s=median(input_s for input_s, _ in halves) if halves else None,
        weight_s=median(weight_s for _, weight_s in halves) if halves else None,
    )
