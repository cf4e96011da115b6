"""Examples of a stage's inputs and outputs that a user gave to `PipelineStage`, compared with the first real microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bpipe.errors import ConfigurationError, StageError

__all__: list[str] = []

Hint = torch.Tensor | Sequence[torch.Tensor | None] | None
COMPARED = ("input_args", "output_args")
NAMES = (*COMPARED, "output_grads", "input_grads")  # in torch's order


class Form(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Hints:
    """The examples of one stage; they are compared once, and are false afterwards.

    Attributes:
        inputs: the forms of `input_args`, if it was given: a fake process group has no other source of them.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._forms = {name: _forms(given[name]) for name in COMPARED if given[name] is not None}
        self.inputs = self._forms.get("input_args")

    def __bool__(self) -> bool:
        return bool(self._forms)

    def check(self, stage: int, args: Any, output: Any) -> None:
        """Compare the examples with the first microbatch, and forget them.

        Raises:
            StageError: a shape or a dtype differs, or there are more or fewer tensors.
        """
        given, self._forms = self._forms, {}
        for name, value in zip(COMPARED, (args, output)):
            if name in given and (found := _forms(value)) != given[name]:
                raise StageError(
                    f"stage {stage}: {name} promised {_text(given[name])}, and the first microbatch has {_text(found)}: give "
                    f"{name} as one microbatch has it, or leave it out, because bpipe learns shapes from the first microbatch"
                )


def inputs_of(stage: Any) -> list[Form] | None:
    """Return the forms of the `input_args` that another library's stage was given; None if it has none."""
    metas = getattr(getattr(stage, "_user_meta", None), "inputs", None) or getattr(stage, "inputs_meta", None)
    return None if metas is None else [Form(tuple(one.shape), one.dtype) for one in metas]


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
