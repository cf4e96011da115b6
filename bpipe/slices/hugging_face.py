"""Let stages of Hugging Face Transformers models take sequences in slices, without a change to the model.

These models hand keys and values to a cache, and leave attention to a function that they look up by name. Here
the cache gives the slice's own keys and values to a function that attends to earlier slices too. transformers is imported on the
first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn

from bpipe.errors import ConfigurationError, StageError
from bpipe.memory.saved.joined import cast
from bpipe.slices.attention import causal_attention, kept_dtype, masked_attention
from bpipe.slices.masks import Documents

__all__: list[str] = []

NAME = "bpipe_slices"  # of the attention function
OLD_NAME = "past_key_values"  # of the argument by which models take a cache
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
MIXING = (nn.Conv1d, nn.RNNBase, nn.RNNCellBase)
ROPES = {"default", "linear", "llama3", "yarn", "proportional"}  # the others look at the length of the sequence
UNKNOWN = ("softcap", "s_aux", "head_mask", "position_bias", "cu_seq_lens_q")  # what torch's attention does not do
OUTSIDE = -1  # of any backward
Pair = tuple[torch.Tensor, torch.Tensor]


class _Running(threading.local):
    """The keys and values of the slice whose forward runs in this thread; None outside of one."""

    pieces: Any = None


_RUNNING = _Running()


def in_slices(stage: nn.Module) -> SlicedTransformer:
    """Return a module that runs a stage on slices, where nothing that can be seen from outside speaks against it.

    Raises:
        ConfigurationError: a layer mixes positions in another way than by attention, or attention that cannot be replaced.
    """
    _check(stage)
    _register()
    try:
        stage.set_attn_implementation(NAME)  # type: ignore[operator]
    except (AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"a {type(stage).__name__} cannot take slices: its attention cannot be replaced: {error}"
        ) from error
    for module in stage.modules():  # the layers of a part keep the configuration of the whole model
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = NAME
    return SlicedTransformer(stage)


def _check(stage: nn.Module) -> None:
    """Raise if a stage has something whose result for a slice depends on more than the keys and values of earlier ones."""
    name = type(stage).__name__
    for path, module in stage.named_modules():
        kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
        if isinstance(module, MIXING) or not ATTENTION.issuperset(kinds):
            raise ConfigurationError(
                f"{name} cannot take slices: {path or 'it'} has layers besides attention that mix positions, and nobody hands on "
                "their state"
            )
        rope = getattr(module, "rope_type", ())
        found = {rope} if isinstance(rope, str) else set(rope.values()) if isinstance(rope, dict) else set()
        if not found <= ROPES:
            raise ConfigurationError(
                f"{name} cannot take slices: the rotary embeddings of {path} ({', '.join(sorted(found - ROPES))}) depend on the "
                "length of what they are given"
            )
    if any(getattr(module, "gradient_checkpointing", False) for module in stage.modules()):
        raise ConfigurationError(
            f"{name} cannot take slices with gradient checkpointing: use bpipe.Balanced(schedule, by='recompute')"
        )


def _documents(kwargs: dict[str, Any], past: Sequence[Any], name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a slice's positions, and the documents of all positions up to its end, if several are packed into the sequence.

    A document ends where positions do not go on. Where there is an attention_mask, this says which attends to which.

    Raises:
        StageError: some slices have positions and others have none, or they are not [batch, positions].
    """
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return None, None
    known = [one["position_ids"] for one in past]
    if any(one is None for one in known):
        raise StageError(f"{name} got position_ids with a slice, and none with an earlier one: give them to `step` for all")
    all_positions = torch.cat([*known, positions], -1)
    goes_on = all_positions.diff(dim=-1) == 1
    if bool(goes_on.all()):
        return positions, None
    if positions.ndim != 2:
        raise StageError(f"{name} got position_ids {list(positions.shape)} that do not go on: give sequences that are not packed")
    return positions, nn.functional.pad((~goes_on).cumsum(-1), (1, 0))


def _name_of_cache(stage: nn.Module) -> str:
    """Return the argument by which a model takes a cache: Transformers 5.24 has renamed it."""
    classes = (*type(stage).__mro__, *type(getattr(stage, "base_model", stage)).__mro__)
    forwards = [vars(one)["forward"] for one in classes if "forward" in vars(one)]
    return "cache" if any("cache" in signature(forward).parameters for forward in forwards) else OLD_NAME


class SlicedTransformer(nn.Module):
    """A stage of a Transformers model that takes slices."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self._name_of_cache = stage, _name_of_cache(stage)

    def forward(self, hidden_states: torch.Tensor, past: tuple[Any, ...] = (), **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the stage on a slice: word ids [batch, positions] on the first stage, hidden states on the others."""
        name = type(self.stage).__name__
        positions, documents = _documents(kwargs, past, name)
        pieces, before = _cache_class()(past, name, documents), _RUNNING.pieces
        _RUNNING.pieces = pieces
        try:
            output = self.stage(hidden_states, **{self._name_of_cache: pieces}, **kwargs)
        finally:
            _RUNNING.pieces = before
        return output, {**pieces.state(hidden_states.shape[1]), "position_ids": positions}


def _runs_again(name: str) -> StageError:
    return StageError(
        f"{name} runs again in a backward, where it has no earlier slices (activation checkpointing): "
        "recompute with bpipe.Balanced(schedule, by='recompute') instead"
    )


@cache
def _cache_class() -> Callable[..., Any]:
    from transformers.cache_utils import Cache

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
            if _RUNNING.pieces is not self:
                raise _runs_again(self.name)
            if layer_idx in self.own:
                raise StageError(f"{self.name} cannot take slices: its layer {layer_idx} hands over keys and values twice")
            self.own[layer_idx] = key_states, value_states
            return key_states, value_states

        def attend(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> list[Pair]:
            """Note that a layer attends to its own keys and values, and return those of earlier slices.

            Raises:
                StageError: they are not what it has handed over, which is what it would get of earlier slices, or it has
                    attended already.
            """
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
            """Return what later slices need.

            Raises:
                StageError: a layer has not attended to the earlier slices.
            """
            if not self.own or self.own.keys() != self.attended:
                raise StageError(
                    f"{self.name} cannot take slices: of its layers, {sorted(self.own)} have handed over keys and values, and "
                    f"{sorted(self.attended)} have attended to those of earlier slices. Its attention does not go through "
                    "Transformers' attention functions, or it has none"
                )
            return {"layers": dict(self.own), "positions": positions}

    return Pieces


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        pieces = _RUNNING.pieces
        if pieces is None:
            if torch._C._current_graph_task_id() != OUTSIDE:
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
            attention_mask = attention_mask & Documents(documents, query.shape[2]).whole()
        if not earlier:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        found = masked_attention(query, key, value, earlier, attention_mask, scale)
        return found.transpose(1, 2).contiguous(), None

    def mask(**kwargs: Any) -> Any:
        if _RUNNING.pieces is not None:
            padding = kwargs.get("attention_mask")
            if padding is not None and padding.shape[-1] != kwargs["kv_length"]:
                raise StageError(
                    f"an attention_mask of {padding.shape[-1]} positions came with a slice that ends at {kwargs['kv_length']}: "
                    "give kwargs_slice_spec={'attention_mask': bpipe.slices.UpTo(1)}"
                )
            if kwargs.get("mask_function") in (None, causal_mask_function) and (padding is None or bool(padding.all())):
                return None  # `causal_attention` needs none
            kwargs["allow_is_causal_skip"] = False  # which knows of a slice's first position only
        return sdpa_mask(**kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
