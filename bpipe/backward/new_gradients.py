"""Give each first `.grad` its own memory: autograd may have aliased a tensor that is still being sent.

Autograd stores a first gradient in `.grad` without a copy, even a view of memory that is also used elsewhere: by the gradient that
is being sent to the previous stage (`x + bias.unsqueeze(0)`), by one that waits for `backward_weight`, or by another parameter's
`.grad`. A later addition to `.grad` would change that tensor, too. So if two parameters' gradients overlap, one is copied. If the
pipeline itself uses the memory, it copies its own tensor, and not `.grad`: hooks may have moved that to where an optimizer or a
reducer looks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

import torch

from bpipe.memory.saved.storages import owners, shared_among, storages_of
from bpipe.torch_private.owners_and_versions import address_of, base_of

__all__: list[str] = []


def apart(parameters: Sequence[torch.Tensor]) -> None:
    """Copy those gradients of some parameters that overlap in memory with the gradients of others.

    Views of one buffer that do not overlap are left where they are.
    """
    extents = [(*extent, i) for i in shared_among([one.grad for one in parameters]) for extent in _extents(parameters[i].grad)]
    last_key = last_end = 0
    for key, start, end, i in sorted(extents):
        gradient = parameters[i].grad
        if key == last_key and start < last_end and gradient is not None:
            parameters[i].grad = gradient.clone()
        last_key, last_end = key, max(end, last_end) if key == last_key else end


def _extents(tensor: torch.Tensor | None) -> list[tuple[int, int, int]]:
    """Return a tensor's storages and the start and end of its bytes in each; none if it has gaps, as autograd's never have."""
    if tensor is None:
        return []
    if type(tensor) is not torch.Tensor:
        return [(address_of(storage), 0, storage.nbytes()) for storage in storages_of(tensor)]
    if not tensor.numel() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return []
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return [(address_of(tensor.untyped_storage()), start * size, (start + tensor.numel()) * size)]


def owned(
    gradients: Sequence[torch.Tensor | None], others: Set[int] = frozenset(), beside: Iterable[torch.Tensor | None] = ()
) -> list[torch.Tensor | None]:
    """Return gradients that the pipeline goes on using, in memory that only the pipeline owns.

    Args:
        others: the keys of storages that have another owner.
        beside: more tensors that the pipeline owns.

    Returns:
        The gradients, or a copy if another tensor owns the memory, such as a leaf's `.grad`.
    """
    together = [*gradients, *beside]
    places = shared_among(together, others)
    if not places or places[0] >= len(gradients):
        return list(gradients)
    ours = {id(one): one for place in places if (one := together[place]) is not None}
    ours |= {id(base): base for one in tuple(ours.values()) if (base := base_of(one)) is not None}
    counts = Counter([address_of(storage) for one in ours.values() for storage in storages_of(one)])
    for key in others:
        counts[key] = 0

    def is_shared(tensor: torch.Tensor) -> bool:
        return any(owners(storage) > counts[address_of(storage)] for storage in storages_of(tensor))

    return [one.clone() if one is not None and is_shared(one) else one for one in gradients]
