"""bpipe's schedules in torchtitan: a function for the `pipelining_fn` of a `ModelSpec`.

torchtitan itself is not imported here. `make test-trainers` runs its trainer with this function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

import torch
from torch import nn

from bpipe.api.balanced import Balanced
from bpipe.api.catalogue import BalancedOneFOneB
from bpipe.api.schedule import Schedule
from bpipe.chooser.automatic import auto as auto_schedule
from bpipe.errors import ConfigurationError
from bpipe.model.stage import PipelineStage
from bpipe.partition.model_split import split_model
from bpipe.schedules import Rule
from bpipe.schedules.registry import rule_named

__all__ = ["pipelining_fn"]

Pipeline = tuple[Schedule | Balanced, list[nn.Module], bool, bool]

FIRST = ("vision_encoder",)  # on the first stage, wherever it is registered


def pipelining_fn(
    schedule: type[Schedule] = BalancedOneFOneB,
    *,
    balanced: Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
    input_args: Any = None,
    **arguments: Any,
) -> Callable[..., Pipeline]:
    """Make the `pipelining_fn` of a torchtitan (0.3.0) `ModelSpec`.

    It cuts the model by `parallelism.module_fqns_per_model_part`, or as torchtitan does if that is not given, applies
    `parallelize_fn` to each part (tensor parallelism, checkpointing, compile, FSDP2), and runs them in the schedule. The model
    may be on the meta device; torchtitan initialises the parts afterwards. The rest of torchtitan's trainer, including validation
    and checkpoints, is used unchanged. `parallelism.pipeline_parallel_schedule` is ignored in favour of `schedule`.

    Args:
        schedule: a schedule class of `bpipe`.
        balanced: arguments of `bpipe.Balanced`, to balance the schedule in bytes; default: do not balance.
        auto: arguments of `bpipe.auto`, which chooses the plan for the stages that `schedule` places; default: run `schedule`.
            `replicas` may be a function that gets torchtitan's `parallel_dims` and returns the group.
        input_args: for a dry run with `comm.mode = "fake_backend"`, what a stage but the first gets in one microbatch, as for
            `PipelineStage`: such as `torch.empty(microbatch_size, seq_len, dim, dtype=torch.bfloat16, device="meta")`.
        arguments: of the schedule, further ones, such as `slices` and `options`.

    Returns:
        The function; it returns the schedule, this rank's parts, and whether these have the first and the last stage. It is
        collective over the pipeline's ranks if the schedule's construction is. It raises ConfigurationError if the model, the
        numbers of stages or the batch do not fit the schedule.

    Example:
        >>> import bpipe
        >>> options = bpipe.Options(timeout_s=60.0)
        >>> build = pipelining_fn(bpipe.Interleaved1F1B, options=options)  # replace(model_spec, pipelining_fn=build)
    """
    return _Pipelining(schedule, balanced, auto, input_args, arguments)


class _Pipelining:
    """The function that torchtitan calls to make a pipeline."""

    def __init__(
        self,
        schedule: type[Schedule],
        balanced: Mapping[str, Any] | None,
        auto: Mapping[str, Any] | None,
        input_args: Any,
        arguments: dict[str, Any],
    ) -> None:
        self._schedule, self._balanced, self._auto, self._arguments = schedule, balanced, auto, arguments
        self._input_args = input_args
        self._rule = rule_named(schedule.rule)
        if balanced is not None and auto is not None:
            raise ConfigurationError("balanced= keeps the schedule's order, and auto= chooses one: give one of them")
        if auto is not None and "options" in auto and "options" in arguments:
            raise ConfigurationError("options= stands in auto=, too: give all of them there, those of the schedule included")
        if self._rule.placement.directions > 1:
            raise ConfigurationError(
                f"{schedule.__name__} holds every stage twice, with the same weights, and torchtitan initialises each stage by "
                "itself: choose a schedule of one direction, such as ZBV"
            )

    def __call__(
        self,
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        device: torch.device,
        parallelize_fn: Callable[..., nn.Module],
        loss_fn: Callable[..., Any],
        model_config: Any = None,
        **others: Any,
    ) -> Pipeline:
        num_microbatches = _num_microbatches(training, parallelism)
        stages = self._stages(model, parallel_dims, parallelism, device)
        for stage in stages:
            configs = dict(parallel_dims=parallel_dims, training=training, parallelism=parallelism, **others)
            stage.submod = parallelize_fn(stage.submod, **configs)
        schedule = self._made(stages, num_microbatches, loss_fn, parallel_dims)
        parts = [stage.submod for stage in stages]
        return schedule, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def _made(
        self, stages: list[PipelineStage], num_microbatches: int, loss_fn: Callable[..., Any], parallel_dims: Any
    ) -> Schedule | Balanced:
        arguments = {"loss_fn": _scalar(loss_fn), "scale_grads": False, **self._arguments}
        if self._auto is not None:
            wishes = {"start": self._rule.name, **arguments, **self._auto}
            if callable(find := wishes.get("replicas")):
                wishes["replicas"] = find(parallel_dims)
            return auto_schedule(stages, num_microbatches, **wishes)
        made = self._schedule(stages, num_microbatches, **arguments)
        return made if self._balanced is None else Balanced(made, **self._balanced)

    def _stages(self, model: nn.Module, parallel_dims: Any, parallelism: Any, device: torch.device) -> list[PipelineStage]:
        """Cut the model, and return this rank's stages."""
        mesh = parallel_dims.get_mesh("pp")
        num_ranks, group = mesh.size(), mesh.get_group("pp")
        lists = parallelism.module_fqns_per_model_part
        if lists is None:
            lists = _names(model, parallelism, _num_stages(model, parallelism, self._rule, num_ranks))
        per_rank, left = divmod(len(lists), num_ranks)
        if left or not per_rank:
            raise ConfigurationError(f"{len(lists)} stages do not divide over {num_ranks} ranks: give each rank as many stages")
        parts = split_model(model, lists, missing="none")
        owners = self._rule.placement.stage_ranks(num_ranks, per_rank)
        get_mesh = _get_mesh(parallel_dims)
        examples = [None] + [self._input_args] * (len(lists) - 1)
        return [
            PipelineStage(part, index, len(lists), device, examples[index], group=group, get_mesh=get_mesh)
            for index, part in enumerate(parts)
            if owners[index] == mesh.get_local_rank()
        ]


def _num_stages(model: nn.Module, parallelism: Any, rule: Rule, num_ranks: int) -> int:
    """Return how many stages the schedule takes, or how many `pipeline_parallel_layers_per_stage` asks for."""
    per_stage: int | None = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is None:
        return num_ranks * rule.default_stages_per_rank
    return ceil(_num_weighed(model, parallelism) / per_stage)


def _num_weighed(model: nn.Module, parallelism: Any) -> int:
    """Count the layers, plus the layers that the modules before and after them count as."""
    less = parallelism.pipeline_parallel_first_stage_less_layers + parallelism.pipeline_parallel_last_stage_less_layers
    return int(len(_layers(model)) + less)


def _layers(model: nn.Module) -> list[str]:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, (nn.ModuleDict, nn.ModuleList)):
        raise ConfigurationError(
            f"{type(model).__name__} has no `layers` to cut at: name each stage's modules in parallelism.module_fqns_per_model_part"
        )
    return [f"layers.{entry}" for entry in layers._modules]


def _names(model: nn.Module, parallelism: Any, num_stages: int) -> list[list[str]]:
    """Cut as torchtitan does: evenly, with one more layer on earlier stages, and fewer on the stages that hold other modules."""
    layers, less = _layers(model), [0] * num_stages
    less[0] += parallelism.pipeline_parallel_first_stage_less_layers
    less[-1] += parallelism.pipeline_parallel_last_stage_less_layers
    fewest, num_larger = divmod(_num_weighed(model, parallelism), num_stages)
    counts = [fewest + (index < num_larger) - less[index] for index in range(num_stages)]
    if min(counts) < 0 or min(counts[1:-1], default=1) < 1:
        raise ConfigurationError(
            f"{len(layers)} layers do not fill {num_stages} stages, whose ends count {less[0]} and {less[-1]} layers for their "
            "other modules: use fewer stages, or list each stage's modules in parallelism.module_fqns_per_model_part"
        )
    lists = [layers[start:end] for start, end in pairwise(accumulate(counts, initial=0))]
    children = [name for name, module in model._modules.items() if module is not None]
    before = [name for name in children if name in FIRST or children.index(name) < children.index("layers")]
    lists[0][:0] = before
    lists[-1] += [name for name in children if name != "layers" and name not in before]
    return lists


def _num_microbatches(training: Any, parallelism: Any) -> int:
    """Return m, from a rank's batch size and the microbatch size."""
    if getattr(parallelism, "pipeline_parallel_schedule_csv", None):
        raise ConfigurationError("bpipe does not read pipeline_parallel_schedule_csv, torch's format: use bpipe.FromPlan")
    batch, size = training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    if batch % size:
        raise ConfigurationError(f"local_batch_size={batch} does not divide by pipeline_parallel_microbatch_size={size}")
    return int(batch // size)


def _scalar(loss_fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Wrap one of torchtitan's losses, which return a loss and metrics, so that it returns the loss alone."""

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        value: torch.Tensor = loss_fn(*args, **kwargs)[0]
        return value

    return loss


def _get_mesh(parallel_dims: Any) -> Callable[[tuple[str, ...], Any], Any]:
    """Return the function that a stage uses to find the mesh of DTensors that its neighbours send."""

    def get_mesh(names: tuple[str, ...], layout: Any) -> Any:
        mesh = parallel_dims.get_mesh(list(names))
        return None if layout is not None and mesh._layout != layout else mesh

    return get_mesh
