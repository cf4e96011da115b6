"""The specs of how a batch is cut and merged: pytrees of torch's `TensorChunkSpec`, of None and of reducers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpipe.errors import ConfigurationError
from bpipe.model.pytree import Inside, flattened, inside
from bpipe.torch_private.distributed import is_replicate

__all__: list[str] = []

DEFAULT = object()  # no spec was given: dimension 0 of every value that holds samples


def is_repeating(spec: Any) -> bool:
    """Return whether a spec that was given says that every microbatch gets the value whole: None, or torch's `_Replicate`."""
    return not hasattr(spec, "split_dim") and inside(spec) is None


def specs_of(found: Inside, value: Any, spec: Any, path: str) -> list[Any]:
    """Return the specs of the parts of a value: by key, in any order, or by position; those beside its own have none."""
    if spec is DEFAULT:
        return [DEFAULT] * len(found.parts)
    keys = list(found.keys[: found.num_own])
    alike = inside(spec) if type(spec) is type(value) else None
    if isinstance(spec, Mapping) and len(spec) == len(keys) and all(key in spec for key in keys):
        own = [spec[key] for key in keys]
    elif isinstance(spec, (tuple, list)) and len(spec) == len(keys) and not isinstance(value, Mapping):
        own = list(spec)
    elif alike is not None and list(alike.keys[: alike.num_own]) == keys:
        own = list(alike.parts[: alike.num_own])
    else:
        raise misfit(path, value, spec)
    return own + [DEFAULT] * (len(found.parts) - len(own))


def misfit(path: str, value: Any, spec: Any) -> ConfigurationError:
    """Return the error for a spec that is not nested like its value."""
    return ConfigurationError(f"{path}: {outline(value)} has the spec {outline(spec)}: give one for each value, nested alike")


def outline(value: Any) -> str:
    """Return a value's type and size, in a few words."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: ...' for key in value)}}}"
    return f"{type(value).__qualname__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__qualname__


def check_specs(spec: Any, name: str, *, may_reduce: bool = False, others: tuple[type, ...] = ()) -> None:
    """Check the specs that a schedule is given, before there are any values."""
    for leaf in flattened(spec):
        is_cut = isinstance(getattr(leaf, "split_dim", None), int) or isinstance(leaf, others)
        is_reducer = may_reduce and hasattr(leaf, "reduce_fn") and hasattr(leaf, "init_value")
        if not (leaf is None or is_cut or is_reducer or is_replicate(leaf)):
            raise ConfigurationError(
                f"{name} contains a {type(leaf).__qualname__}, {leaf!r}: give TensorChunkSpec(dim) for a value that is cut along a "
                "dimension (TensorChunkSpec.from_tuple and from_dict make them from numbers), or None"
            )
