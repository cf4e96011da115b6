"""Which modules take a sequence in slices."""

from __future__ import annotations

import inspect

from torch import nn

from bpipe.errors import ConfigurationError
from bpipe.torch_private.modules import COMPILED

__all__: list[str] = []

# The class of nn.BatchNorm1d, nn.InstanceNorm1d and those of other libraries, whose statistics are over all positions.
(NORM_BASE,) = {*nn.BatchNorm1d.__mro__} & {*nn.InstanceNorm1d.__mro__} - {*nn.Module.__mro__}
PAST = "past"  # the argument by which a module gets what earlier slices have left
WRAPPED = (COMPILED, "module")  # what torch.compile and DistributedDataParallel hold


def check_takes_slices(module: nn.Module, name: str) -> None:
    """Raise a ConfigurationError if a stage's module has no argument `past`, or a layer that mixes the positions of a sequence."""
    if not takes_past(module):
        raise ConfigurationError(
            f"{name} does not take slices: the forward of its {type(module).__name__} has no argument `past`. Give it one, with "
            "what it has returned as its state for the earlier slices of the sequence, and return (output, state); see bpipe.slices"
        )
    for path, layer in module.named_modules():
        if isinstance(layer, (NORM_BASE, nn.GroupNorm)):
            raise ConfigurationError(
                f"{name} does not take slices: {path or 'it'} is a {type(layer).__name__}, whose statistics would be those of a "
                "slice and not of the whole sequence. Use LayerNorm or RMSNorm, or train without slices"
            )


def takes_past(module: nn.Module) -> bool:
    """Return whether a module, or the one that it wraps, gets what earlier slices have left."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
    if PAST in parameters:
        return True
    return any(isinstance(inner := getattr(module, name, None), nn.Module) and takes_past(inner) for name in WRAPPED)
