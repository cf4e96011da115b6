"""Fake tensors, which have a shape, a type and a device, but no data: what runs with them computes nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from bpipe.torch_private.names import ask

__all__: list[str] = []

try:
    import torch._subclasses.fake_tensor as _fakes
    import torch.utils._python_dispatch as _dispatch
except ImportError:  # pragma: no cover - a release to come may have moved them
    _fakes = _dispatch = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
else:
    FakeTensor = ask(_fakes, "FakeTensor", type("FakeTensor", (), {}))


def is_plain(tensor: object) -> bool:
    """Return whether a tensor is of no subclass, or a fake one that stands for such a tensor."""
    return type(tensor) is torch.Tensor or type(tensor) is FakeTensor


def fake_mode() -> Any:
    """Return a mode whose operations make fake tensors, and take real ones for fakes."""
    ask(_dispatch, "_disable_current_modes")  # which `without_modes` can do without, and a dry run cannot
    return ask(_fakes, "FakeTensorMode")(allow_non_fake_inputs=True)


def forget_results() -> None:
    """Forget the results of operators, which modes keep for all shapes that there ever were."""
    ask(_fakes, "FakeTensorMode").cache_clear()


def without_cache(fake: Any) -> AbstractContextManager[Any]:
    """Let the mode of a fake tensor keep no result of an operator, because it would keep a storage that the operator is given."""
    return ask(_fakes, "disable_fake_tensor_cache")(fake.fake_mode)


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which operations are those of real tensors again, inside of modes."""
    return ask(_dispatch, "_disable_current_modes", nullcontext)()


def is_mutable(operator: Any) -> bool:
    """Return whether an operator of torch.ops writes into some of its arguments."""
    return bool(ask(operator, "_schema").is_mutable)


GROUPED_PRODUCT: Any = ask(torch.ops.aten, "_grouped_mm", None)
EMBEDDING_BAG: Any = ask(torch.ops.aten, "_embedding_bag", None)
