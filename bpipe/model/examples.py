"""Examples of a stage's inputs and outputs that a user gave to `PipelineStage`, compared with the first real microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bpipe.comm.wire.message import TensorMeta, meta_of
from bpipe.errors import ConfigurationError, StageError
from bpipe.torch_private.distributed import examples_of_stage

__all__: list[str] = []

Example = torch.Tensor | Sequence[torch.Tensor | None] | None
Examples = dict[str, list[TensorMeta]]  # by name: the shapes and dtypes of an example's tensors, which count as contiguous
COMPARED = ("input_args", "output_args")
NAMES = (*COMPARED, "output_grads", "input_grads")  # in torch's order


def examples_of(given: Mapping[str, Any]) -> Examples:
    """Return the examples that can be compared."""
    return {name: _metas(given[name]) for name in COMPARED if given[name] is not None}


def compare_examples(stage: Any, args: Sequence[Any], output: Any) -> None:
    """Compare the examples that a stage was given with the first microbatch, and forget them; a StageError says what differs."""
    examples, stage.examples = stage.examples, {}
    for name, value in zip(COMPARED, (args, output)):
        if name in examples and (found := _metas(value)) != examples[name]:
            raise StageError(
                f"stage {stage.stage_index}: {name} promised {_text(examples[name])}, and the first microbatch has {_text(found)}: "
                f"give {name} as one microbatch has it, or leave it out, because bpipe learns shapes from the first microbatch"
            )


def inputs_of(stage: Any) -> list[TensorMeta] | None:
    """Return what is known of the `input_args` that torch's stage was given; None if it has none."""
    examples = examples_of_stage(stage)
    return None if examples is None else list(map(_meta, examples))


def is_example(name: str, value: Any) -> bool:
    """Return whether the value of one of `NAMES` is an example; if not, it stands for the group, given by position."""
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


def _metas(value: Any) -> list[TensorMeta]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [_meta(one) for one in values if isinstance(one, torch.Tensor)]


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return meta_of(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), requires_grad=False)


def _text(metas: Sequence[TensorMeta]) -> str:
    return f"({', '.join(map(str, metas))})" if metas else "no tensors"
