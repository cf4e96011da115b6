"""Cut a whole model for the ranks of a group, where rank 0 measures its layers and chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn

from bpipe.api.loopback import LoopbackGroup, once
from bpipe.chooser.compare_plans import choose
from bpipe.chooser.layers_of import MeasuredLayers
from bpipe.chooser.plan_choice import Choice
from bpipe.chooser.question import ModelQuestion
from bpipe.comm.transport.process_group import rank_and_size
from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import AgreementError, ConfigurationError, format_error
from bpipe.estimate.layers import LayerCost
from bpipe.estimate.workload import Load
from bpipe.logs import RankLog
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import mapped
from bpipe.model.stage import PipelineStage
from bpipe.partition.measure import measure_layers
from bpipe.partition.model_split import split_model
from bpipe.partition.router_loss import plain
from bpipe.partition.split_check import DifferenceError, compare, is_repeatable
from bpipe.partition.traced import split_traced
from bpipe.partition.transformers import split_transformer, transformer_layers
from bpipe.training.pipeline_ranks import Ranks

__all__: list[str] = []

MOST_SIZES = 3  # of microbatches that are measured, unless the user names sizes
CUTS: dict[str, Callable[..., list[nn.Module]]] = {
    "chain": split_model,
    "transformer": partial(split_transformer, prove=False),  # which rank 0 has proven
}


class Chosen(NamedTuple):
    """What rank 0 has chosen, or why it could not."""

    way: str  # of CUTS, or "trace": the model is no chain of its layers
    choice: str  # as JSON
    refusal: str = ""


class Cut(NamedTuple):
    """This rank's stages of a model, and why it was cut like this."""

    stages: list[PipelineStage]
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A model before it is cut.

    Args:
        model: all of it, the same on all ranks.
        batch: positional arguments of a step, as in training.
        target: that `loss_fn` gets for it.
        loss_fn: counted with the last layer.
        layers: as `bpipe.measure_layers` takes them.
        microbatch_sizes: rows of a microbatch, to choose from; None: such as give p, 2p and 4p microbatches.
        device: of this rank's stages.
        group: the ranks.
    """

    model: nn.Module
    batch: tuple[Any, ...]
    target: Any
    loss_fn: Any
    layers: Sequence[str | Sequence[str]] | None
    microbatch_sizes: Sequence[int] | None
    device: torch.device
    group: Any

    def __post_init__(self) -> None:
        if self.loss_fn is None:
            raise ConfigurationError("a model is cut to be trained: give loss_fn=, which is measured with the last layer")

    @property
    def place(self) -> tuple[int, int]:
        """This rank of the group, and the number of ranks."""
        return rank_and_size(self.group)

    def cut(self, **question: Any) -> Cut:
        """Measure and choose on rank 0, and make this rank's stages. Collective.

        Args:
            question: arguments of `ModelQuestion` beside the layers, the ranks and the batch.

        Raises:
            ConfigurationError: the batch has no rows, or no size divides them; the model is on another kind of device than its
                stages will be; or what `measure_layers` refuses; or the model is no chain of its layers, and `split_traced`
                cannot cut it.
            BudgetError: on rank 0, nothing keeps the memory.
            AgreementError: on the others, rank 0 failed.
        """
        rank, p = self.place
        chosen = self._from_first(rank, p, question)
        choice = Choice.from_json(chosen.choice)
        plan = choice.plan
        if rank == 0:
            numbers = " ".join(str(len(names)) for names in choice.stages)
            RankLog(0).info("auto: cut the model into stages of %s layers; by these alone, best is %s", numbers, choice.name)
        skips: dict[str, Any] = {}
        if chosen.way in CUTS:
            parts = CUTS[chosen.way](self.model, choice.stages)
        else:
            parts, skips = split_traced(self.model, choice.stages, self._example(choice.microbatch_size), prove=False)
        stages = [
            PipelineStage(parts[stage].to(self.device), stage, plan.num_stages, self.device, self.group, skips=skips)
            for stage in plan.stages_of(rank)
        ]
        return Cut(stages, choice)

    def _from_first(self, rank: int, num_ranks: int, question: dict[str, Any]) -> Chosen:
        """Return what rank 0 has chosen; raise on all ranks if it failed."""
        group = self.group
        if isinstance(group, LoopbackGroup):
            shapes = [(one.shape, one.dtype) for one in tensors_in((self.batch, self.target))]
            asked = ("whole model", self.model, self.loss_fn, self.layers, self.microbatch_sizes, shapes, question)
            found: Chosen = once(group.loopback, asked, lambda: self._chosen(num_ranks, question))
            return found
        failure: Exception | None = None
        chosen = Chosen("", "")
        if rank == 0:
            try:
                chosen = self._chosen(num_ranks, question)
            except Exception as error:
                failure, chosen = error, Chosen("", "", format_error(error))
        chosen = decode(Chosen, Ranks(group, "").gather_bytes(encode(chosen))[0], "cut", inf)
        if failure is not None:
            raise failure
        if chosen.refusal:
            raise AgreementError(f"rank 0 cannot choose how to cut the model: {chosen.refusal}")
        return chosen

    def _chosen(self, num_ranks: int, question: dict[str, Any]) -> Chosen:
        rows = _rows(self.batch)
        if elsewhere := {one.device.type for one in self.model.parameters()} - {self.device.type}:
            raise ConfigurationError(
                f"the model is on {', '.join(sorted(elsewhere))}, and its stages will be on {self.device.type}, where layers take "
                "other times: move it there first on rank 0, or cut it by bpipe.choose_plan and bpipe.split_model"
            )
        sizes = self._sizes(rows, num_ranks)
        way, asked = self._way(num_ranks)
        loss_fn = self.loss_fn if way == "chain" else self._loss_of_logits
        layers = {size: self._measured(self.model, size, asked, loss_fn) for size in sizes}
        choice = self._best(layers, num_ranks, rows, question)
        example = self._example(choice.microbatch_size)
        found = self._difference(CUTS[way](self.model, choice.stages), example)
        if found is None:
            return Chosen(way, choice.to_json())
        if way == "transformer":
            raise ConfigurationError(
                f"its stages, as split_transformer cuts them, do something else with the batch: {found}. Give auto input_ids, and "
                "give step what else the model takes, by name"
            )
        names = [one.names for one in layers[sizes[0]]]
        try:
            parts = split_traced(self.model, names, example)
            traced = {size: self._measured(parts, size, names, self.loss_fn) for size in sizes}
            choice = self._best(traced, num_ranks, rows, question)
            split_traced(self.model, choice.stages, self._example(choice.microbatch_size))
        except ConfigurationError as error:
            raise ConfigurationError(f"it is no chain of its layers ({found}), and no trace cuts it: {error}") from error
        return Chosen("trace", choice.to_json())

    def _way(self, num_stages: int) -> tuple[str, Sequence[str | Sequence[str]] | None]:
        """Return how the model is cut, and the layers between which: as one of Transformers where `split_transformer` proves it."""
        try:
            layers = transformer_layers(self.model)
        except ConfigurationError:
            return "chain", self.layers
        try:
            split_transformer(self.model, num_stages)
        except ConfigurationError as error:
            if self.layers is None:
                raise
            RankLog(0).info("auto: not cut as a model of Transformers: %s", error)
            return "chain", self.layers
        return "transformer", layers if self.layers is None else self.layers

    def _loss_of_logits(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole model's output, of which the last stage returns a tensor."""
        loss: torch.Tensor = self.loss_fn(plain(self.model, output), target)
        return loss

    def _difference(self, parts: Sequence[nn.Module], example: tuple[Any, ...]) -> DifferenceError | None:
        """Return what stages do otherwise than the model; None if nothing shows it, or if the model differs from itself, too."""
        try:
            compare(self.model, parts, example, {})
            return None
        except DifferenceError as error:
            found = error
        if isinstance(found.__cause__, torch.OutOfMemoryError):
            return None
        return found if found.__cause__ is not None or is_repeatable(self.model, example) else None

    def _measured(self, model: Any, size: int, names: Sequence[str | Sequence[str]] | None, loss_fn: Any) -> tuple[LayerCost, ...]:
        example, target = self._example(size), _first_rows(self.target, _rows(self.batch), size)
        return measure_layers(model, example, layers=names, loss_fn=loss_fn, target=target, repeats=3)

    def _best(self, layers: dict[int, tuple[LayerCost, ...]], num_ranks: int, rows: int, question: dict[str, Any]) -> Choice:
        model = MeasuredLayers(of_load={Load(size): costs for size, costs in layers.items()})
        asked = ModelQuestion(model=model, loads=tuple(model.of_load), num_ranks=num_ranks, batch=rows, **question)
        return choose(asked, effort=0)

    def _example(self, size: int) -> tuple[Any, ...]:
        """Return a microbatch of so many rows."""
        return tuple(_first_rows(self.batch, _rows(self.batch), size))

    def _sizes(self, rows: int, num_ranks: int) -> list[int]:
        if self.microbatch_sizes is not None:
            if wrong := [size for size in self.microbatch_sizes if size < 1 or rows % size]:
                raise ConfigurationError(f"microbatch_sizes: {wrong} do not divide a batch of {rows} rows")
            return sorted(set(self.microbatch_sizes))
        sizes = [rows // (num_ranks << more) for more in range(MOST_SIZES) if rows % (num_ranks << more) == 0]
        if not sizes:
            raise ConfigurationError(
                f"a batch of {rows} rows does not divide into {num_ranks} microbatches, as many as ranks, or more: give one that "
                "does, or microbatch_sizes="
            )
        return sizes


def _rows(batch: Any) -> int:
    rows = {leaf.shape[0] for leaf in tensors_in(batch) if leaf.dim()}
    if len(rows) != 1:
        raise ConfigurationError(
            "batch: for a model, give a batch of training, tensors with the same number of rows; these have "
            f"{sorted(rows) or 'none'}"
        )
    return int(rows.pop())


def _first_rows(values: Any, rows: int, size: int) -> Any:
    """Return the first microbatch: of each tensor with the batch's rows, the first of them."""
    return mapped(lambda one: one[:size] if one.dim() and one.shape[0] == rows else one, values)
