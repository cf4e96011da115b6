"""Gradients that a backward has just put into `.grad`, which autograd may have taken over from one that is still to be used."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from bpipe.memory.storages import owners, storages_of
from bpipe.stage import Parts

__all__: list[str] = []


class NewGradients:
    """The parameters of a rank's stages that have no gradient yet.

    Autograd makes a first gradient `.grad` as it is, even a view of memory that others use too: of the gradient that is being
    sent to the stage before (`x + bias.unsqueeze(0)`), or waits for a weight half. What is added to `.grad` later would change it.
    """

    def __init__(self, stages: Mapping[int, Parts]) -> None:
        self._without: dict[int, list[nn.Parameter]] = {}
        for index, parts in stages.items():
            self._without[index] = [p for p in parts.parameters if p.requires_grad and p.grad is None]

    def separate(self, stage: int) -> None:
        """Give the gradients that a backward of a stage has made memory of their own."""
        without = self._without[stage]
        if not without:
            return
        for parameter in without:
            if parameter.grad is not None and any(owners(storage) > 1 for storage in storages_of(parameter.grad)):
                parameter.grad = parameter.grad.clone()
        self._without[stage] = [parameter for parameter in without if parameter.grad is None]
