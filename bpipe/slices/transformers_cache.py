"""The cache and the attention function of slices, as Hugging Face Transformers looks them up: importing this registers them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from bpipe.errors import StageError
from bpipe.memory.saved.joined import cast
from bpipe.slices.attention import causal_attention, kept_dtype, masked_attention
from bpipe.slices.masks import Documents
from bpipe.torch_private.engine_and_graph import backward_runs

__all__: list[str] = []

NAME = "bpipe_slices"  # of the attention function
UNKNOWN = ("softcap", "s_aux", "head_mask", "position_bias", "cu_seq_lens_q")  # what torch's attention does not do
Pair = tuple[torch.Tensor, torch.Tensor]


class _Running(threading.local):
    """The keys and values of the slice whose forward runs in this thread; None outside of one."""

    pieces: Pieces | None = None


RUNNING = _Running()


class Pieces(Cache):
    """The keys and values of earlier slices and of this one, by layer."""

    is_of_slices = True

    def __init__(self, past: tuple[Any, ...], name: str, documents: torch.Tensor | None) -> None:
        super().__init__(layers=[])
        self.start: int = sum(one["positions"] for one in past)
        self._past = past
        self.own: dict[int, Pair] = {}
        self.attended: set[int] = set()
        self.name, self.documents = name, documents

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def earlier(self, layer: int) -> list[Pair]:
        return [one["layers"][layer] for one in self._past]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Pair:
        if RUNNING.pieces is not self:
            raise _runs_again(self.name)
        if layer_idx in self.own:
            raise StageError(f"{self.name} cannot take slices: its layer {layer_idx} hands over keys and values twice")
        self.own[layer_idx] = key_states, value_states
        return key_states, value_states

    def attend(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> list[Pair]:
        """Note that a layer attends, once, to the keys and values that it has handed over; return those of earlier slices."""
        layer: Any = getattr(module, "layer_idx", None)
        own = self.own.get(layer)
        if own is None or own[0] is not key or own[1] is not value or layer in self.attended:
            raise StageError(
                f"{self.name} cannot take slices: its {type(module).__name__} attends "
                f"{'twice' if layer in self.attended else 'to other keys and values than it has handed to its cache'}, so "
                "those of earlier slices would not be what it would attend to in a whole sequence"
            )
        self.attended.add(layer)
        return self.earlier(layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.start + query_length, 0

    def state(self, positions: int) -> dict[str, Any]:
        """Return what later slices need; raise a StageError if a layer has not attended to the earlier slices."""
        if not self.own or self.own.keys() != self.attended:
            raise StageError(
                f"{self.name} cannot take slices: of its layers, {sorted(self.own)} have handed over keys and values, and "
                f"{sorted(self.attended)} have attended to those of earlier slices. Its attention does not go through "
                "Transformers' attention functions, or it has none"
            )
        return {"layers": dict(self.own), "positions": positions}


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    pieces = RUNNING.pieces
    if pieces is None:
        if backward_runs():
            raise _runs_again(type(module).__name__)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if unknown or kwargs.get("dropout"):
        raise StageError(f"attention over slices has no {unknown[0] if unknown else 'dropout: set attention_dropout to 0'}")
    given = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if given is None else given):
        raise StageError(f"{type(module).__name__} looks ahead, where a slice has nothing: leave slices out")
    earlier = pieces.attend(module, key, value)
    key, value = (cast(one, kept_dtype(query)) for one in (key, value))  # rotary embeddings leave keys in single precision
    scale, documents = kwargs.get("scaling"), pieces.documents
    if attention_mask is None:
        found = causal_attention(query, key, value, earlier, scale=scale, documents=documents)
        return found.transpose(1, 2).contiguous(), None
    if documents is not None:
        attention_mask = attention_mask & Documents(documents, queries=query.shape[2]).whole()
    if not earlier:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    found = masked_attention(query, key, value, earlier, attention_mask, scale)
    return found.transpose(1, 2).contiguous(), None


def mask(**kwargs: Any) -> Any:
    if RUNNING.pieces is not None:
        padding = kwargs.get("attention_mask")
        if padding is not None and padding.shape[-1] != kwargs["kv_length"]:
            raise StageError(
                f"an attention_mask of {padding.shape[-1]} positions came with a slice that ends at {kwargs['kv_length']}: "
                "give Options(kwargs_slice_spec={'attention_mask': bpipe.slices.UpTo(1)})"
            )
        if kwargs.get("mask_function") in (None, causal_mask_function) and (padding is None or bool(padding.all())):
            return None  # `causal_attention` needs none
        kwargs["allow_is_causal_skip"] = False  # which knows of a slice's first position only
    return sdpa_mask(**kwargs)


def _runs_again(name: str) -> StageError:
    return StageError(
        f"{name} runs again in a backward, where it has no earlier slices (activation checkpointing): "
        "recompute with bpipe.Balanced(schedule, by='recompute') instead"
    )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
