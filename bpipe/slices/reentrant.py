"""Find reentrant checkpoints that lose the gradients of states: they follow tensors, and not what is inside of tuples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.backward.autograd import edges_of
from bpipe.errors import StageError
from bpipe.memory.saved.nodes import nodes_behind
from bpipe.model.microbatch import tensors_in

__all__: list[str] = []

REENTRANT = "CheckpointFunctionBackward"


def check_checkpoints(outputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor], name: str) -> None:
    """Raise a StageError if states pass a reentrant checkpoint inside of tuples: gradients would be wrong without a word.

    Args:
        outputs: what the slice's stage has returned.
        state: what it leaves for later slices.
        name: of the slice.
    """
    found = [node for node in nodes_behind(edges_of([*outputs, *state])) if type(node).__name__ == REENTRANT]
    given = [tensor for node in found for tensor in tensors_in(getattr(node, "inputs", ()))]
    are_lost = bool(found) and any(tensor.is_floating_point() and not tensor.requires_grad for tensor in state)
    if are_lost or any(tensor.requires_grad for tensor in given):
        raise StageError(
            f"{name} has a region under torch.utils.checkpoint(use_reentrant=True), and states get no gradients through it: "
            "use use_reentrant=False, or leave the state out of the region"
        )
