"""A transformer by formulas: the embedding, its layers and the head, each with what it takes, and how layers make up stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bpipe.checks import check_count
from bpipe.errors import ConfigurationError
from bpipe.estimate.activations import embedding_bytes, head_bytes, layer_bytes, message_bytes
from bpipe.estimate.execution import Execution
from bpipe.estimate.flops import head_flops, layer_flops, recomputed_flops
from bpipe.estimate.layers import LayerCost
from bpipe.estimate.long_contexts import attention_share, halves
from bpipe.estimate.transformer import Transformer

__all__ = ["hiding_bytes_per_s", "layer_costs", "split_layers"]


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


def layer_costs(
    model: Transformer, execution: Execution, microbatch_size: int, *, flops_per_s: float, bytes_per_parameter: float
) -> tuple[LayerCost, ...]:
    """Return the embedding, the layers and the head of a model, each with what it takes on a device.

    A tied head is a copy, with its own gradients and optimizer states.

    Args:
        model: its dimensions.
        execution: how it is run.
        microbatch_size: b, in sequences.
        flops_per_s: what the devices that share a layer reach together.
        bytes_per_parameter: what stays for each.

    Raises:
        ConfigurationError: the sizes do not fit together.
    """
    check_count("microbatch_size", microbatch_size)
    _check_tensor_parallel(model, execution)
    b, per_device = microbatch_size, bytes_per_parameter / execution.tensor_parallel

    def cost(name: str, parameters: int, flops: int, saved_bytes: int, again: int = 0, attention: float = 0.0) -> LayerCost:
        input_, weight = halves(attention)
        input_flops = 2 * flops * input_ / (input_ + weight) + again  # what is recomputed comes before both halves
        return LayerCost(
            names=(name,),
            forward_s=flops / flops_per_s,
            backward_s=(2 * flops + again) / flops_per_s,
            input_s=input_flops / flops_per_s,
            saved_bytes=saved_bytes,
            output_bytes=0 if name == "head" else message_bytes(model, execution, b),
            static_bytes=round(parameters * per_device),
        )

    again, attention = recomputed_flops(model, execution, b), attention_share(model)
    layer = cost("layer", model.layer_parameters, layer_flops(model, b), layer_bytes(model, execution, b), again, attention)
    return (
        cost("embedding", model.embedding_parameters, 0, embedding_bytes(model, execution, b)),
        *(replace(layer, names=(f"layers.{index}",)) for index in range(model.num_layers)),
        cost("head", model.norm_parameters + model.head_parameters, head_flops(model, b), head_bytes(model, execution, b)),
    )


def _check_tensor_parallel(model: Transformer, execution: Execution) -> None:
    """Raise unless heads divide over the tensor-parallel devices, because copies of key and value heads are not modelled."""
    t = execution.tensor_parallel
    for count, what in ((model.num_heads, "heads"), (model.num_kv_heads or model.num_heads, "key and value heads")):
        if count % t:
            raise ConfigurationError(f"{count} {what} of {model.name} do not divide over tensor_parallel={t} devices")


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
