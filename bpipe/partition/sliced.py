"""Let stages of Hugging Face Transformers models take slices, once a small model of their kind has proven that it does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bpipe.errors import BPipeError, ConfigurationError, format_error
from bpipe.partition.prove import (
    DOES_NOT_RUN,
    NO_MODEL,
    NotProvenError,
    filled,
    on_cpu,
    proving_nothing,
    random_words,
    rebuilt,
)
from bpipe.partition.router_loss import ASKS, is_configured, plain
from bpipe.partition.shrink import parts_of, shrunk
from bpipe.partition.split_check import DifferenceError, gradients_of
from bpipe.partition.stage_class import CUT_FROM
from bpipe.partition.transformers import cut_finely
from bpipe.slices.hugging_face import in_slices

__all__ = ["sliced_transformer"]

LENGTHS, PADDED = (5, 4, 3), 3
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3}  # some layers compute in single precision whatever they are given
Results = tuple[torch.Tensor, dict[str, torch.Tensor | None]]  # outputs, and gradients by the parameter's name


def sliced_transformer(stage: nn.Module, *, prove: bool = True) -> nn.Module:
    """Return a module that runs a stage of a Transformers model on slices of a sequence.

    It takes and returns what the stage does, with the argument `past` and the state that `bpipe.slices` describes. Positions,
    rotary embeddings, padding masks and sliding windows are those of the whole sequence; give padding masks with `UpTo(1)`.

    It is proven before it is returned: a small model of the same class and configuration, without dropout, must have the outputs
    and the gradients of whole sequences in three slices, with and without padding. That happens on the CPU, takes less than a
    second, and does not run the stage itself. docs/transformers.md lists the classes that pass.

    Args:
        stage: what `split_transformer` returned, or a whole model of one stage. Its attention function is replaced, for good; in a
            forward without slices that is torch's scaled_dot_product_attention, as Transformers calls it.
        prove: False to skip the proof where no small model of the kind can be built: compare slices with whole sequences yourself.

    Raises:
        ConfigurationError: slices of such a model compute something else than whole sequences, or nothing proves that they do not.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from bpipe import split_transformer
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
        >>> stage = sliced_transformer(split_transformer(model, 2)[0])
        >>> output, state = stage(torch.zeros(1, 4, dtype=torch.long))
        >>> output.shape
        torch.Size([1, 4, 16])
    """
    if is_configured(getattr(stage, "config", None)):
        raise ConfigurationError(
            f"{type(stage).__name__} cannot take slices with {ASKS}, because the router's loss is of whole sequences: leave it out "
            "of the configuration, or train with whole sequences"
        )
    config = shrunk(stage.config) if prove and hasattr(stage, "config") else None  # before its attention is replaced
    sliced = in_slices(stage)
    if config is not None:
        _prove(type(stage), config)
    return sliced


def _prove(kind: Any, config: Any) -> None:
    """Raise unless a small model of a class computes in slices what it computes of whole sequences."""
    _leave_dropout_out(config)
    error: NotProvenError | None = None
    with on_cpu():
        for dtype, limit in LIMITS.items():
            try:
                return _compare_slices(kind, config, dtype, limit)
            except DifferenceError as found:
                raise ConfigurationError(
                    f"{kind.__name__} cannot take slices: {found}. Train it with whole sequences"
                ) from found.__cause__
            except NotProvenError as raised:  # perhaps not in this precision
                error = raised
    assert error is not None
    raise ConfigurationError(
        f"{kind.__name__}: that it takes slices cannot be proven, because {error}. If slices of your model compute what whole "
        "sequences do, outputs and gradients, pass prove=False"
    ) from error.__cause__


def _leave_dropout_out(config: Any) -> None:
    """Set the rates of dropout to 0, because slices draw other random numbers, which a step finds out by itself."""
    for part in parts_of(config):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def _compare_slices(kind: Any, config: Any, dtype: torch.dtype, limit: float) -> None:
    """Raise a DifferenceError if a small model computes something else in slices."""
    with proving_nothing(NO_MODEL):
        model = filled(rebuilt(getattr(kind, CUT_FROM, kind), config)).to(dtype)
        parts = cut_finely(model, 2) if hasattr(kind, CUT_FROM) else [model]
    samples, before = list(_samples(model)), torch.get_rng_state()
    with proving_nothing(DOES_NOT_RUN):
        expected = [_results(model, parts, [sample]) for sample in samples]
    if not torch.equal(torch.get_rng_state(), before):
        raise DifferenceError("it draws random numbers besides dropout, and slices would draw other ones than whole sequences")
    try:
        sliced = [in_slices(part) for part in parts]
        in_several = [_results(model, sliced, _cut(sample)) for sample in samples]
    except BPipeError as error:
        raise DifferenceError(f"in a small model of its kind, {str(error).partition(chr(10))[0]}") from error
    except Exception as error:
        raise DifferenceError(f"a small model of its kind raises {format_error(error)}") from error
    for sample, whole, found in zip(samples, expected, in_several):
        _compare(whole, found, sample.get("attention_mask"), limit)


def _samples(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield whole sequences: words alone, and, where the model takes a mask, padded behind and in front."""
    ids = random_words(model.config, sum(LENGTHS))
    yield {"input_ids": ids}
    if "attention_mask" in inspect.signature(model.forward).parameters or hasattr(type(model), CUT_FROM):
        for padded in (slice(-PADDED, None), slice(PADDED)):
            mask = torch.ones(ids.shape, dtype=torch.long)
            mask[0, padded] = 0
            yield {"input_ids": ids, "attention_mask": mask}


def _cut(sample: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Cut a whole sequence as a pipeline does: masks are given up to the end of each slice."""
    parts, end = [], 0
    for length in LENGTHS:
        part, end = {"input_ids": sample["input_ids"][:, end : end + length]}, end + length
        parts.append(part if "attention_mask" not in sample else {**part, "attention_mask": sample["attention_mask"][:, :end]})
    return parts


def _results(model: nn.Module, parts: Sequence[nn.Module], slices: Sequence[dict[str, torch.Tensor]]) -> Results:
    """Run stages on a sequence in slices, or on a whole one, and return outputs and gradients."""
    model.zero_grad(set_to_none=True)
    pasts: list[tuple[Any, ...]] = [() for _ in parts]
    outputs = []
    with torch.enable_grad():
        for one in slices:
            value = one["input_ids"]
            options = {name: given for name, given in one.items() if name != "input_ids"}
            for place, part in enumerate(parts):
                if len(slices) > 1:
                    value, state = part(value, past=pasts[place], **options)
                    pasts[place] += (state,)
                else:
                    value = part(value, **options)
                value = plain(part, value)
            outputs.append(value)
        output = torch.cat(outputs, 1)
        mask = slices[-1].get("attention_mask")
        gradients = gradients_of([output if mask is None else output[mask.bool()]], dict(model.named_parameters()))
    return output.detach(), gradients


def _compare(expected: Results, found: Results, mask: torch.Tensor | None, limit: float) -> None:
    """Raise a DifferenceError if slices differ from whole sequences, where there is no padding."""
    one, other = (output if mask is None else output[mask.bool()] for output, _ in (expected, found))
    kind, what = "in a small model of its kind", "padded sequences" if mask is not None else "sequences"
    if one.shape != other.shape or not _is_near(one, other, limit):
        raise DifferenceError(f"{kind}, the outputs of slices are not those of whole {what}")
    for name, gradient in expected[1].items():
        if not _is_near(gradient, found[1][name], limit):
            raise DifferenceError(f"{kind}, slices give {name} another gradient than whole {what} do")


def _is_near(one: torch.Tensor | None, other: torch.Tensor | None, limit: float) -> bool:
    if one is None or other is None:
        return not any(bool(tensor.any()) for tensor in (one, other) if tensor is not None)
    return not one.numel() or bool((one - other).abs().max() <= limit * max(float(one.abs().max()), 1e-6))
