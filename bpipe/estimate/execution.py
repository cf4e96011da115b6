"""The execution of a transformer: which tensors its layers keep and recompute, and how many devices share each layer."""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.checks import check_count, lookup
from bpipe.errors import ConfigurationError

__all__ = ["Execution"]

ATTENTIONS = ("materialised", "flash")
RECOMPUTATIONS = ("none", "selective", "full")
VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The execution of a stage's layers.

    Args:
        attention: "materialised" keeps the [s, s] attention maps, "flash" (any fused kernel) does not.
        recomputation: "none"; "selective": materialised attention's core is not kept and its forward runs again in the
            backward; "full": only each layer's input is kept, and the layer's whole forward runs again.
        tensor_parallel: t, the number of devices that share each layer.
        sequence_parallel: whether what tensor parallelism would keep whole on each device (norms, their outputs, dropout)
            is cut along the sequence (Korthikanti et al., arXiv 2205.05198).
        precision: of activations: "bf16", "fp16" or "fp32".

    Raises:
        ConfigurationError: a name is unknown, or t is not positive.

    Example:
        >>> Execution(attention="flash", recomputation="selective", tensor_parallel=4).precision
        'bf16'
    """

    attention: str = "flash"
    recomputation: str = "none"
    tensor_parallel: int = 1
    sequence_parallel: bool = True
    precision: str = "bf16"

    def __post_init__(self) -> None:
        if self.attention == "selective":
            raise ConfigurationError(
                "attention='selective' is a way to recompute: say attention='materialised', recomputation='selective'"
            )
        for name, known in (("attention", ATTENTIONS), ("recomputation", RECOMPUTATIONS), ("precision", VALUE_BYTES)):
            object.__setattr__(self, name, lookup(name, getattr(self, name), {one: one for one in known}))
        check_count("tensor_parallel", self.tensor_parallel)

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation."""
        return VALUE_BYTES[self.precision]

    @property
    def keeps_maps(self) -> bool:
        """Whether attention maps are kept from the forward to the backward."""
        return self.attention == "materialised" and self.recomputation == "none"
