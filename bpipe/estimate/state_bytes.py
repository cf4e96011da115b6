"""Bytes that training keeps for each parameter."""

from __future__ import annotations

from bpipe.checks import check_count, lookup
from bpipe.estimate.execution import VALUE_BYTES

__all__ = ["bytes_per_parameter"]

STATE_BYTES = {"adam": 8, "adamw": 8, "momentum": 4, "sgd": 0}  # fp32: two moments, one, none
MASTER_BYTES = 4  # an fp32 copy of a parameter in 16 bits
DEFAULT_BYTES_PER_PARAMETER = 18


def bytes_per_parameter(
    optimizer: str = "adam", *, precision: str = "bf16", gradient_precision: str = "fp32", num_shards: int = 1
) -> float:
    """Compute the bytes of a parameter, its gradient, its fp32 master copy (if it has 16 bits) and its optimizer states.

    Adam with bf16 parameters: 2 + 4 + 4 + 8 = 18 with gradients added up in fp32 (Megatron-LM), 2 + 2 + 4 + 8 = 16 with 16-bit
    gradients (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1).

    Args:
        optimizer: "adam", "adamw", "momentum" or "sgd".
        precision: the precision of the parameters.
        gradient_precision: the precision of the gradients.
        num_shards: data-parallel replicas that share the optimizer's states and master copy (ZeRO-1, Megatron-LM's distributed
            optimizer).

    Raises:
        ConfigurationError: a name is unknown.

    Example:
        >>> bytes_per_parameter(), bytes_per_parameter(gradient_precision="bf16"), bytes_per_parameter(num_shards=4)
        (18.0, 16.0, 9.0)
    """
    check_count("num_shards", num_shards)
    value = lookup("precision", precision, VALUE_BYTES)
    gradient = lookup("gradient_precision", gradient_precision, VALUE_BYTES)
    master = MASTER_BYTES if value < 4 else 0
    return value + gradient + (master + lookup("optimizer", optimizer, STATE_BYTES)) / num_shards
