"""What saved-tensor hooks hand to autograd in place of tensors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from bpipe.errors import SavedTensorError
from bpipe.memory.saved.storages import shares_parts
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

FORGOTTEN = "a stage's graph is used a second time, after its backward. Compute shared values again in each forward."


def untraced(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keep torch.compile away from a saved-tensor hook, which is called where a module that it compiles runs eagerly."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


class Saved:
    """The object that a saved-tensor hook hands to autograd: an alias of the tensor, its version, and its place in saving order.

    The tensor itself, as long as it has an owner, and its attributes are for the custom Function that saves it, if one does.
    """

    __slots__ = ("__weakref__", "attributes", "is_away", "is_forgotten", "is_no_alias", "order", "original", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, order: int) -> None:
        self.order, self.is_away, self.is_forgotten = order, False, False
        self.original: weakref.ref[torch.Tensor] | None = None
        self.attributes: dict[str, Any] = {}
        self.tensor = tensor if tensor.is_leaf and isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        self.version = version_of(tensor)
        self.is_no_alias = type(tensor) is not torch.Tensor and shares_parts(self.tensor, tensor)

    @property
    def guard(self) -> Saved:
        """The saved tensor that is asked for before this one can be used."""
        return self

    def check_unchanged(self, name: str) -> None:
        """Raise a SavedTensorError if the tensor was changed in place since it was saved for the backward of what has this name."""
        if version_of(self.tensor) != self.version:
            raise SavedTensorError(
                f"a tensor saved for the backward of {name} was modified in place: shape {shape_of(self.tensor)}, "
                f"{self.tensor.dtype}, version {version_of(self.tensor)}, expected {self.version}. "
                "Replace the in-place operation, or clone the tensor before it."
            )

    def forget(self) -> None:
        """Release the memory: no backward will ask for it again."""
        self.tensor, self.is_forgotten = torch.empty(0, device="cpu"), True


class Packed:
    """The result of the user's own pack hook, if that is not a tensor: it does not move."""

    __slots__ = ("is_forgotten", "order", "value")

    def __init__(self, value: Any, order: int) -> None:
        self.value, self.order, self.is_forgotten = value, order, False

    def forget(self) -> None:
        """Release the value: no backward will ask for it again."""
        self.value, self.is_forgotten = None, True


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of a nested one, whose parts have shapes of their own, the number of parts."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)
