"""Floating point operations of a microbatch (Korthikanti et al., arXiv 2205.05198, appendix A), on all t devices together.

A matrix of n parameters takes 2n a token. Attention's two products take 4 s^2 h a sequence: all of the [s, s] map, as the paper
counts it, though a causal kernel may skip half. A backward takes twice the forward. For GPT: F 24 b s h^2 (1 + s/6h), and F and
B together 72 b s h^2 (1 + s/6h); grouped queries and gated MLPs follow from their matrices.
"""

from __future__ import annotations

from bpipe.estimate.execution import Execution
from bpipe.estimate.transformer import Transformer

__all__ = ["core_flops", "head_flops", "layer_flops", "recomputed_flops"]


def layer_flops(model: Transformer, microbatch_size: int) -> int:
    """Count the operations of a layer's forward."""
    return 2 * microbatch_size * model.sequence * model.layer_matrices + core_flops(model, microbatch_size)


def core_flops(model: Transformer, microbatch_size: int) -> int:
    """Count the operations of attention's core in a layer's forward: queries by keys, and maps by values."""
    return 4 * microbatch_size * model.sequence**2 * model.hidden


def head_flops(model: Transformer, microbatch_size: int) -> int:
    """Count the operations of the head's forward: 2 b s h v."""
    return 2 * microbatch_size * model.sequence * model.hidden * model.vocabulary


def recomputed_flops(model: Transformer, execution: Execution, microbatch_size: int) -> int:
    """Count the operations that a layer's backward repeats. What fused attention recomputes is left to its kernel's efficiency."""
    if execution.recomputation == "full":
        return layer_flops(model, microbatch_size)
    if execution.recomputation == "selective" and execution.attention == "materialised":
        return core_flops(model, microbatch_size)
    return 0
