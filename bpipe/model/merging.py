"""Merge the outputs of the microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bpipe.comm.wire.message import PLAIN
from bpipe.errors import ConfigurationError, StageError
from bpipe.model.chunks import check_joinable, join
from bpipe.model.pytree import flattened, inside, refilled
from bpipe.model.specs import DEFAULT, misfit, outline, specs_of

__all__: list[str] = []

ADVICE = "Make them alike, give an output_merge_spec, or pass return_outputs=False and use them in loss_fn"
Join = Callable[[Sequence[Any], Any], Any]  # joins values at the same place, given their spec


def join_values(parts: Sequence[Any], spec: Any) -> Any:
    """Join the values at one place in the outputs, as `merge` does by default."""
    if hasattr(spec, "reduce_fn"):
        value = spec.init_value
        for part in parts:
            value = spec.reduce_fn(value, part)
        return value
    if type(parts[0]) in PLAIN:
        return parts[0]
    dim = getattr(spec, "split_dim", 0)
    check_joinable(parts[0], dim)
    return join(parts, dim)


def merge(outputs: Sequence[Any], spec: Any = None, *, join_leaves: Join = join_values, advice: str = ADVICE) -> Any:
    """Merge the outputs of the microbatches: concatenate tensors along the dimension that the spec names (0 by default).

    Tensors without dimensions are stacked. A spec with `reduce_fn` and `init_value` (torch's reducers) folds instead;
    plain values (None, bool, int, float, str) are those of the first microbatch. If a tuple, list or dict of specs is nested in
    another way than the outputs, and has as many entries as they have values, the result is nested like the specs, as in torch.

    Args:
        outputs: of the microbatches.
        spec: of what is merged how.
        join_leaves: joins values at the same place, given their spec; default: as described.
        advice: what to do if they do not fit together.

    Raises:
        ConfigurationError: the spec does not fit.
        StageError: the outputs do not fit together.
    """
    try:
        try:
            return _merged(outputs, spec, "output", join_leaves)
        except ConfigurationError:
            nested = [_nested_like(spec, output) for output in outputs]
            if any(one is None for one in nested):
                raise
            return _merged(nested, spec, "output", join_leaves)
    except ConfigurationError:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise StageError(
            f"the outputs of the microbatches do not fit together: {error}. {advice}"
        ) from error


def merge_or_list(outputs: Sequence[Any], spec: Any) -> Any:
    """Merge the outputs of the microbatches, or return their list if they do not fit together.

    The last stage learns how long an output is when it runs, and by then has run backwards of earlier microbatches. So outputs of
    unequal lengths are no reason to lose the step.
    """
    try:
        return merge(outputs, spec)
    except StageError:
        return list(outputs)


def check_merge(outputs: Sequence[Any], spec: Any) -> None:
    """Check that `merge` can merge outputs like these, which may be that of a single microbatch, and need no content."""
    merge(outputs, spec, join_leaves=_check_join)


def _nested_like(spec: Any, output: Any) -> Any:
    """Return an output's values nested as a tuple, list or dict of specs is, as torch does; None if it has more or fewer values."""
    if not isinstance(spec, (tuple, list, dict)):
        return None
    values = flattened(output)
    fits = len(values) == len(flattened(spec)) and all(inside(value) is None for value in values)
    return refilled(spec, iter(values)) if fits else None


def _merged(column: Sequence[Any], spec: Any, path: str, join_leaves: Join) -> Any:
    first = column[0]
    found = None if hasattr(spec, "reduce_fn") else inside(first)
    where = "the output" if path == "output" else path
    if found is None:
        if isinstance(spec, (tuple, list, dict)):
            raise misfit(where, first, spec)
        try:
            return join_leaves(column, spec)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise TypeError(str(error) if path == "output" else f"{path}: {error}") from error
    specs = specs_of(found, first, DEFAULT if spec is None else spec, where)
    others = [inside(value) for value in column]
    for value, other in zip(column, others):
        if type(value) is not type(first) or other is None or list(other.keys) != list(found.keys):
            raise TypeError(f"one is {outline(first)}, another {outline(value)}")
    columns = zip(*(other.parts for other in others if other is not None))
    return found.make([_merged(part, specs[i], found.path(i, path), join_leaves) for i, part in enumerate(columns)])


def _check_join(parts: Sequence[Any], spec: Any) -> Any:
    if hasattr(spec, "reduce_fn") or type(parts[0]) in PLAIN:
        return parts[0]
    dim = getattr(spec, "split_dim", 0)
    check_joinable(parts[0], dim)
    if len(parts) > 1 and len({_shape_beside(part, dim) for part in parts}) > 1:
        raise TypeError(f"those of the shapes {[list(part.shape) for part in parts]} cannot be concatenated along dimension {dim}")
    return parts[0]


def _shape_beside(part: Any, dim: int) -> tuple[int, ...]:
    """Return the shape of a tensor or an array without the dimension along which they are concatenated."""
    return tuple(size for i, size in enumerate(part.shape) if i != dim % part.ndim)
