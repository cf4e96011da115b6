"""What becomes of a class of Transformers in slices: right, or refused by name; anything else is a defect."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import nn

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B
from bpipe.errors import BPipeError, ConfigurationError
from bpipe.partition.sliced import _leave_dropout_out, sliced_transformer
from tests.partition.sweep.classes import class_names, class_of, small_config, takes_hidden_states, transformers
from tests.partition.sweep.outcome import NOT_BUILT, REFUSED, RIGHT, WRONG, Outcome, _LateError, _limited, shortened

ROWS, POSITIONS, LENGTHS = 4, 15, [7, 5, 3]
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}


def causal_names() -> list[str]:
    """The classes that some `AutoModel` knows, that predict words and whose later stages could begin with hidden states."""
    named = [name for name in class_names() if re.search("ForCausalLM|LMHead|ForMaskedLM|ForConditionalGeneration|Decoder$", name)]
    return [name for name in named if (cls := class_of(name)) is not None and takes_hidden_states(cls)]


def in_slices(names: list[str]) -> list[Outcome]:
    """What becomes of each class, in a process that may be killed."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_in_time(name) for name in names]


def _in_time(name: str) -> Outcome:
    try:
        with _limited():
            return outcome(name)
    except _LateError:
        return Outcome(name, NOT_BUILT, "takes too long")


def outcome(name: str) -> Outcome:
    """What becomes of a class."""
    for dtype in LIMITS:
        torch.manual_seed(0)
        try:
            _leave_dropout_out(config := small_config(class_of(name)))
            model = class_of(name)(config).to(dtype).train()
        except Exception as error:
            return Outcome(name, NOT_BUILT, shortened(f"{type(error).__name__}: {error}"))
        try:
            parts = bpipe.split_transformer(model, 2)
        except ConfigurationError:
            return Outcome(name, NOT_BUILT, "refused by split_transformer")
        words = torch.randint(20, 60, (2, ROWS, POSITIONS), generator=torch.Generator().manual_seed(3))
        try:
            expected = _whole(model, parts, *words)
        except Exception:
            continue  # some layers know single precision only
        return _compared(name, model, parts, expected, words)
    return Outcome(name, NOT_BUILT, "does not run whole")


def _compared(name: str, model: nn.Module, parts: list[nn.Module], expected: Any, words: torch.Tensor) -> Outcome:
    try:
        stages = [sliced_transformer(part) for part in parts]
        found = _sliced(model, stages, *words)
    except BPipeError as error:
        text = str(error)
        is_named = isinstance(error, ConfigurationError) and "cannot take slices" in text
        return Outcome(name, REFUSED if is_named else WRONG, _reason(text))
    except Exception as error:
        return Outcome(name, WRONG, shortened(f"{type(error).__name__}: {error}"))
    furthest = max(_distance(one, found[path]) for path, one in expected.items())
    limit = LIMITS[next(model.parameters()).dtype]
    return Outcome(name, RIGHT) if furthest < limit else Outcome(name, WRONG, f"differs by {furthest:.2g}")


def _reason(text: str) -> str:
    """Return a refusal in a few words, without names of modules, which differ from class to class."""
    text = re.sub(r"^.*?cannot take slices: ", "", text).partition(". Train it")[0]
    text = re.sub(r"^in a small model of its kind, ", "", text)
    text = re.sub(r"^\w+ cannot take slices: ", "", text)
    text = re.sub(r"its \w+ attends", "its attention attends", re.sub(r"^\w+ looks ahead", "its attention looks ahead", text))
    text = re.sub(r"the rotary embeddings of \S+", "rotary embeddings", text)
    text = re.sub(r"of its layers, .*?\. Its attention", "its attention", text)
    text = re.sub(r"slices give \S+ another gradient", "slices give a parameter another gradient", text)
    return shortened(re.sub(r"^\S+ has layers besides", "it has layers besides", text))


def _loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def _whole(model: nn.Module, parts: list[nn.Module], words: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for value, labels in zip(words.chunk(2), target.chunk(2)):
        for part in parts:
            value = part(value)
        (_loss(value, labels) / 2).backward()
    return _gradients(model)


def _sliced(model: nn.Module, stages: list[nn.Module], words: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loopback = Loopback(2)
    schedules = [
        Seq1F1B(
            PipelineStage(stage, i, 2, "cpu", loopback.rank(i)),
            2,
            loss_fn=_loss,
            slices=3,
            options=bpipe.Options(slice_lengths=LENGTHS),
        )
        for i, stage in enumerate(stages)
    ]
    loopback.step(schedules, words, target=target)
    return _gradients(model)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    zero = torch.zeros(())
    return {name: zero if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    largest = float(one.abs().max())
    return float((one - other).abs().max()) / largest if largest > 1e-9 else float(other.abs().max())
