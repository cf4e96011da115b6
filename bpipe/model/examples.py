"""Examples of a stage's inputs and outputs that a user gave to `PipelineStage`, compared with the first real microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bpipe.errors import ConfigurationError, StageError

__all__: list[str] = []

Example = torch.Tensor | Sequence[torch.Tensor | None] | None
COMPARED = ("input_args", "output_args")
NAMES = (*COMPARED, "output_grads", "input_grads")  # in torch's order


class Form(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Examples(NamedTuple):
    """The examples of one stage, as the forms of their tensors; None if there is none."""

    inputs: list[Form] | None
    outputs: list[Form] | None

    def check(self, stage: int, args: Any, output: Any) -> None:
        """Compare the examples with a microbatch.

        Raises:
            StageError: a shape or a dtype differs, or there are more or fewer tensors.
        """
        for name, expected, value in zip(COMPARED, self, (args, output)):
            if expected is not None and (found := _forms(value)) != expected:
                raise StageError(
                    f"stage {stage}: {name} promised {_text(expected)}, and the first microbatch has {_text(found)}: give "
                    f"{name} as one microbatch has it, or leave it out, because bpipe learns shapes from the first microbatch"
                )


def examples_of(given: Mapping[str, Any]) -> Examples | None:
    """Return the examples that can be compared; None if there are none."""
    forms = [None if given[name] is None else _forms(given[name]) for name in COMPARED]
    return None if forms == [None, None] else Examples(*forms)


def is_example(name: str, value: Any) -> bool:
    """Return whether the value of one of `NAMES` is an example; if not, it stands for the group, given by position.

    Raises:
        ConfigurationError: it is neither.
    """
    if value is None or isinstance(value, torch.Tensor):
        return True
    is_sequence = isinstance(value, (tuple, list)) and not hasattr(value, "loopback")
    if is_sequence and all(one is None or isinstance(one, torch.Tensor) for one in value):
        return True
    if is_sequence or isinstance(value, (str, bytes, int, float, dict)) or callable(value):
        raise ConfigurationError(
            f"{name} must be a tensor or a tuple of tensors, as one microbatch has them, or None, got {type(value).__qualname__}: "
            "give group=, dw_builder= and get_mesh= by their names"
        )
    return False


def _forms(value: Any) -> list[Form]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [Form(tuple(one.shape), one.dtype) for one in values if isinstance(one, torch.Tensor)]


def _text(forms: Sequence[Form | None]) -> str:
    return f"({', '.join(map(str, forms))})" if forms else "no tensors"
