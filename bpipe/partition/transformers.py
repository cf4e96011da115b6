"""Cut a Hugging Face Transformers model into stages. transformers itself is not imported here.

Such a model takes `inputs_embeds` in place of `input_ids`: there a later stage puts the hidden states that it was sent. What the
first stage has added to them (embeddings of positions and token types, dropout) is replaced there by modules that change nothing.
Layers that other stages have are left out; where a config has `layer_types`, which models look up by a layer's place, they are
replaced too. A stage's class becomes a subclass with another forward, as FSDP2's `fully_shard` does it, so that names stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from bpipe.errors import ConfigurationError
from bpipe.estimate.stages import split_layers
from bpipe.partition.split import listed, split_model

__all__ = ["split_transformer", "transformer_layers"]

NOT_OF_A_STAGE = {
    "labels": "give them to the schedule as target=, and the loss as loss_fn=",
    "past_key_values": "a pipeline trains without a cache",
    "inputs_embeds": "the first stage takes input_ids, and the others hidden states",
}


def split_transformer(model: nn.Module, stages: int | Sequence[int] | Sequence[Sequence[str]]) -> list[nn.Module]:
    """Cut a Hugging Face Transformers model into stages.

    The first stage takes `input_ids` as its positional argument, the others hidden states [batch, sequence, width]; the last one
    returns logits as a plain tensor (a model without a head, its last hidden states), the others hidden states. Every stage takes
    the keyword arguments that the model takes, such as `attention_mask` and `position_ids`: give those to `step` on every rank.
    Nothing is cached. Stages share the modules and parameters of the model, under its names; a weight that input embeddings and
    head share is on the first stage and on the last, so sum its gradients where these are different processes.

    For encoders and decoders with one series of layers, whose forward takes `inputs_embeds`. `bpipe.check_split` proves a split
    on an example; run it once for each kind of model. Call what changes the model as a whole, such as its
    `gradient_checkpointing_enable()`, before the split. All ranks of a pipeline must cut alike.

    Args:
        model: of transformers, also on the meta device; it is not changed.
        stages: how many, as even as they go; or how many layers each has; or for each the names of its modules, in which each
            entry of `transformer_layers(model)` is on one stage.

    Raises:
        ConfigurationError: the model is none that can be cut so, or the stages are not all of it.

    Example:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8))
        stage = bpipe.PipelineStage(bpipe.split_transformer(model, 4)[rank], rank, 4, device)
    """
    outline = _outline(model)
    lists = [list(dict.fromkeys((*names, *outline.everywhere))) for names in _lists(outline, stages)]
    parts = split_model(model, lists, missing=outline.missing, keep_positions=outline.keep_positions)
    cls: Any = type(model)
    for index, part in enumerate(parts):
        part.__class__ = _stage_class(cls, index == 0, index == len(parts) - 1)
    return parts


def transformer_layers(model: nn.Module) -> list[tuple[str, ...]]:
    """The parts of a Transformers model between which it can be cut, each as the names of modules that stay together.

    These are what comes before the layers, each layer, and what comes after; `bpipe.measure_layers` takes them.

    Raises:
        ConfigurationError: the model is none that can be cut so.

    Example:
        layers = bpipe.measure_layers(model, input_ids, {"use_cache": False}, layers=bpipe.transformer_layers(model))
        parts = bpipe.split_transformer(model, bpipe.choose_stages(layers, num_stages=4, num_microbatches=8).stages)
    """
    outline = _outline(model)
    return [group for group in (outline.before, *((name,) for name in outline.layers), outline.after) if group]


class _Outline(NamedTuple):
    """Where the modules of a model go."""

    before: tuple[str, ...]  # on the first stage
    layers: tuple[str, ...]
    after: tuple[str, ...]  # on the last stage
    everywhere: tuple[str, ...]  # without parameters, and used by every layer
    missing: dict[str, str]  # what stands for those of `before` on later stages, where it is not "pass"
    keep_positions: bool  # whether what kind a layer has is looked up by its place


def _outline(model: nn.Module) -> _Outline:
    base = _base_of(model)
    prefix = "" if base is model else f"{next(name for name, module in model.named_modules() if module is base)}."
    series = prefix + _series(base, model)
    found: dict[str, list[str]] = {"before": [], "after": [], "everywhere": []}
    for name, module, is_before in _beside(model, series):
        place = "everywhere" if "rotary" in type(module).__name__.lower() else "before" if is_before else "after"
        if not name.startswith(prefix):
            place = "after"
        found[place].append(name)
    entries = cast(nn.ModuleList, model.get_submodule(series))
    return _Outline(
        before=tuple(found["before"]),
        layers=tuple(f"{series}.{index}" for index in range(len(entries))),
        after=tuple(sorted(found["after"], key=lambda name: not name.startswith(prefix))),  # a head comes last
        everywhere=tuple(found["everywhere"]),
        missing={name: "zero" for name in found["before"] if _is_added(model.get_submodule(name))},
        keep_positions=getattr(_text_config(model), "layer_types", None) is not None,
    )


def _base_of(model: nn.Module) -> nn.Module:
    """The part of a model without its head.

    Raises:
        ConfigurationError: it has none, or none that can begin with hidden states.
    """
    base, config = getattr(model, "base_model", None), getattr(model, "config", None)
    what = f"{type(model).__name__} cannot be cut by split_transformer"
    if not isinstance(base, nn.Module) or config is None:
        raise ConfigurationError(f"{what}: it is no model of transformers, which has a config and a base_model; use split_model")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(f"{what}: it has an encoder and a decoder, and a pipeline has one series of layers")
    if any("inputs_embeds" not in inspect.signature(one.forward).parameters for one in (base, model)):
        raise ConfigurationError(f"{what}: its forward takes no inputs_embeds, so that no stage can begin with hidden states")
    return base


def _series(base: nn.Module, model: nn.Module) -> str:
    """The name of the list of layers.

    Raises:
        ConfigurationError: there is none, or more than one.
    """
    num_layers = _text_config(model).num_hidden_layers
    lists = [name for name, one in base.named_modules() if isinstance(one, nn.ModuleList) and len(one) == num_layers]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise ConfigurationError(
            f"{type(model).__name__} has {len(outer)} lists of {num_layers} layers ({', '.join(outer) or 'none'}), and "
            "split_transformer takes a model with one; use split_model"
        )
    return str(outer[0])


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _beside(model: nn.Module, series: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules beside the list of layers and beside those around it, and whether they are registered before these."""
    above, steps = "", series.split(".")
    for step in steps:
        names = list(model.get_submodule(above)._modules)
        for entry, module in model.get_submodule(above)._modules.items():
            if module is not None and entry != step:
                ends = entry.startswith("final") or entry.endswith("_out")  # as OPT's, which registers its layers last
                is_before = names.index(entry) < names.index(step) and not ends
                yield f"{above}.{entry}".lstrip("."), module, is_before
        above = f"{above}.{step}".lstrip(".")


def _is_added(module: nn.Module) -> bool:
    """Whether what a module gives is added to the hidden states, and not made of them."""
    return isinstance(module, nn.Embedding) or "position" in type(module).__name__.lower()


def _lists(outline: _Outline, stages: int | Sequence[int] | Sequence[Sequence[str]]) -> list[list[str]]:
    if isinstance(stages, int):
        stages = split_layers(len(outline.layers), stages)
    if not stages:
        raise ConfigurationError("stages=[]: give a number, or an entry for each stage")
    if all(not isinstance(one, int) for one in stages):
        return [listed(cast(Sequence[str], one)) for one in stages]
    counts = split_layers(len(outline.layers), len(stages), cast(Sequence[int], stages))
    lists = [list(outline.layers[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
    lists[0][:0] = outline.before
    lists[-1] += outline.after
    return lists


@cache
def _stage_class(cls: Any, is_first: bool, is_last: bool) -> type[nn.Module]:
    """The model's class with the forward of a stage, under the same name."""

    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        unusable = next((name for name in NOT_OF_A_STAGE if kwargs.get(name) is not None), None)
        if unusable is not None:
            raise ConfigurationError(f"a stage of {cls.__name__} does not take {unusable}: {NOT_OF_A_STAGE[unusable]}")
        inputs = {"input_ids" if is_first else "inputs_embeds": hidden_states, "use_cache": False, "return_dict": True}
        if is_last or self.base_model is self:
            output = cls.forward(self, **{**kwargs, **inputs})
        else:
            output = cast(nn.Module, self.base_model)(**{**kwargs, **inputs})
        if is_last and self.base_model is not self and "logits" not in output:
            raise ConfigurationError(
                f"{cls.__name__} returns {' and '.join(output)}, and a last stage returns logits: use split_model"
            )
        return cast(Tensor, output["logits"] if "logits" in output else output[0])

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "forward": forward}
    return type(cls.__name__, (cls,), names)
