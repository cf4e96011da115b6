"""How stages with losses of their own are called, where gradients stay in their stage: they return (output, prediction)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from bpipe.engine.conventions import Call, Convention
from bpipe.errors import StageError
from bpipe.model.microbatch import detached, tensors_in
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []


class OwnLosses(Convention):
    """The convention of local learning: the loss is the prediction's, and the stage behind gets the output without its graph."""

    has_losses = True

    def taken(self, call: Call, result: Any) -> Any:
        if call.stage.is_last:
            return result
        if not isinstance(result, tuple) or len(result) != 2:
            seen = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__qualname__
            raise StageError(
                f"{call.state}: the module returned {seen}, but in local learning each stage but the last returns "
                "(output, prediction): give the stage bpipe.LocalBlock(module, head), whose head makes the prediction for the "
                "stage's own loss"
            )
        output, prediction = result
        call.prediction = (prediction,)
        return detached(output)

    def loss(self, call: Call, compute: Callable[[], Any]) -> Any:
        with nullcontext() if call.stage.is_last else _left_as_it_is(call.output, str(call.state)):
            return compute()


@contextmanager
def _left_as_it_is(output: Any, place: str) -> Iterator[None]:
    """Raise a StageError if a stage's loss, which is made inside, changes the output for the next stage in place.

    A prediction may share its memory.
    """
    before = [(tensor, version_of(tensor)) for tensor in tensors_in(output) if not tensor.is_inference()]
    yield
    if any(version_of(tensor) != version for tensor, version in before):
        raise StageError(
            f"{place}: loss_fn changed the prediction in place, which shares its memory with the output that the next stage gets: "
            "use a loss_fn that does not, or a head that returns a clone"
        )
