"""Models by name. Each test in `tests/estimate/test_models.py` compares the parameters with the name."""

from __future__ import annotations

from typing import Any

from bpipe.checks import lookup
from bpipe.estimate.transformer import Transformer

__all__ = ["model_named"]


# GPT-3's shape: learned positions, biases, dropout, a tied head; vocabulary 50,257, padded to 51,200
_GPT: dict[str, Any] = {"sequence": 2048, "vocabulary": 51200}
# LLaMA's shape: rotary positions, RMSNorm, SwiGLU, no biases, no dropout, a head of its own
_LLAMA: dict[str, Any] = {"is_gated": True, "is_tied": False, "has_positions": False, "has_biases": False, "has_dropout": False}
_LLAMA1 = _LLAMA | {"sequence": 2048, "vocabulary": 32000}  # Touvron et al., arXiv 2302.13971, table 2
_LLAMA2 = _LLAMA | {"sequence": 4096, "vocabulary": 32000}  # Touvron et al., arXiv 2307.09288, table 1
# Grattafiori et al., arXiv 2407.21783, table 3; s = 8,192, as in the main part of the pre-training
_LLAMA3 = _LLAMA | {"sequence": 8192, "vocabulary": 128256, "num_kv_heads": 8}


def _model(family: dict[str, Any], name: str, num_layers: int, hidden: int, num_heads: int, **more: Any) -> Transformer:
    return Transformer(name=name, num_layers=num_layers, hidden=hidden, num_heads=num_heads, **family | more)


_MODELS = {
    model.name: model
    for model in (
        _model(_GPT, "gpt2", 12, 768, 12, sequence=1024, vocabulary=50257),  # Radford et al., 2019
        _model(_GPT, "gpt3-13b", 40, 5120, 40),  # Brown et al., arXiv 2005.14165, table 2.1, with 40 heads of 128
        _model(_GPT, "gpt3-96b", 80, 9984, 104),  # Kim et al., ICML 2023
        _model(_GPT, "gpt3-175b", 96, 12288, 96),  # Brown et al., table 2.1
        _model(_LLAMA1, "llama-7b", 32, 4096, 32, ffn=11008),
        _model(_LLAMA1, "llama-65b", 80, 8192, 64, ffn=22016),
        _model(_LLAMA2, "llama2-7b", 32, 4096, 32, ffn=11008),
        _model(_LLAMA2, "llama2-13b", 40, 5120, 40, ffn=13824),
        _model(_LLAMA2, "llama2-70b", 80, 8192, 64, ffn=28672, num_kv_heads=8),
        _model(_LLAMA3, "llama3-8b", 32, 4096, 32, ffn=14336),
        _model(_LLAMA3, "llama3-70b", 80, 8192, 64, ffn=28672),
        _model(_LLAMA3, "llama3-405b", 126, 16384, 128, ffn=53248),
    )
}


def model_named(name: str) -> Transformer:
    """Look up a model by its name, in any case and punctuation.

    Raises:
        ConfigurationError: no such model; the message names the nearest.

    Example:
        >>> model_named("LLaMA 65B").num_layers
        80
    """
    return lookup("model", name, _MODELS)


def model_names() -> tuple[str, ...]:
    """Return the names of the models that `model_named` knows."""
    return tuple(_MODELS)
