"""The dimensions of a transformer, and its parameters.

Letters: L layers, h hidden, a heads, g = key and value heads / heads, f the width of the MLP, s sequence, v vocabulary.

Parameters of a layer, as Megatron-LM's `theoretical_memory_usage.py` and Narayanan et al. (arXiv 2104.04473, section 5.1)
count them: attention h^2 (2 + 2g), MLP 2hf, or 3hf when gated, biases h (2 + 2g) + f + h (gated: 2f + h), two norms of h,
or 2h with biases. For GPT (g = 1, f = 4h) that is 12 h^2 + 13 h.
"""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.checks import check_count
from bpipe.errors import ConfigurationError

__all__ = ["Transformer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder-only transformer by its dimensions; the defaults are GPT's.

    Args:
        num_layers: L.
        hidden: h, a multiple of `num_heads`.
        num_heads: a.
        sequence: s, tokens of a sequence.
        vocabulary: v, including the model's padding.
        num_kv_heads: heads of keys and values (grouped queries); default: all.
        ffn: f, the MLP's inner width; default: 4h; required if gated.
        is_gated: whether the MLP has a gate (SwiGLU).
        is_tied: whether the head is the embedding's matrix.
        has_positions: whether s positions of h are learned.
        has_biases: whether linear layers and norms have biases (RMSNorm has none).
        has_dropout: whether dropout is on: after the embedding, attention and MLP, and within materialised attention.
        name: for messages.

    Raises:
        ConfigurationError: the sizes do not make a model.

    Example:
        >>> model = Transformer(num_layers=12, hidden=768, num_heads=12, sequence=1024, vocabulary=50257)
        >>> round(model.num_parameters / 1e6)
        124
    """

    num_layers: int
    hidden: int
    num_heads: int
    sequence: int
    vocabulary: int
    num_kv_heads: int | None = None
    ffn: int | None = None
    is_gated: bool = False
    is_tied: bool = True
    has_positions: bool = True
    has_biases: bool = True
    has_dropout: bool = True
    name: str = "transformer"

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "num_heads", "sequence", "vocabulary"):
            check_count(field, getattr(self, field))
        if self.hidden % self.num_heads:
            raise ConfigurationError(f"hidden={self.hidden} does not divide into num_heads={self.num_heads}")
        if self.num_kv_heads is not None:
            check_count("num_kv_heads", self.num_kv_heads)
            if self.num_heads % self.num_kv_heads:
                raise ConfigurationError(f"num_heads={self.num_heads} does not divide into num_kv_heads={self.num_kv_heads}")
        if self.ffn is not None:
            check_count("ffn", self.ffn)
        elif self.is_gated:
            raise ConfigurationError("a gated MLP has no usual width: give ffn=")

    @property
    def kv_hidden(self) -> int:
        """g h: the width of the keys, and of the values."""
        return self.hidden // self.num_heads * (self.num_kv_heads or self.num_heads)

    @property
    def ffn_hidden(self) -> int:
        """f."""
        return self.ffn or 4 * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer that multiply every token: its matrices."""
        attention = 2 * self.hidden * (self.hidden + self.kv_hidden)
        return attention + (3 if self.is_gated else 2) * self.hidden * self.ffn_hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        norms = 2 * self.norm_parameters
        if not self.has_biases:
            return self.layer_matrices + norms
        mlp = (2 if self.is_gated else 1) * self.ffn_hidden + self.hidden
        return self.layer_matrices + 2 * (self.hidden + self.kv_hidden) + mlp + norms

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm: a weight, and with biases a bias."""
        return (2 if self.has_biases else 1) * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        return (self.vocabulary + (self.sequence if self.has_positions else 0)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the head's matrix, tied or not."""
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        head = 0 if self.is_tied else self.head_parameters
        return self.embedding_parameters + self.num_layers * self.layer_parameters + self.norm_parameters + head
