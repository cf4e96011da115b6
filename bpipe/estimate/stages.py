"""A transformer cut into stages: the embedding on the first, the head on the last, and layers spread as evenly as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.errors import ConfigurationError
from bpipe.estimate.activations import embedding_bytes, head_bytes, layer_bytes, message_bytes, working_bytes
from bpipe.estimate.checks import check_count
from bpipe.estimate.execution import Execution
from bpipe.estimate.flops import head_flops, layer_flops, recomputed_flops
from bpipe.estimate.transformer import Transformer

__all__ = ["Stage", "hiding_bytes_per_s", "split_layers", "stages_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The costs of one stage: bytes and operations of one microbatch."""

    num_layers: int  # its layers
    num_parameters: int  # on all its tensor-parallel devices together
    forward_flops: int  # operations of F on all of these
    backward_flops: int  # operations of B, recomputation included
    saved_bytes: int  # what each device keeps from F to B
    working_bytes: int  # what each device makes again for one layer of B
    message_bytes: int  # what each device sends to the next stage


def split_layers(num_layers: int, num_stages: int, layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the layers of each stage: as given, or as even as possible, with one more on the first stages.

    Raises:
        ConfigurationError: they do not make up the model, or are fewer than the stages.

    Example:
        >>> split_layers(10, 4)
        (3, 3, 2, 2)
    """
    check_count("num_stages", num_stages)
    if layers is None:
        if num_layers < num_stages:
            raise ConfigurationError(f"{num_layers} layers do not fill {num_stages} stages: ask for fewer stages")
        return tuple(num_layers // num_stages + (x < num_layers % num_stages) for x in range(num_stages))
    for count in layers:
        check_count("layers", count, least=0)
    if len(layers) != num_stages or sum(layers) != num_layers:
        raise ConfigurationError(
            f"layers={tuple(layers)} are {sum(layers)} on {len(layers)} stages: give {num_stages} numbers that make {num_layers}"
        )
    return tuple(layers)


def stages_of(
    model: Transformer, execution: Execution, *, num_stages: int, microbatch_size: int, layers: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Cut a model into stages.

    Args:
        model: its dimensions.
        execution: how it is run.
        num_stages: p.
        microbatch_size: b, in sequences.
        layers: layers of each stage; default: as even as possible.

    Raises:
        ConfigurationError: the sizes do not fit together.
    """
    check_count("microbatch_size", microbatch_size)
    check_tensor_parallel(model, execution)
    counts = split_layers(model.num_layers, num_stages, layers)
    return tuple(_stage(model, execution, microbatch_size, counts, x) for x in range(num_stages))


def check_tensor_parallel(model: Transformer, execution: Execution) -> None:
    """Raise unless heads divide over the tensor-parallel devices, because copies of key and value heads are not modelled."""
    t = execution.tensor_parallel
    for count, what in ((model.num_heads, "heads"), (model.num_kv_heads or model.num_heads, "key and value heads")):
        if count % t:
            raise ConfigurationError(f"{count} {what} of {model.name} do not divide over tensor_parallel={t} devices")


def _stage(model: Transformer, execution: Execution, b: int, counts: Sequence[int], x: int) -> Stage:
    count, is_first, is_last = counts[x], x == 0, x == len(counts) - 1
    forward = count * layer_flops(model, b) + is_last * head_flops(model, b)
    return Stage(
        num_layers=count,
        num_parameters=_parameters(model, count, is_first=is_first, is_last=is_last),
        forward_flops=forward,
        backward_flops=2 * forward + count * recomputed_flops(model, execution, b),
        saved_bytes=count * layer_bytes(model, execution, b)
        + is_first * embedding_bytes(model, execution, b)
        + is_last * head_bytes(model, execution, b),
        working_bytes=min(count, 1) * working_bytes(model, execution, b),
        message_bytes=message_bytes(model, execution, b),
    )


def _parameters(model: Transformer, count: int, *, is_first: bool, is_last: bool) -> int:
    """Count a stage's parameters. A tied head away from the embedding is a copy, with its own gradients and optimizer states."""
    shares_matrix = model.is_tied and is_first
    head = model.norm_parameters + (0 if shares_matrix else model.head_parameters)
    return count * model.layer_parameters + is_first * model.embedding_parameters + is_last * head


def hiding_bytes_per_s(model: Transformer, execution: Execution, achieved_flops_per_s: float) -> float:
    """Compute the bytes per second and direction of each device that move a stage's microbatch while the stage runs one forward.

    Layers are alike, so this is what a layer keeps over the time of its forward. For GPT in 16 bits with sequence parallelism that
    is (34 or 34 + 5as/h) / (24 h (1 + s/6h)) x the operations per second that a device achieves, for any b, t and layer count.

    Example:
        >>> from bpipe.estimate.models import model_named
        >>> round(hiding_bytes_per_s(model_named("gpt3-96b"), Execution(tensor_parallel=4), 140e12) / 1e9)
        19
    """
    forward_s = layer_flops(model, 1) / (execution.tensor_parallel * achieved_flops_per_s)
    return layer_bytes(model, execution, 1) / forward_s
