"""For stages that take a sequence in slices: causal attention to earlier slices, joined tensors, and what is cut how.

A stage that takes slices is called as `module(*args, past=past, **kwargs)`. `past` is a tuple of what it has returned as its state
for the earlier slices of the same sequence, the first one first, and it returns its output and its own state:

    class Block(nn.Module):
        def forward(self, x, past=()):
            q, k, v = self.heads(x)                                     # [batch, heads, positions of this slice, width of a head]
            x = x + self.out(causal_attention(q, k, v, past))
            return x + self.mlp(x), (k, v)                              # what later slices of the sequence need
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bpipe.memory.saved.joined import join
from bpipe.slices.attention import causal_attention
from bpipe.slices.positions import UpTo

if TYPE_CHECKING:
    from bpipe.partition.sliced import sliced_transformer

__all__ = ["UpTo", "causal_attention", "join", "sliced_transformer"]


def __getattr__(name: str) -> Any:
    if name != "sliced_transformer":
        raise AttributeError(f"module 'bpipe.slices' has no attribute {name!r}")
    from bpipe.partition import sliced  # loaded on first use: it proves models, which no step needs

    return sliced.sliced_transformer
