"""The values that a dry run knows: carried along beside fake tensors, so that control flow takes the branches of a real run.

A mask that is all ones, positions that count up, the number of tokens of each sequence: integers, masks and sizes decide them, and
no activation does. What is saved depends on them: a model leaves out a mask that masks nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch

from bpipe.errors import BPipeError
from bpipe.torch_private.fakes import EMBEDDING_BAG, GROUPED_PRODUCT, FakeTensor, is_mutable, without_cache, without_modes
from bpipe.torch_private.modes import DispatchMode

__all__: list[str] = []

aten = torch.ops.aten
MOST_KNOWN = 2**20  # elements of a tensor whose values are carried along
BY_VALUE = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
ROUTERS = {aten.topk.default: True, aten.argmax.default: False, aten.max.dim: False}  # whether the dimension comes third
UNFILLED = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default})
OVER_STORAGES = frozenset(getattr(aten.set_, overload) for overload in aten.set_.overloads())
# The fake kernels give statistics the type of the input, the real ones that of the weight, which stands at this place.
NORMS = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1, aten.native_batch_norm.default: 1}
# The kernels of losses that write one for each element first, and the mean or the sum into the same storage; at which place they
# take the reduction.
MEANS = {loss.default: 2 for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.soft_margin_loss)}
MEANS |= {aten.binary_cross_entropy.default: 3}
NO_REDUCTION = 0
# Operators whose fake kernels do not know all that is saved.
MEASURED = frozenset({aten.mkldnn_rnn_layer.default, getattr(EMBEDDING_BAG, "default", None)})
NOT_THE_USERS = ("/torch/", "/bpipe/prediction/", "<")


class UnpredictableError(BPipeError):
    """What a stage saves depends on values that only a real forward has."""


class KnownValues(DispatchMode):
    """Above a mode of fake tensors: carries along, on the CPU, the values that sizes, integers and masks alone decide.

    Where control flow asks for a value that activations or random numbers decide, some are assumed: a router sends as many tokens
    to each expert, nothing is infinite, no layer is dropped. Anything else raises an `UnpredictableError` with its line.

    Args:
        fake: returns the fake tensor that stands for a real one, always the same: nothing is written to a real one.
    """

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._refused = fake, ""
        self.made: list[ref[torch.Tensor]] = []

    def check(self) -> None:
        """Raise an UnpredictableError again that the code of a stage has caught."""
        if self._refused:
            raise UnpredictableError(self._refused)

    def _refuse(self, why: str) -> UnpredictableError:
        self._refused = f"{why}, at {_line()}"
        return UnpredictableError(self._refused)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        args, kwargs = _mapped(self._stand_in, args), _mapped(self._stand_in, kwargs or {})
        if "c10d" in func.namespace:
            raise self._refuse(f"{func} communicates with other processes")
        if func in MEASURED:
            return _measured(func, args, kwargs)
        if func is aten.index.Tensor:
            args = args[0], [part for one in args[1] for part in self._as_indices(one)]
        is_known = torch.Tag.nondeterministic_seeded not in func.tags and func not in OVER_STORAGES
        is_known = is_known and all(values_of(one) is not None for one in _tensors(args, kwargs))
        if func is not aten.index.Tensor and not BY_VALUE.isdisjoint(func.tags):
            if not is_known:
                raise self._refuse(f"{func} of activations or random numbers")
            return _mapped(_fake_with, _values(func, args, kwargs))
        with without_cache(args[0]) if func in OVER_STORAGES or func in MEANS else nullcontext():
            made = _made(func, args, kwargs)
        found = [*_tensors(made)]
        if is_known and all(func.is_view or one.numel() <= MOST_KNOWN for one in found):
            for one, value in zip(found, _tensors(_values(func, args, kwargs))):
                one.known = value
        elif is_mutable(func):
            for one in found:
                forget(one)
        if found and not is_known:
            _assume(func, args, found[-1])
        self.made += map(ref, found)
        return made

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor for a real one."""
        if not isinstance(tensor, FakeTensor) and tensor.requires_grad and tensor.is_leaf and tensor.numel():
            raise self._refuse(f"a tensor of shape {list(tensor.shape)} that needs a gradient is in no module of the stage")
        return self._fake(tensor)

    def _as_indices(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the positions that a mask selects, in place of the mask."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        if values_of(index) is None:
            raise self._refuse("indexing by a mask that activations decide")
        return [_fake_with(one) for one in _values(aten.nonzero_numpy.default, (index,), {})]


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a fake tensor; None if they are not known."""
    value: torch.Tensor | None = getattr(tensor, "known", None)
    is_forgotten = value is not None and value.numel() > 0 and not value.untyped_storage().nbytes()
    return None if is_forgotten else value


def know(fake: Any, real: torch.Tensor, most_numbers: int) -> None:
    """Note the values of a real tensor in the fake one that stands for it, if they can decide what runs.

    Args:
        most_numbers: the most elements of one of floating-point numbers.
    """
    is_of_numbers = real.is_floating_point() or real.is_complex()
    if real.numel() <= (most_numbers if is_of_numbers else MOST_KNOWN) and not real.is_meta:
        with without_modes():
            fake.known = real.detach().cpu().clone()


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on fake tensors, and make what the real kernel makes where the fake one differs from it."""
    if GROUPED_PRODUCT is not None and func is GROUPED_PRODUCT.default:
        return _grouped(*args[:3])
    made = func(*args, **kwargs)
    if func in NORMS and (weight := args[NORMS[func]]) is not None:
        return made[0], *(one.to(weight.dtype) for one in made[1:])
    place = MEANS.get(func)
    if place is not None and (len(args) <= place or args[place] != NO_REDUCTION):
        others = [*args[:place], *[None] * (place - len(args))]
        each = func(*others, NO_REDUCTION, *args[place + 1 :], **kwargs).untyped_storage()
        return torch.empty(0, dtype=made.dtype, device=made.device).set_(each, 0, (), ())
    return made


def forget(fake: Any) -> None:
    """Forget the values of a tensor, which something unknown was written to, and of its views."""
    if (value := values_of(fake)) is not None:
        value.untyped_storage().resize_(0)
        fake.known = None


def _assume(func: Any, args: Sequence[Any], made: Any) -> None:
    """Assume the values of what a router, a check for infinity or the draw of one number makes."""
    if made.numel() > MOST_KNOWN:
        return
    with without_modes():
        if func in ROUTERS and not made.is_floating_point():
            dimension = (args[2:3] if ROUTERS[func] else args[1:2]) or (-1,)
            made.known = (torch.arange(made.numel()) % args[0].shape[dimension[0]]).view(made.shape)
        elif func in (aten.isinf.default, aten.isnan.default):
            made.known = torch.zeros(made.shape, dtype=torch.bool)
        elif func is aten.rand.default and made.numel() == 1:
            made.known = torch.ones(made.shape)


def _values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the known values; None if the CPU does not have it."""
    on_cpu = {"device": "cpu"} if "device" in kwargs else {}
    with without_modes():
        try:
            values = func(*_mapped(values_of, args), **{**_mapped(values_of, kwargs), **on_cpu})
        except NotImplementedError:
            return None
        return values.zero_() if func in UNFILLED else values


def _measured(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on zeros, to see what it makes."""
    with without_modes():
        made = func(*_mapped(lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).zero_(), args), **kwargs)
    return _mapped(_empty_like, made)


def _empty_like(one: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)


def _fake_with(value: torch.Tensor) -> Any:
    fake: Any = _empty_like(value)
    fake.known = value
    return fake


def _grouped(one: Any, other: Any, offsets: Any = None) -> Any:
    """Return a product of groups: its fake kernel refuses types that the real one takes."""
    groups = [] if one.dim() != other.dim() else [offsets.shape[0] if one.dim() == 2 else one.shape[0]]
    return one.new_empty([*groups, one.shape[-2], other.shape[-1]])


def _tensors(*values: Any) -> Iterator[Any]:
    """Yield the tensors among the arguments or results of an operator."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


def _mapped(change: Any, value: Any) -> Any:
    """Return the arguments or results of an operator with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, one) for key, one in value.items()}
    return type(value)(_mapped(change, one) for one in value) if type(value) in (list, tuple) else value


def _line() -> str:
    """Return the line of the user's code that runs now."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
