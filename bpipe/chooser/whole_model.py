"""Cut a whole model for the ranks of a group, where rank 0 measures its layers and chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from bpipe.api.loopback import LoopbackGroup, once
from bpipe.chooser.compare_plans import choose
from bpipe.chooser.layers_of import MeasuredLayers
from bpipe.chooser.plan_choice import Choice
from bpipe.chooser.question import ModelQuestion
from bpipe.comm.transport.process_group import rank_and_size
from bpipe.comm.wire.codec import decode_text
from bpipe.errors import AgreementError, ConfigurationError, format_error
from bpipe.estimate.workload import Load
from bpipe.logs import RankLog
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import mapped
from bpipe.model.stage import PipelineStage
from bpipe.partition.measure import measure_layers
from bpipe.partition.model_split import split_model
from bpipe.training.pipeline_ranks import Ranks

__all__: list[str] = []

MOST_SIZES = 3  # of microbatches that are measured, unless the user names sizes


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
                stages will be; or what `measure_layers` refuses.
            BudgetError: on rank 0, nothing keeps the memory.
            AgreementError: on the others, rank 0 failed.
        """
        rank, p = self.place
        choice = Choice.from_json(self._from_first(rank, p, question))
        plan = choice.plan
        if rank == 0:
            numbers = " ".join(str(len(names)) for names in choice.stages)
            RankLog(0).info("auto: cut the model into stages of %s layers; by these alone, best is %s", numbers, choice.name)
        parts = split_model(self.model, choice.stages)
        stages = [
            PipelineStage(parts[stage].to(self.device), stage, plan.num_stages, self.device, self.group)
            for stage in plan.stages_of(rank)
        ]
        return Cut(stages, choice)

    def _from_first(self, rank: int, num_ranks: int, question: dict[str, Any]) -> str:
        """Return the choice of rank 0, as JSON; raise on all ranks if it failed."""
        group = self.group
        if isinstance(group, LoopbackGroup):
            shapes = [(one.shape, one.dtype) for one in tensors_in((self.batch, self.target))]
            asked = ("whole model", self.model, self.loss_fn, self.layers, self.microbatch_sizes, shapes, question)
            return str(once(group.loopback, asked, lambda: self._chosen(num_ranks, question)))
        failure: Exception | None = None
        text = ""
        if rank == 0:
            try:
                text = "+" + self._chosen(num_ranks, question)
            except Exception as error:
                failure, text = error, f"-{format_error(error)}"
        text = decode_text(Ranks(group, "").gather_bytes(text.encode())[0])
        if failure is not None:
            raise failure
        if text[:1] != "+":
            raise AgreementError(f"rank 0 cannot choose how to cut the model: {text[1:]}")
        return text[1:]

    def _chosen(self, num_ranks: int, question: dict[str, Any]) -> str:
        rows = _rows(self.batch)
        if elsewhere := {one.device.type for one in self.model.parameters()} - {self.device.type}:
            raise ConfigurationError(
                f"the model is on {', '.join(sorted(elsewhere))}, and its stages will be on {self.device.type}, where layers take "
                "other times: move it there first on rank 0, or cut it by bpipe.choose_plan and bpipe.split_model"
            )
        of_load = {
            Load(size): measure_layers(
                self.model,
                _first_rows(self.batch, rows, size),
                layers=self.layers,
                loss_fn=self.loss_fn,
                target=_first_rows(self.target, rows, size),
                repeats=3,
            )
            for size in self._sizes(rows, num_ranks)
        }
        model = MeasuredLayers(of_load=of_load)
        asked = ModelQuestion(model=model, loads=tuple(of_load), num_ranks=num_ranks, batch=rows, **question)
        return choose(asked, effort=0).to_json()

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
