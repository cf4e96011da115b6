"""Let stages of Hugging Face Transformers models take sequences in slices, without a change to the model.

These models hand keys and values to a cache, and leave attention to a function that they look up by name. Here the cache gives the
slice's own keys and values to a function that attends to earlier slices too. transformers is imported on the first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from bpipe.errors import ConfigurationError, StageError

__all__: list[str] = []

OLD_NAME = "past_key_values"  # of the argument by which models take a cache
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
MIXING = (nn.Conv1d, nn.RNNBase, nn.RNNCellBase)
ROPES = {"default", "linear", "llama3", "yarn", "proportional"}  # the others look at the length of the sequence


def in_slices(stage: nn.Module) -> SlicedTransformer:
    """Return a module that runs a stage on slices; raise a ConfigurationError where what can be seen of it speaks against it."""
    from bpipe.slices.transformers_cache import NAME

    _check(stage)
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
        from bpipe.slices.transformers_cache import RUNNING, Pieces

        name = type(self.stage).__name__
        positions, documents = _documents(kwargs, past, name)
        pieces, before = Pieces(past, name, documents), RUNNING.pieces
        RUNNING.pieces = pieces
        try:
            output = self.stage(hidden_states, **{self._name_of_cache: pieces}, **kwargs)
        finally:
            RUNNING.pieces = before
        return output, {**pieces.state(hidden_states.shape[1]), "position_ids": positions}
