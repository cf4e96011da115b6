"""Bytes that a microbatch keeps on a device from its forward to its backward (Korthikanti et al., arXiv 2205.05198).

Letters as in `transformer`; b sequences per microbatch, t tensor parallel, w bytes per value (2 in 16 bits), a mask has 1 byte.
What a layer keeps, in s b h:

    cut over t by tensor parallelism                cut over t by sequence parallelism only
    queries w, keys g w, values g w                 the inputs of two norms 2w
    the output projection's input w                 the input of queries, keys and values w
    the MLP's activations 2w f/h (gated: 4w f/h)    the MLP's input w
    attention maps (2w + 1) a s / h                 two dropout masks 2

GPT (g = 1, f = 4h, w = 2): 24 + 5as/h and 10, so s b h (10 + 24/t + 5as/(ht)), and s b h (34 + 5as/h) / t with sequence
parallelism: the paper's equations 2 and 4. Derived here, and not in the paper: grouped queries keep g of the keys and values; a
gated MLP keeps gate, its SiLU, the other half and their product, 4 f (a fused SwiGLU keeps 3); without dropout there are no
masks, and of the maps only the softmax's output, w a s / h. Left out, as there: statistics of norms and of fused attention,
1 / h of the rest or less.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.estimate.execution import Execution
from bpipe.estimate.transformer import Transformer

__all__ = ["embedding_bytes", "head_bytes", "layer_bytes", "message_bytes", "working_bytes"]

LOGIT_BYTES = 4  # the loss is computed in fp32


def layer_bytes(model: Transformer, execution: Execution, microbatch_size: int) -> int:
    """Compute the bytes that a layer keeps of a microbatch, on each device.

    With full recomputation that is its input alone, w s b h: the paper's 2 s b h. The paper keeps it whole on each device;
    with sequence parallelism the input is cut along the sequence anyway, so then it is divided by t here.

    Example:
        >>> from bpipe.estimate.models import model_named
        >>> gpt = model_named("gpt3-96b")  # s = 2048, h = 9984
        >>> layer_bytes(gpt, Execution(tensor_parallel=4), 1) == 34 * 2048 * 9984 // 4
        True
    """
    w, s, b, h = execution.value_bytes, model.sequence, microbatch_size, model.hidden
    if execution.recomputation == "full":
        return _divided(execution, 0, w * s * b * h)
    mlp = (4 if model.is_gated else 2) * model.ffn_hidden
    by_tensor = w * s * b * (2 * h + 2 * model.kv_hidden + mlp)
    if execution.keeps_maps:
        by_tensor += core_bytes(model, execution, microbatch_size)
    masks = 2 if model.has_dropout else 0
    return _divided(execution, by_tensor, (4 * w + masks) * s * b * h)


def core_bytes(model: Transformer, execution: Execution, microbatch_size: int) -> int:
    """Count the bytes of materialised attention maps on all t devices: softmax's output, dropout's mask and output (5 a s^2 b)."""
    w = execution.value_bytes
    return (2 * w + 1 if model.has_dropout else w) * model.num_heads * model.sequence**2 * microbatch_size


def working_bytes(model: Transformer, execution: Execution, microbatch_size: int) -> int:
    """Compute the bytes that a layer's recomputation makes while its backward runs, on each device, and that are freed after it."""
    if execution.recomputation == "full":
        whole = replace(execution, recomputation="none")
        return layer_bytes(model, whole, microbatch_size) - layer_bytes(model, execution, microbatch_size)
    if execution.recomputation == "selective" and execution.attention == "materialised":
        return -(-core_bytes(model, execution, microbatch_size) // execution.tensor_parallel)
    return 0


def embedding_bytes(model: Transformer, execution: Execution, microbatch_size: int) -> int:
    """Compute the bytes that the embedding keeps: its dropout's mask, s b h / t (section 4.3). Tokens are the user's batch."""
    mask = model.sequence * microbatch_size * model.hidden if model.has_dropout else 0
    return _divided(execution, 0, mask)


def head_bytes(model: Transformer, execution: Execution, microbatch_size: int) -> int:
    """Compute the bytes that the head keeps: inputs of its norm and matrix and fp32 logits, 4 s b h / t (1 + v/h) (section 4.3)."""
    tokens = model.sequence * microbatch_size
    return _divided(execution, LOGIT_BYTES * tokens * model.vocabulary, 2 * execution.value_bytes * tokens * model.hidden)


def message_bytes(model: Transformer, execution: Execution, microbatch_size: int) -> int:
    """Compute the bytes that each device sends to the next stage, and gets back as a gradient: w s b h, cut like activations."""
    return _divided(execution, 0, execution.value_bytes * model.sequence * microbatch_size * model.hidden)


def _divided(execution: Execution, by_tensor: int, by_sequence: int) -> int:
    t = execution.tensor_parallel
    if execution.sequence_parallel:
        return -(-(by_tensor + by_sequence) // t)
    return -(-by_tensor // t) + by_sequence
