"""Modes that see every operation of a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.overrides
import torch.utils
from torch.autograd import forward_ad

from bpipe.torch_private.names import ask, missing

__all__: list[str] = []

try:
    import torch.utils._python_dispatch as _dispatch
except ImportError:  # pragma: no cover - a release to come may have moved it
    _dispatch = None  # type: ignore[assignment]


class _NoMode:
    def __init__(self) -> None:
        raise missing("TorchDispatchMode")


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode
else:
    DispatchMode = ask(_dispatch, "TorchDispatchMode", _NoMode)


def function_modes() -> list[Any]:
    """Return the function modes of this thread, such as a default device."""
    return ask(torch.overrides, "_get_current_function_mode_stack")()


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes of this thread."""
    return ask(_dispatch, "_get_current_dispatch_mode_stack")()


def derivative_level() -> int:
    """Return the level of forward derivatives that the process is in, -1 for none."""
    return ask(forward_ad, "_current_level", -1)
