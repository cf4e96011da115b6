"""Hooks and compilation of modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn

from bpipe.torch_private.names import ask, has

__all__: list[str] = []

Hooks = tuple[dict[int, Any], ...]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_ALL = frozenset(vars(nn.Module()))  # the attributes that every module has
# Lists of torch's modules, recurrent ones and DDP, that say again what attributes and buffers say.
REPEATING = frozenset({"_flat_weights", "modules_buffers", "named_module_buffers", "_module_parameters"})
FORWARD = 2  # so many of them are hooks of the forward
COMPILED = "_orig_mod"  # as which torch.compile's modules have the module inside
WRAPPERS = (COMPILED, "_checkpoint_wrapped_module")  # likewise, with those of checkpoint_wrapper
SEES_HOOKS = all(has(nn.Module(), name) for name in _HOOKS)
# All hooks of a module, by their ids: before and after its forward, before and after its backward.
hooks_of: Callable[[nn.Module], Hooks] = (
    attrgetter(*_HOOKS) if SEES_HOOKS else lambda module: tuple(ask(module, name) for name in _HOOKS)
)
# What `module.compile()` has made of a module, if anything.
compiled_call: Callable[[nn.Module], object] = (
    attrgetter("_compiled_call_impl") if has(nn.Module(), "_compiled_call_impl") else lambda module: None
)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, by `torch.compile(module)` or `module.compile()`."""
    return compiled_call(module) is not None or ask(module, COMPILED, None) is not None


def parametrize_is_cached() -> bool:
    """Return whether the weights of parametrized modules are computed once and kept (`torch.nn.utils.parametrize.cached`)."""
    loaded = sys.modules.get("torch.nn.utils.parametrize")
    return loaded is not None and bool(ask(loaded, "_cache_enabled", 0))


def script_of(module: nn.Module) -> Any:
    """Return the module of torch.jit that has the attributes of one, because a traced one wraps it; None if there is none yet."""
    inside = vars(module)
    return module if "_c" in inside else inside.get("_actual_script_module")


def script_state(script: Any) -> Any:
    """Return the object in C++ that holds the attributes of a module of torch.jit."""
    return ask(script, "_c")


def script_attributes(script: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return the attributes of a module of torch.jit by name: the type of each, and whether it is a parameter."""
    return ask(script, "_concrete_type").get_attributes()
