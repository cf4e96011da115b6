"""Make a small configuration of the same kind as a Transformers configuration: the same switches and factors, other sizes.

Sizes are recognised by the names of their fields; Transformers has several names for each idea. Factors, switches, the kinds
of layers, and numbers that are small already keep their values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

__all__: list[str] = []

NUM_HEADS, HEAD_DIM, WORDS, POSITIONS = 4, 16, 128, 64
WIDTH = NUM_HEADS * HEAD_DIM
LAYERS, MOST_LAYERS = 4, 12

KINDS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "layers": "(num|n)_(hidden_)?layers?|(num_)?(en|de)coder_layers|depth",
        "kv": "(.*_)?(kv|key_value|query|multi_query)_?(groups?|heads)(_num)?|num_kv|multi_query_group_num",
        "mamba_heads": "mamba_(n|num)_heads|n_mamba_heads",
        "heads": "(.*_)?((num|n)_(attention_|attn_)?heads?|attention_heads)(_.*)?",
        "head_dim": "(.*_)?(head_?dim|d_kv|d_head|head_size|kv_channels|rotary_dim|head_width)",
        "words": "(.*_)?(vocab_size(_per_layer_input)?|num_embeddings)",
        "positions": "n_positions|max_position(_embeddings)?|max_seq_len|max_(source|target)_positions|n_ctx",
        "width": "(.*_)?(hidden_(size|dim)|d_model|n_embd?|d_embed|(embed|emb|embedding|proj|projection|model|output|mlp)?_?dim"
        "|embedding_size|emb_size|lru_width|bottleneck_size)(_per_layer_input)?",
        "inner": "(.*_)?(intermediate_size|d_ssm|ffn_dim|d_ff|n_inner|(ffn_hidden|mlp_hidden|ffn|feedforward)_size"
        "|(inner|ff|feed_forward)_dim|dim_ff)(_.*)?",
        "experts": "(.*_)?((num|n)(_routed|_local)?_experts)",
        "chosen": "(.*_)?(top_?k|experts_per_tok(en)?|moe_k|num_selected_experts)",
        "groups": "(.*_)?n_groups?|num_expert_groups|topk_group",
        "rank": ".*_rank|.*lora_dim",
        "window": "(.*_)?(sliding_window|attention_window_size|local_attention|window_size|attention_chunk_size)",
    }.items()
}  # the first that matches counts
SIZES = {
    "head_dim": HEAD_DIM, "words": WORDS, "positions": POSITIONS, "width": WIDTH, "inner": 2 * WIDTH, "experts": 4, "chosen": 2,
    "groups": 1, "rank": 16, "window": 4,
}  # fmt: skip


def shrunk(config: Any) -> Any:
    """Return a copy of a configuration with small sizes, in its parts too."""
    small = copy.deepcopy(config)
    for part in parts_of(small):
        _shrink(part)
    return small


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts_of(value)


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(name)), None)


def _shrink(config: Any) -> None:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    counts = {value for name, value in fields.items() if _kind(name) == "layers" and isinstance(value, int)}
    num_layers = _num_layers(fields, counts)
    for index, (name, value) in enumerate(fields.items()):
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            setattr(config, name, _small(name, value, index, num_layers, fields))
        elif isinstance(value, (list, tuple)) and len(value) in counts:
            setattr(config, name, type(value)(value[:num_layers]))
        elif isinstance(value, dict):
            _shrink_rope(value)


def _num_layers(fields: dict[str, Any], counts: set[int]) -> int:
    """Return how many layers to keep so that each kind of layer is there, at most MOST_LAYERS."""
    most = LAYERS
    for value in fields.values():
        if isinstance(value, (list, tuple)) and len(value) in counts and all(isinstance(one, str) for one in value):
            most = max(most, *(value.index(one) + 1 for one in set(value)))
    return min(most, MOST_LAYERS)


def _small(name: str, value: int, index: int, num_layers: int, fields: dict[str, Any]) -> int:
    kind = _kind(name)
    if name.endswith(("token_id", "token_index")):
        return value if value < WORDS // 8 else WORDS - 1 - index % (WORDS // 4)
    if kind == "layers":
        return min(value, num_layers)
    if kind == "mamba_heads" or (name == "num_heads" and "expand" in fields):
        return min(value, 2 * NUM_HEADS)
    if kind == "heads":
        return NUM_HEADS
    if kind == "kv":
        num_heads = max((one for other, one in fields.items() if _kind(other) == "heads" and isinstance(one, int)), default=value)
        return min(value, 2) if value < num_heads else NUM_HEADS
    return min(value, SIZES[kind]) if kind is not None else value


def _shrink_rope(value: dict[str, Any]) -> None:
    for entry in value.values():
        if isinstance(entry, dict):
            _shrink_rope(entry)
    section = value.get("mrope_section")
    if section:
        value["mrope_section"] = [one * (HEAD_DIM // 2) // sum(section) for one in section]


def text_config(config: Any) -> Any:
    """Return the configuration of the part for words, which may be all of it."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
