"""What a stage with a loss of its own returns, where gradients stay in their stage: an output, and a prediction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bpipe.errors import StageError
from bpipe.model.microbatch import detached, tensors_in
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []


def taken_apart(result: Any, place: str) -> tuple[Any, Any]:
    """Return the output for the next stage, without its graph, and the prediction, at which the stage's backward begins.

    Raises:
        StageError: the module returned no pair of both.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        seen = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__qualname__
        raise StageError(
            f"{place}: the module returned {seen}, but in local learning each stage but the last returns (output, prediction): "
            "give the stage bpipe.LocalBlock(module, head), whose head makes the prediction for the stage's own loss"
        )
    output, prediction = result
    return detached(output), prediction


@contextmanager
def left_as_it_is(output: Any, place: str) -> Iterator[None]:
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
