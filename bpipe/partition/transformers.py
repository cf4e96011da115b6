"""Cut a Hugging Face Transformers model into stages. transformers itself is not imported here.

Such a model takes `inputs_embeds` in place of `input_ids`, and a later stage passes the hidden states that it received as these.
The modules that the first stage has already applied (embeddings of positions and token types, dropout) are replaced on it by ones
that change nothing. Layers that other stages have are left out; where a config has `layer_types`, which models look up by a
layer's position, they are replaced too. A stage's class becomes a subclass with another forward, as with FSDP2's `fully_shard`,
so that names stay the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

from torch import nn

from bpipe.errors import ConfigurationError
from bpipe.estimate.stages import split_layers
from bpipe.partition.model_split import listed, split_model
from bpipe.partition.name_lists import OF_PARAMETERS
from bpipe.partition.prove import NotProvenError, prove_cut
from bpipe.partition.router_loss import ASKS, is_configured
from bpipe.partition.shrink import text_config
from bpipe.partition.split_check import DifferenceError
from bpipe.partition.stage_class import stage_class

__all__ = ["split_transformer", "transformer_layers"]

SCALES = frozenset({"embedding_multiplier"})
Stages = int | Sequence[int] | Sequence[Sequence[str]]  # as `split_transformer` takes them


def split_transformer(
    model: nn.Module, stages: int | Sequence[int] | Sequence[Sequence[str]], *, prove: bool = True
) -> list[nn.Module]:
    """Cut a Hugging Face Transformers model into stages.

    The first stage takes `input_ids` as its positional argument or by name, the others hidden states [batch, sequence, width]; the
    last one returns logits as a plain tensor (a model without a head, its last hidden states), the others hidden states. Every
    stage takes the keyword arguments that the model takes, such as `attention_mask` and `position_ids`: give those to `step` on
    every rank. Nothing is cached. Stages share the modules and parameters of the model, under its names; a weight that input
    embeddings and head share is on the first stage and on the last: where these are different processes, each step adds its
    gradients up.

    With `output_router_logits`, in the configuration or in `step` on every rank, a mixture of experts trains with the loss of its
    router, too: the logits of all layers reach the last stage, and the gradient of the model's loss of them comes with that of
    `loss_fn`. It is not among `losses`, and a `GradScaler` does not scale it: use bfloat16 there.

    It cuts encoders and decoders of words that have one series of layers and whose forward takes `inputs_embeds`;
    docs/transformers.md lists the classes. The cut is proven before the stages are returned: a small model of the same kind, cut
    the same way, must have the outputs and the gradients of the whole one bit for bit, with and without padding, in train mode. A
    model of up to 16.8 million parameters that is not on the meta device is copied for that; for any other, a model of a smaller
    configuration is built. Both happen on the CPU, and the model itself is not run. It takes less than a second.
    `bpipe.check_split` proves a split on your own inputs.

    Call what changes the model as a whole, such as its `gradient_checkpointing_enable()`, before the split. All ranks of a pipeline
    must cut the same way.

    Args:
        model: a model of transformers, also on the meta device; it is not changed.
        stages: the number of stages, as even as possible; or the number of layers of each stage; or for each stage the names of its
            modules, with each entry of `transformer_layers(model)` on one stage.
        prove: False to skip the proof where no small model of the kind can be built: call `check_split` on one of your own.

    Raises:
        ConfigurationError: the model cannot be cut this way, its stages compute something else or cannot be proven, or the
            stages do not make up the whole model.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
        >>> first, second = split_transformer(model, 2)
        >>> second(first(torch.zeros(1, 4, dtype=torch.long))).shape
        torch.Size([1, 4, 32])
    """
    _check_outputs(model)
    parts = _cut(model, stages)
    if prove:
        _prove(model, stages, len(parts))
    return parts


def _check_outputs(model: nn.Module) -> None:
    """Raise if the configuration asks for outputs that a last stage does not return, which would be lost."""
    base, config = _base_of(model), cast(Any, model.config)
    parts, names = (config, text_config(config)), ("output_hidden_states", "output_attentions")
    asked = [f"{name}=True" for name in names if any(getattr(one, name, False) for one in parts)]
    asked += ["return_dict=False"] if getattr(config, "return_dict", True) is False else []
    asked += [f"{ASKS}=True"] if base is model and is_configured(config) else []
    if asked:
        raise ConfigurationError(
            f"{_what(model)} with {' and '.join(asked)} in its configuration: the last stage returns logits or hidden states "
            "alone, as a tensor. Leave that out; for what is inside, register a forward hook on a module of the stage"
        )


def _prove(model: nn.Module, stages: Stages, num_stages: int) -> None:
    """Raise unless a small model of the kind computes the same in stages as whole."""
    try:
        prove_cut(model, lambda copy: _cut(copy, stages), lambda twin: cut_finely(twin, num_stages))
    except NotProvenError as error:
        raise ConfigurationError(
            f"{_what(model)}: the cut cannot be proven, because {error}. If a small model of this class runs on input_ids and "
            "attention_mask and check_split finds its stages right, pass prove=False"
        ) from error
    except DifferenceError as found:
        raise ConfigurationError(
            f"{_what(model)}: in a small model of its kind, {found}. Its forward does more than hand hidden states from one "
            "layer to the next. Cut it with split_model, after a forward of yours that goes well with missing modules"
        ) from found.__cause__


def _cut(model: nn.Module, stages: Stages) -> list[nn.Module]:
    outline = _outline(model)
    lists = [list(dict.fromkeys((*names, *outline.everywhere))) for names in _lists(outline, stages)]
    parts = split_model(model, lists, missing=outline.missing, keep_positions=outline.keep_positions)
    cls: Any = type(model)
    for index, part in enumerate(parts):
        if index:
            _leave_unscaled(part, outline.layers[0])
        part.__class__ = stage_class(cls, index == 0, index == len(parts) - 1)
    return parts


def _leave_unscaled(part: nn.Module, layer: str) -> None:
    """Keep a later stage from scaling hidden states by the factor for embeddings, as Granite's forward would."""
    steps = layer.split(".")[:-1]
    for above in (part.get_submodule(".".join(steps[:depth])) for depth in range(len(steps))):  # which are the stage's own
        for name in SCALES.intersection(vars(above)):
            setattr(above, name, 1.0)


def cut_finely(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """Cut into this many stages, or into as many as a small model has layers if it has fewer."""
    return _cut(model, min(num_stages, len(_outline(model).layers)))


def _what(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot be cut by split_transformer"


def transformer_layers(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the parts of a Transformers model between which it can be cut, each as the names of modules that stay together.

    These are what comes before the layers, each layer, and what comes after; `bpipe.measure_layers` takes them.

    Raises:
        ConfigurationError: the model cannot be cut this way.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
        >>> transformer_layers(model)[1]
        ('model.layers.0',)
    """
    outline = _outline(model)
    return [tuple(group) for group in (outline.before, *([name] for name in outline.layers), outline.after) if group]


class _Outline(NamedTuple):
    """The modules of a model, by the stages that they go to."""

    before: list[str]  # on the first stage
    layers: list[str]
    after: list[str]  # on the last stage
    everywhere: list[str]  # without parameters, and used by every layer
    missing: dict[str, str]  # what stands for those of `before` on later stages, where it is not "pass"
    keep_positions: bool  # whether a layer's kind is looked up by its position


def _outline(model: nn.Module) -> _Outline:
    base = _base_of(model)
    prefix = "" if base is model else f"{next(name for name, module in model.named_modules() if module is base)}."
    series = prefix + _series(base, model)
    before, after, everywhere = list[str](), list[str](), list[str]()
    entries = cast(nn.ModuleList, model.get_submodule(series))
    for name, module, is_before in _beside(model, series):
        if isinstance(module, OF_PARAMETERS) and module._parameters.keys() == entries._modules.keys():
            continue  # split_model leaves each with its layer
        if name.startswith(prefix) and "rotary" in type(module).__name__.lower():
            everywhere.append(name)
        else:
            (before if is_before and name.startswith(prefix) else after).append(name)
    layers = [f"{series}.{index}" for index in range(len(entries))]
    after.sort(key=lambda name: not name.startswith(prefix))  # a head comes last
    missing = {name: "zero" for name in before if _is_added(model.get_submodule(name))}
    keep_positions = getattr(text_config(model.config), "layer_types", None) is not None
    return _Outline(before, layers, after, everywhere, missing, keep_positions)


def _base_of(model: nn.Module) -> nn.Module:
    """Return the part of a model without its head."""
    base, config = getattr(model, "base_model", None), getattr(model, "config", None)
    what = _what(model)
    if not isinstance(base, nn.Module) or config is None:
        raise ConfigurationError(f"{what}: it is not a model of transformers, which has a config and a base_model; use split_model")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(f"{what}: it has an encoder and a decoder, and a pipeline has one series of layers")
    if any("inputs_embeds" not in inspect.signature(one.forward).parameters for one in (base, model)):
        raise ConfigurationError(f"{what}: its forward takes no inputs_embeds, so that no stage can begin with hidden states")
    return base


def _series(base: nn.Module, model: nn.Module) -> str:
    """Return the name of the list of layers."""
    num_layers = getattr(text_config(model.config), "num_hidden_layers", None)
    lists = [name for name, one in base.named_modules() if isinstance(one, nn.ModuleList) and len(one) == num_layers]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) > 1:  # those for pictures have as many
        around = {name: base.get_submodule(name.rpartition(".")[0]) for name in outer}
        of_words = [name for name, one in around.items() if getattr(one, "config", None) is text_config(model.config)]
        outer = of_words if len(of_words) == 1 else outer
    if len(outer) != 1:
        raise ConfigurationError(
            f"{type(model).__name__} has {len(outer)} lists of {num_layers} layers ({', '.join(outer) or 'none'}), and "
            "split_transformer takes a model with one; use split_model"
        )
    return str(outer[0])


def _beside(model: nn.Module, series: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules beside the list of layers and beside those around it, with their names and whether they come before it."""
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
    """Return whether a module's output is added to the hidden states, and not computed from them."""
    return isinstance(module, nn.Embedding) or "position" in type(module).__name__.lower()


def _lists(outline: _Outline, stages: Stages) -> list[list[str]]:
    if isinstance(stages, int):
        stages = split_layers(len(outline.layers), stages)
    if not stages:
        raise ConfigurationError("stages=[]: give a number, or an entry for each stage")
    if all(not isinstance(one, int) for one in stages):
        return [listed(cast(Sequence[str], one)) for one in stages]
    counts = split_layers(len(outline.layers), len(stages), cast(Sequence[int], stages))
    lists = [outline.layers[start:end] for start, end in pairwise(accumulate(counts, initial=0))]
    lists[0][:0] = outline.before
    lists[-1] += outline.after
    return lists
