"""Compute how fast a link must be to hide an eviction."""

from __future__ import annotations

from bpipe.estimate.activations import layer_bytes
from bpipe.estimate.execution import Execution
from bpipe.estimate.flops import layer_flops
from bpipe.estimate.transformer import Transformer

__all__ = ["hiding_bytes_per_s"]


def hiding_bytes_per_s(model: Transformer, execution: Execution, achieved_flops_per_s: float) -> float:
    """Compute the bytes per second and direction of each device that move a stage's microbatch while the stage runs one forward.

    Layers are alike, so this is what a layer keeps over the time of its forward. For GPT in 16 bits with sequence parallelism that
    is (34 or 34 + 5as/h) / (24 h (1 + s/6h)) x the operations per second that a device achieves, for any b, t and layer count.

    Example:
        >>> from bpipe.estimate.models import model_named
        >>> round(hiding_bytes_per_s(model_named("gpt3-96b"), Execution(tensor_parallel=4), 140e12) / 1e9)
        19
    """
    forward_s = layer_flops(model, 1) / (execution.tensor_parallel * achieved_flops_per_s)
    return layer_bytes(model, execution, 1) / forward_s
