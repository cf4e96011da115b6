"""What torch can be told process-wide, found by rules and not by a list: a setting that a release adds is among them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from bpipe.torch_private.names import ask

__all__: list[str] = []

# Modules whose variables a forward, a backward or an optimizer's step reads, as far as they are loaded.
_MODULES = (
    "torch.__future__",
    "torch.autograd.forward_ad",
    "torch.autograd.graph",
    "torch.backends.mha",
    "torch.backends.opt_einsum",
    "torch.nn.modules.module",
    "torch.nn.utils.parametrize",
    "torch.optim.optimizer",
    "torch.utils._device",
    "torch.utils.checkpoint",
)
# Read in other ways below, deprecated, or kept by torch for each thread, which is no setting of the process.
_OTHERWISE = ("autocast", "deterministic_algorithms", "anomaly", "num_threads", "interop", "dispatch_mode", "thread_name")
_GETTER = re.compile("_?(?:get|is)_(.+)")
_PRECISION = "_fp32_precision_"


class Setting(NamedTuple):
    """A setting of the process: its name, how it is read, and how it is set to what was read."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


def settings() -> list[Setting]:
    """Return all settings of torch that can be read and set; a later one may depend on an earlier one."""
    return [*_in_pairs(), *_of_precision(), *_public(), *_variables()]


def _in_pairs() -> Iterator[Setting]:
    """Yield what has a function that reads it and one that sets it, whose names say so."""
    for getter in dir(torch._C):
        found = _GETTER.fullmatch(getter)
        if found is None or any(word in getter for word in _OTHERWISE):
            continue
        setters = f"_set_{found[1]}", f"set_{found[1]}", f"_set_sdp_use_{found[1].removesuffix('_sdp_enabled')}"
        setter = next((one for one in setters if hasattr(torch._C, one)), None)
        if setter is not None and _is_read(get := getattr(torch._C, getter)):
            yield Setting(found[1], get, partial(_set, getattr(torch._C, setter)))


def _is_read(get: Callable[[], Any]) -> bool:
    try:
        get()
    except (TypeError, RuntimeError):  # it takes arguments, or this build does not have it
        return False
    return True


def _set(setter: Callable[..., object], value: Any) -> None:
    setter(*value) if isinstance(value, tuple) else setter(value)


def _of_precision() -> Iterator[Setting]:
    """Yield the precision of each backend and operation, those first from which others take theirs."""
    get, put = (ask(torch._C, f"_{word}{_PRECISION}{word}ter", None) for word in ("get", "set"))
    for backend, operation in product(("generic", "cuda", "mkldnn"), ("all", "conv", "rnn", "matmul")):
        if get is not None and put is not None and _is_read(read := partial(get, backend, operation)):
            yield Setting(f"fp32_precision of {backend} {operation}", read, partial(put, backend, operation))


def _public() -> Iterator[Setting]:
    """Yield what is set by several values at once, or by an object."""
    yield Setting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    yield Setting(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    invariants = torch.sparse.check_sparse_tensor_invariants
    yield Setting(
        "check_sparse_tensor_invariants",
        invariants.is_enabled,
        lambda is_on: invariants.enable() if is_on else invariants.disable(),
    )


def _variables() -> Iterator[Setting]:
    """Yield variables of modules: plain values, and tables such as that of the hooks of all modules."""
    for module in (sys.modules[name] for name in _MODULES if name in sys.modules):
        for name, value in list(vars(getattr(module, "m", module)).items()):  # torch.backends wraps its modules
            if name.startswith("__"):
                continue
            if isinstance(value, dict):
                yield Setting(f"{module.__name__}.{name}", partial(_table, module, name), partial(_set_table, module, name))
            elif type(value) in (bool, int, float, str, torch.device, type(None)):
                yield Setting(f"{module.__name__}.{name}", partial(getattr, module, name), partial(setattr, module, name))


def _table(module: Any, name: str) -> tuple[dict[Any, Any], tuple[Any, ...]]:
    """Return a table and what it holds: torch changes some in place, and puts others in their places."""
    table = getattr(module, name)
    return table, tuple(table.items())


def _set_table(module: Any, name: str, value: tuple[dict[Any, Any], tuple[Any, ...]]) -> None:
    table, items = value
    table.clear()
    table.update(items)
    setattr(module, name, table)
