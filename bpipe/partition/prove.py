"""Prove that a kind of Transformers model can be cut: a small model of the kind, cut the same way, computes the same as whole."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bpipe.errors import format_error
from bpipe.model.pytree import flattened
from bpipe.partition.shrink import shrunk, text_config
from bpipe.partition.split_check import DifferenceError, compare
from bpipe.torch_private.modules import hooks_of

__all__: list[str] = []

MOST_PARAMETERS = 2**24  # what is run twice, with gradients, on the CPU of each rank
ROWS, TOKENS, PADDED, MOST_WORDS = 2, 6, 2, 64
SEED = 12345
HOOKED = "capturing_hooks_installed"  # so ends the attribute of a model that transformers has hooked for its further outputs

Cut = Callable[[nn.Module], list[nn.Module]]


NO_MODEL = "no small model of its kind can be built"
DOES_NOT_RUN = "a small model of its kind does not run on words"


class NotProvenError(Exception):
    """There is no small model of the kind, or it does not run on words alone; the cause is its error."""


@contextmanager
def proving_nothing(why: str, *, is_needed: bool = True) -> Iterator[None]:
    """Raise a NotProvenError with a reason in place of any error but a DifferenceError; if it is not needed, suppress it."""
    try:
        yield
    except DifferenceError:
        raise
    except Exception as error:
        if is_needed:
            raise NotProvenError(f"{why}: {format_error(error)}") from error


def prove_cut(model: nn.Module, cut: Cut, cut_small: Cut) -> None:
    """Cut a small model of the same kind, whose stages must have its outputs and gradients, bit for bit.

    The small model is a copy of the model where that is small and has values, and otherwise one of a smaller configuration. Random
    values are added to its parameters, so that no weight hides behind a zero. It is in train mode, with its configured dropout.

    Args:
        cut: makes the stages of a copy of the model.
        cut_small: makes the stages of a model with other sizes and fewer layers.

    Raises:
        DifferenceError: they have others.
        NotProvenError: no small model could be made, or it does not run; the cause says why.
    """
    with on_cpu():
        with proving_nothing(NO_MODEL):
            whole = _copied(model)
            twin = filled(rebuilt(type(model), shrunk(model.config)) if whole is None else whole)
            parts = (cut_small if whole is None else cut)(twin)
        for sample, is_extra in _samples(twin):
            ids = sample.pop("input_ids")
            # The model may take extra arguments in another shape, or not at all.
            with proving_nothing(DOES_NOT_RUN, is_needed=not is_extra):
                compare(twin, parts, (ids,), sample, is_exact=True)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run on the CPU, from a fixed seed and without warnings, independent of the caller's device and random state."""
    with torch.device("cpu"), torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a small configuration lacks is nothing that a user should hear of
        torch.default_generator.manual_seed(SEED)  # and not those of GPUs
        yield


def filled(twin: nn.Module) -> nn.Module:
    """Return a small model that trains, with random values added to its parameters, so that no weight hides behind a zero."""
    twin.float().train()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_().add_(0.1 * torch.randn(parameter.shape))
    return twin


def _copied(model: nn.Module) -> nn.Module | None:
    """Copy a model to the CPU without users' hooks; return None if it is large, has no plain values or cannot be copied."""
    tensors = [*model.parameters(), *model.buffers()]
    is_plain = all(type(one) in (torch.Tensor, nn.Parameter) for one in tensors)  # neither sharded nor quantized
    if not is_plain or any(one.is_meta for one in tensors) or sum(one.numel() for one in tensors) > MOST_PARAMETERS:
        return None
    try:
        twin = copy.deepcopy(model).cpu()
        _make_plain(twin.config)
    except Exception:
        return None
    for module in twin.modules():
        for name in [name for name in vars(module) if name.endswith(HOOKED)]:
            delattr(module, name)
        for hooks in hooks_of(module):
            hooks.clear()
    return twin


def rebuilt(cls: Any, config: Any) -> nn.Module:
    """Build a model of a class with a small configuration; raise a ValueError if it is not small."""
    _make_plain(config)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in cls(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"bpipe knows to make it no smaller than {num_parameters} parameters")
    model: nn.Module = cls(config)
    return model


def _make_plain(config: Any) -> None:
    """Turn the cache off, as stages do, because some models mask differently with one, and choose attention that a CPU computes."""
    for one in (config, text_config(config)):
        if hasattr(one, "use_cache"):
            one.use_cache = False
    if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        config._attn_implementation = "eager"


def _samples(model: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Yield keyword arguments, and whether the model may refuse them: words; padding and a mask; positions; token types."""
    config: Any = model.config
    ids = random_words(config, TOKENS)
    yield {"input_ids": ids}, False
    named = inspect.signature(model.forward).parameters
    if "attention_mask" in named:
        mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
        mask[0, -PADDED:] = 0
        padding = getattr(text_config(config), "pad_token_id", None)
        padded = ids if padding is None else ids.masked_fill(mask == 0, padding)
        yield {"input_ids": padded, "attention_mask": mask}, False
    if "position_ids" in named:
        yield {"input_ids": ids, "position_ids": torch.arange(1, TOKENS + 1).flip(0).repeat(ROWS, 1)}, True
    if "token_type_ids" in named and getattr(config, "type_vocab_size", 1) > 1:
        yield {"input_ids": ids, "token_type_ids": torch.arange(TOKENS).remainder(2).repeat(ROWS, 1)}, True


def random_words(config: Any, length: int) -> torch.Tensor:
    """Return ids [ROWS, length] of words alone, without those that stand for something else, such as a picture."""
    text = text_config(config)
    named = [value for one in (config, text) for name, value in vars(one).items() if name.endswith(("_id", "_ids", "_index"))]
    special = set(flattened(named))
    words = [word for word in range(getattr(text, "vocab_size", MOST_WORDS)) if word not in special][-MOST_WORDS:]
    return torch.tensor((words * MOST_WORDS)[:MOST_WORDS])[torch.randint(MOST_WORDS, (ROWS, length))]
