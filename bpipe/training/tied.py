"""Weights that several stages share, such as an embedding's that is also the output's: each of them stays one weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn

from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.dtensor import local
from bpipe.errors import AgreementError, ConfigurationError, StageError
from bpipe.model.state.checksums import own_checksum
from bpipe.training.gathered import Gathered, free
from bpipe.training.pipeline_ranks import Ranks
from bpipe.training.summed_copies import SummedWeight

__all__ = ["TiedWeights"]

ON_META = "on the meta device"
ABSENT, NO_GRADIENT, WITH_GRADIENT, SPARSE, SUMMED = range(5)


class _Looks(NamedTuple):
    """What weights look like on a rank, by name; None where it has none."""

    weights: Mapping[str, str | None]


class TiedWeights:
    """Weights that stages on several ranks share: each holder has a copy, and all copies stay equal to the bit.

    Make it once, when the parameters are final (on their device, sharded), then call `sum_grads` once before each of the
    optimizer's steps, on every rank: after `step`, or after the last one where several steps' gradients accumulate. Of a
    weight sharded over another mesh (FSDP2, tensor parallelism) each rank exchanges its shard. Stages on one rank share the
    parameter itself, and need none of this.

    The constructor communicates two all_gathers of some hundred bytes over the pipeline's group: collective, blocks the host.

    Args:
        weights: this rank's parameters by a name, which is the same on all ranks: the one that the weight has first in the
            original model. None where this rank has no copy.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.

    Raises:
        AgreementError: the ranks give different names, or copies of different shapes, dtypes or shardings; raised on all of them.
        ConfigurationError: a parameter is on the meta device, or the group is a `Loopback`'s.

    Attributes:
        weights: by name, those that this rank has.
        copies: those of them that a rank before this one has too, and counts: what `clip_grad_norm_(copies=...)` takes.

    Example:
        >>> head = nn.Linear(8, 100, bias=False)
        >>> tied = TiedWeights({"embedding.weight": head.weight})
        >>> tied.broadcast()
        >>> tied.copies
        []
    """

    def __init__(self, weights: Mapping[str, nn.Parameter | None], *, group: Any = None) -> None:
        self._ranks = Ranks(group, "let the modules share one parameter: autograd adds its gradients up")
        gathered = Gathered()
        given = {name: weight if weight is None else gathered.sharded(weight) for name, weight in sorted(weights.items())}
        self.weights = {name: weight for name, weight in given.items() if weight is not None}
        own = encode(_Looks({name: None if weight is None else _looks(weight) for name, weight in given.items()}))
        reports = [decode(_Looks, data, "description of weights", inf).weights for data in self._ranks.gather_bytes(own)]
        _check_alike(reports)
        holders = {name: [rank for rank, names in enumerate(reports) if names[name] is not None] for name in given}
        self._holders = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        numbers, own_rank = self._ranks.global_ranks, self._ranks.rank
        self._summed = {
            name: SummedWeight(name, self.weights[name], counted_by=numbers[first], is_copy=first != own_rank)
            for name, (first, *_) in self._holders.items()
            if name in self.weights
        }
        self.copies = [self.weights[name] for name, one in self._summed.items() if one.is_copy]

    def __repr__(self) -> str:
        shared = [f"{name} on ranks {', '.join(map(str, ranks))}" for name, ranks in vars(self).get("_holders", {}).items()]
        return f"TiedWeights({'; '.join(shared) or 'nothing that two ranks share'})"

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give all copies the value of the first holder's copy.

        Communicates, between the holders alone, the weight once to each of the others. Collective over them; blocks the host.
        """
        for name in self._summed:
            weight, (first, *others) = self.weights[name], self._holders[name]
            wire = local(weight).to(self._ranks.device).contiguous()
            if self._ranks.rank == first:
                self._ranks.send(wire, others)
            else:
                wire = torch.empty_like(wire)
                self._ranks.receive(wire, first)
                local(weight).copy_(wire)
                free(weight)

    @torch.no_grad()
    def sum_grads(self) -> None:
        """Replace each copy's gradient by the sum of all copies' gradients, with the same bits for all of them.

        Summed in the order of the ranks; of more than two, each number in the order of their sizes, so that it does not matter on
        which ranks they are, as with twins. A single process adds up microbatch by microbatch what its two uses of a weight give:
        the sums differ in the order of their additions alone, by some units in the last place.

        Call it once before each of the optimizer's steps, and set the gradients to None after it, as `zero_grad()` does: what a
        step adds to a sum would be summed with it again.

        Communicates one all_gather of 24 bytes a weight over the pipeline's group, and then, between the holders alone, the
        gradient, each to each. Collective over the pipeline; blocks the host; needs memory for one gradient a holder.

        Raises:
            StageError: copies have a different value than the first one, or a weight that is trained has no gradient anywhere,
                or a sparse one, or one that may have an earlier sum in it; raised on all ranks of the group.
        """
        if not self._holders:
            return
        for name, kinds in zip(self._holders, self._agreed_kinds()):
            if name in self._summed and WITH_GRADIENT in kinds:
                self._sum(self.weights[name], self._holders[name])
                self._summed[name].remember_sum()

    def _agreed_kinds(self) -> list[list[int]]:
        """Return the kinds of gradient that each weight has on its holders. All ranks raise alike."""
        reports = torch.stack(self._ranks.gather(torch.tensor([self._described_here(name) for name in self._holders])))
        found: list[list[int]] = []
        for (name, holders), rows in zip(self._holders.items(), reports.unbind(1)):
            kinds, sums, trained = rows[holders].T.tolist()
            _check_gradients(name, holders, kinds, is_equal=len(set(sums)) == 1, is_trained=any(trained))
            found.append(kinds)
        return found

    def _described_here(self, name: str) -> tuple[int, int, int]:
        """Return the kind of gradient of this rank's copy, a sum of the copy's bits, and whether it is trained."""
        weight = self.weights.get(name)
        if weight is None:
            return ABSENT, 0, 0
        kind = SUMMED if self._summed[name].may_have_sum() else _kind(weight.grad)
        return kind, own_checksum(weight), int(weight.requires_grad)

    def _sum(self, weight: nn.Parameter, holders: Sequence[int]) -> None:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        own = local(weight.grad)
        first, *others = self._ranks.exchange(own.to(self._ranks.device).contiguous(), holders)
        if len(others) > 1:
            first, *others = torch.stack([first, *others]).sort(0).values
        total = first.clone()
        for part in others:
            total += part
        own.copy_(total)


def _check_gradients(name: str, holders: Sequence[int], kinds: Sequence[int], *, is_equal: bool, is_trained: bool) -> None:
    """Raise if the gradients of a weight's copies cannot be summed."""
    if not is_equal:
        raise StageError(
            f"the copies of {name!r} on ranks {holders} of the group have different values: call broadcast() before the first "
            "step, sum_grads() in each, clip by one norm, and give all of them the same optimizer and settings"
        )
    if SPARSE in kinds:
        raise StageError(f"the gradient of {name!r} is sparse on one of the ranks {holders}: use nn.Embedding(sparse=False)")
    if SUMMED in kinds:
        raise StageError(
            f"the gradient of {name!r} on one of the ranks {holders} is the sum that it was made before, or has it in it: call "
            "sum_grads() once before each of the optimizer's steps, after the last of the steps that accumulate, and "
            "zero_grad(set_to_none=True), its default, after it"
        )
    if is_trained and WITH_GRADIENT not in kinds:
        raise StageError(
            f"{name!r} has no gradient on any of its ranks {holders}: call sum_grads() between step() and zero_grad(), and "
            "make TiedWeights when the parameters are final, after FSDP or a meta-device initialisation has replaced them"
        )


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return NO_GRADIENT
    return SPARSE if gradient.is_sparse else WITH_GRADIENT


def _looks(weight: nn.Parameter) -> str:
    if weight.device.type == "meta":
        return ON_META
    placements = f" {weight.placements}" if hasattr(weight, "placements") else ""
    return f"{list(weight.shape)} {weight.dtype}{placements}, {list(local(weight).shape)} a rank"


def _check_alike(reports: Sequence[Mapping[str, str | None]]) -> None:
    if any(names.keys() != reports[0].keys() for names in reports):
        seen = ", ".join(f"rank {rank} {sorted(names)}" for rank, names in enumerate(reports))
        raise AgreementError(f"the ranks give different names: {seen}. Give the same on all, with None if a rank has no copy.")
    for name in reports[0]:
        looks = {rank: names[name] for rank, names in enumerate(reports) if names[name] is not None}
        if ON_META in looks.values():
            raise ConfigurationError(f"{name!r} is on the meta device: make TiedWeights when the parameters are initialised")
        if len(set(looks.values())) > 1:
            seen = "; ".join(f"rank {rank}: {look}" for rank, look in looks.items())
            raise AgreementError(f"the copies of {name!r} differ: {seen}. Tied weights have one shape, dtype and sharding.")
        if not looks:
            raise AgreementError(f"no rank has a copy of {name!r}: give the parameter on the ranks that hold it")
