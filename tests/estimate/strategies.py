"""Random transformers and ways to run them."""

from __future__ import annotations

from hypothesis import strategies as st

from bpipe.estimate import Execution, Transformer


@st.composite
def gpts(draw: st.DrawFn) -> Transformer:
    """GPT's shape: f = 4h, all heads keep keys and values, biases, dropout."""
    heads = 16 * draw(st.integers(1, 2))
    return Transformer(
        num_layers=draw(st.integers(1, 9)),
        hidden=heads * 8 * draw(st.integers(1, 8)),
        num_heads=heads,
        sequence=16 * draw(st.integers(1, 64)),
        vocabulary=draw(st.integers(1, 5000)),
    )


@st.composite
def transformers(draw: st.DrawFn) -> Transformer:
    """Any shape."""
    gpt = draw(gpts())
    gated = draw(st.booleans())
    return Transformer(
        num_layers=gpt.num_layers,
        hidden=gpt.hidden,
        num_heads=gpt.num_heads,
        sequence=gpt.sequence,
        vocabulary=gpt.vocabulary,
        num_kv_heads=draw(st.sampled_from([None, gpt.num_heads // 2, gpt.num_heads // 4])),
        ffn=draw(st.integers(1, 999)) if gated else None,
        is_gated=gated,
        is_tied=draw(st.booleans()),
        has_positions=draw(st.booleans()),
        has_biases=draw(st.booleans()),
        has_dropout=draw(st.booleans()),
    )


executions = st.builds(
    Execution,
    attention=st.sampled_from(["materialised", "flash"]),
    recomputation=st.sampled_from(["none", "selective", "full"]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    precision=st.sampled_from(["bf16", "fp32"]),
)
