"""A block with a head of its own: what a stage of local learning runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bpipe.errors import StageError
from bpipe.model.cut import mark_around
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import mapped
from bpipe.torch_private.owners_and_versions import version_of

__all__ = ["LocalBlock"]


class LocalBlock(nn.Module):
    """A block of a model, and the auxiliary head that makes a prediction of its output, for the stage's own loss.

    It is an ordinary module, for all stages of `LocalLearning` but the last, whose own output is the prediction. A module of yours
    that returns `(output, prediction)` does as well.

    Args:
        block: takes and returns what the stage would without local learning.
        head: takes what the next stage takes: the block's output, or several arguments if that is a tuple or a list. It must not
            change it in place, because the next stage gets it. (It gets a copy where nobody could tell: in a compiled block, and
            in inference mode.)
        name: the parameters' names are `blocks.<name>.` and those in the block, and `heads.<name>.` and those in the head, so that
            stages with different names can be saved in one checkpoint; the stage's index, for example.

    Raises:
        StageError: from a forward, whose head has changed the block's output in place.

    Example:
        >>> import torch
        >>> block = LocalBlock(nn.Linear(4, 6), head=nn.Linear(6, 2))
        >>> output, prediction = block(torch.zeros(8, 4))
        >>> output.shape, prediction.shape
        (torch.Size([8, 6]), torch.Size([8, 2]))
    """

    def __init__(self, block: nn.Module, head: nn.Module, *, name: int | str = 0) -> None:
        super().__init__()
        self.blocks, self.heads = nn.ModuleDict({str(name): block}), nn.ModuleDict({str(name): head})
        mark_around(self, block)  # so that a block that was cut for another stage is refused, as it is without a head

    @property
    def block(self) -> nn.Module:
        """The block."""
        (block,) = self.blocks.values()
        return block

    @property
    def head(self) -> nn.Module:
        """The head."""
        (head,) = self.heads.values()
        return head

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the block's output, and the head's prediction."""
        head, output = self.head, self.block(*args, **kwargs)
        before = _versions(output)
        given = mapped(torch.clone, output) if before is None else output
        prediction = head(*given) if isinstance(given, (tuple, list)) else head(given)
        if before is not None and _versions(output) != before:
            raise StageError(
                "the head of a LocalBlock changed the block's output in place, which the next stage gets: use a head that does "
                "not, such as nn.ReLU(inplace=False), or one that begins with a clone"
            )
        return output, prediction


def _versions(output: Any) -> list[int] | None:
    """Return how often each tensor was changed in place; None where that is not counted."""
    if torch.compiler.is_compiling() or any(tensor.is_inference() for tensor in tensors_in(output)):
        return None
    return [version_of(tensor) for tensor in tensors_in(output)]
