"""Which classes of Transformers there are that might be cut, and a small model of each."""

from __future__ import annotations

import inspect
import warnings
from itertools import groupby
from typing import Any

import torch
from torch import nn

from bpipe.partition.prove import MOST_PARAMETERS
from bpipe.partition.shrink import HEAD_DIM, NUM_HEADS, shrunk

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns
    import transformers
    from transformers.models.auto import modeling_auto

FILLED = {"vocab_size": 64, "num_key_value_heads": NUM_HEADS, "head_dim": HEAD_DIM, "pad_token_id": 1}  # where there are none
FACTOR = 1.25
MROPE = [2, 3, 3]  # what its models split a head of HEAD_DIM into, which their defaults do not say


def class_names() -> list[str]:
    """Every class that some `AutoModel` knows."""
    mappings = (value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES") and "CONFIG" not in name)
    entries = (entry for mapping in mappings for entry in mapping.values())
    return sorted({name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)})


def class_of(name: str) -> Any:
    """A class, or None where it needs a package that is not installed."""
    try:
        cls = getattr(transformers, name)
        inspect.signature(cls.forward)
    except (ImportError, AttributeError):
        return None
    return cls


def takes_hidden_states(cls: Any) -> bool:
    """Whether a later stage could begin: all others are refused for it."""
    return "inputs_embeds" in inspect.signature(cls.forward).parameters


def groups(names: list[str], *, are_all: bool) -> list[list[str]]:
    """The names by what they begin with: such models share a file, which takes a while to import. Every eighth group, or all."""
    found = [list(group) for _, group in groupby(names, key=lambda name: name[:4])]
    return found if are_all else found[::8]


def small(cls: Any) -> nn.Module:
    """A random model of a small configuration, in which factors that are 1 by default are not.

    Raises:
        Exception: whatever the class raises where its default configuration makes no model.
        ValueError: it is not small.
    """
    config = small_config(cls)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in cls(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} million parameters, however small its configuration is made")
    torch.manual_seed(0)
    model: nn.Module = cls(config)
    return model


def small_config(cls: Any) -> Any:
    """What `small` builds a model of."""
    config = shrunk(cls.config_class())
    for part in (config, config.get_text_config()):
        for name, value in FILLED.items():
            if vars(part).get(part.attribute_map.get(name, name), 0) is None:
                setattr(part, name, value)
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and value == 1.0 and ("multiplier" in name or "scal" in name):
                setattr(part, name, FACTOR)
        if hasattr(part, "use_cache"):
            part.use_cache = False
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict) and "rope_type" in rope:
            rope.setdefault("mrope_section", MROPE)
        if getattr(part, "languages", None):
            part.default_language = part.languages[0]
    return config
