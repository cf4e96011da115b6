"""Find in a slice's graph what makes its gradients wrong: reentrant checkpoints around states, and norms over positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from bpipe.backward.autograd import edges_of
from bpipe.errors import StageError
from bpipe.memory.saved.nodes import nodes_behind
from bpipe.model.microbatch import tensors_in
from bpipe.torch_private.engine_and_graph import takes_statistics

__all__: list[str] = []

REENTRANT = "CheckpointFunctionBackward"
NORM = (
    "{} ran {} in its forward (BatchNorm or InstanceNorm?), whose statistics are those of a slice and not of the whole "
    "sequence: normalise by features, as LayerNorm does, or train without slices"
)


def check_graph(outputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor], name: str) -> None:
    """Raise a StageError if a slice's graph has a node whose gradients are not those of the whole sequence.

    Args:
        outputs: what the slice's stage has returned.
        state: what it leaves for later slices.
        name: of the slice.
    """
    nodes = nodes_behind(edges_of([*outputs, *state]))
    _check_checkpoints([node for node in nodes if type(node).__name__ == REENTRANT], state, name)
    if norm := next(filter(takes_statistics, nodes), None):
        raise StageError(NORM.format(name, type(norm).__name__.partition("Backward")[0]))


def _check_checkpoints(found: Sequence[Node], state: Sequence[torch.Tensor], name: str) -> None:
    """Raise a StageError if states pass a reentrant checkpoint inside of tuples, where it gives them no gradients."""
    given = [tensor for node in found for tensor in tensors_in(getattr(node, "inputs", ()))]
    are_lost = bool(found) and any(tensor.is_floating_point() and not tensor.requires_grad for tensor in state)
    if are_lost or any(tensor.requires_grad for tensor in given):
        raise StageError(
            f"{name} has a region under torch.utils.checkpoint(use_reentrant=True), and states get no gradients through it: "
            "use use_reentrant=False, or leave the state out of the region"
        )
