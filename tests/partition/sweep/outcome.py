"""What becomes of a class of Transformers: its stages are right, or it is refused at the split; anything else is a defect."""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bpipe.errors import ConfigurationError
from bpipe.partition.transformers import _outline, split_transformer
from tests.partition.sweep.classes import class_of, small, small_config, transformers

LIMIT_S = 60
ROWS, TOKENS = 3, 7
RIGHT, REFUSED, NOT_BUILT, WRONG = "right", "refused", "not built", "WRONG"


@dataclass(frozen=True)
class Outcome:
    """Of one class."""

    name: str
    kind: str
    why: str = ""


class _LateError(BaseException):
    """The class took too long."""


def outcomes(names: list[str]) -> list[Outcome]:
    """What becomes of each class, in a process that may be killed."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [outcome(name) for name in names]


def outcome(name: str) -> Outcome:
    """What becomes of a class."""
    try:
        with _limited():
            return _outcome(name)
    except _LateError:
        return Outcome(name, NOT_BUILT, f"takes more than {LIMIT_S} s")


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise _LateError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # of its own, however busy the machine is
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _outcome(name: str) -> Outcome:
    cls = class_of(name)
    try:
        model = small(cls)
    except Exception as error:
        return Outcome(name, NOT_BUILT, shortened(f"{type(error).__name__}: {error}"))
    try:
        parts = split_transformer(model, 2)
    except ConfigurationError as error:
        return Outcome(name, REFUSED, reason(str(error)))
    except Exception as error:
        return Outcome(name, WRONG, shortened(f"the split raises {type(error).__name__}: {error}"))
    return Outcome(name, WRONG, problem) if (problem := problem_of(model, parts, cls)) else Outcome(name, RIGHT)


def problem_of(model: nn.Module, parts: list[nn.Module], cls: Any) -> str:
    """What is the matter with stages that were given out, found without the code that has proven them."""
    finest = len(_outline(model).layers)
    for stages in (parts, split_transformer(model, finest, prove=False)):
        for kwargs in ({}, {"attention_mask": torch.tensor([[1] * TOKENS, [1] * 4 + [0] * 3, [1] * TOKENS])}):
            try:
                found = _differing(model.train(), stages, kwargs)
            except Exception as error:
                return shortened(f"a stage raises {type(error).__name__}: {error}")
            if found:
                return found
    with torch.device("meta"):
        whole = cls(small_config(cls))
    try:
        split_transformer(whole, 2)
    except ConfigurationError as error:
        return shortened(f"on the meta device: {error}")
    return ""


def _differing(model: nn.Module, parts: list[nn.Module], kwargs: dict[str, torch.Tensor]) -> str:
    """The output, or the parameters whose gradients are not equal to the bit."""
    text: Any = model.config
    ids = torch.randint(20, min(getattr(text.get_text_config(), "vocab_size", 60), 60), (ROWS, TOKENS))
    results = []
    for is_cut in (False, True):
        torch.manual_seed(1)
        for module in (model, *parts):
            module.train().zero_grad(set_to_none=True)
        value: Any = ids
        if is_cut:
            for part in parts:
                value = part(value, **kwargs)
        else:
            output = model(ids, return_dict=True, **kwargs)
            value = output["logits"] if "logits" in output else output[0]
        value.float().square().sum().backward()
        results.append((value.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    (expected, gradients), (found, others) = results
    if not torch.equal(expected, found):
        return f"outputs differ by {(expected - found).abs().max().item():.3g}"
    return ", ".join(name for name, gradient in gradients.items() if not _is_same(gradient, others[name]))


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


REASONS = (
    ("has an encoder and a decoder", "an encoder and a decoder"),
    ("takes no inputs_embeds", "its base model takes no inputs_embeds"),
    (r"has (\d+|\{.*\}) lists of", "no list of layers, or several"),
    (r"a last stage returns logits", "its head returns other things than logits"),
    (r"has the parameter (\S+):", "a parameter of the model itself: {}"),
    (r"no stage has (\S+ \(\w+\))", "a module beside its layers: {}"),
    (r"does not run on words: (.*?)\. If a small model", "does not run on words alone: {}"),
    (r"no small model of its kind can be built: (.*?)\. If a small model", "no small model can be built: {}"),
    (r"(stage \d) of \d cannot run: (.*?)\. Its forward", "{} would raise {}"),
    (r"the \d stages do not compute what the model computes", "outputs differ"),
    (r"gets another gradient", "gradients differ"),
)


def reason(message: str) -> str:
    """A refusal in a few words."""
    for pattern, text in REASONS:
        found = re.search(pattern, message.replace("\n", " "))
        if found is not None:
            return shortened(text.format(*found.groups()[-text.count("{}") :]) if "{}" in text else text)
    return shortened(message)


def shortened(text: str) -> str:
    """On one line, and safe in a table; without what differs from run to run."""
    line = re.sub(r"\s+", " ", re.sub(r" at 0x[0-9a-f]+", "", text).replace("|", "/")).strip()
    return line if len(line) <= 110 else f"{line[:107]}..."
