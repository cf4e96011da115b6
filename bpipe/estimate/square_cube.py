"""From which width messages hide: computing grows with its square, a message with the width alone (SWARM, arXiv 2301.11913).

A microbatch's message has B s h bytes, and a forward of n layers takes n (2 s c h^2 + 4 s^2 h) operations, where c h^2 are the
parameters of a layer's matrices. So the message takes no longer than the forward, over a link of R bytes a second beside devices
that compute F operations a second, from h = (B F / (R n) - 4 s) / 2c on.
"""

from __future__ import annotations

import math

from bpipe.estimate.activations import message_bytes
from bpipe.estimate.execution import Execution
from bpipe.estimate.transformer import Transformer

__all__: list[str] = []

IN_8_BITS = 1 + 4 / 64  # bytes of an element with its part of a scale, in blocks of 64


def hides_from(
    model: Transformer,
    execution: Execution,
    *,
    layers: int,
    flops_per_s: float,
    bytes_per_s: float,
    element_bytes: float | None = None,
) -> int:
    """Return the least width h, at the proportions of a model, from which a message takes no longer than its stage's forward.

    Args:
        layers: n, of the stage.
        flops_per_s: what the devices of a stage reach together.
        bytes_per_s: of the link of a device, in one direction.
        element_bytes: of a message's elements; default: those of the model's precision.
    """
    per_element = execution.value_bytes if element_bytes is None else element_bytes
    sent = message_bytes(model, execution, 1) / (model.sequence * model.hidden) * per_element / execution.value_bytes
    matrices = model.layer_matrices / model.hidden**2
    return max(1, math.ceil((sent * flops_per_s / (bytes_per_s * layers) - 4 * model.sequence) / (2 * matrices)))


def say_from_where(
    model: Transformer, execution: Execution, *, num_stages: int, layers: int, flops_per_s: float, bytes_per_s: float
) -> str:
    """Say from which width messages hide, and whether this model's do."""
    exact, small = (
        hides_from(model, execution, layers=layers, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, element_bytes=size)
        for size in (None, IN_8_BITS)
    )
    enough = "enough" if model.hidden >= exact else "enough in 8 bits" if model.hidden >= small else "not enough"
    return (
        f"A message between {num_stages} stages of {layers} layers takes no longer than a forward from hidden size {exact} on, and "
        f"in 8 bits from {small} on, at this model's proportions; its {model.hidden} is {enough}."
    )
