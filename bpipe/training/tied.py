"""A weight of several stages, such as that of an embedding which is the output's too: it stays one weight."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bpipe.errors import AgreementError, ConfigurationError, StageError
from bpipe.training.group import Ranks
from bpipe.training.tensors import checksum, local

__all__ = ["TiedWeights"]

ON_META = "on the meta device"
NO_GRADIENT, WITH_GRADIENT, SPARSE, SUMMED = range(4)


class TiedWeights:
    """Weights that stages on several ranks share: each holder has a copy, and all copies stay equal to the bit.

    Make it once, when the parameters are final (on their device, sharded), then call `sum_grads` once before each of the
    optimizer's steps, on every rank: after `step`, or after the last one where several steps' gradients accumulate. Of a
    weight sharded over another mesh (FSDP2, tensor parallelism) each rank exchanges its shard. Stages on one rank share the
    parameter itself, and need nothing of this.

    The constructor communicates two all_gathers of some hundred bytes over the pipeline's group: collective, blocks the host.

    Args:
        weights: this rank's parameters by a name, which is the same on all ranks: the one that the weight has first in the
            original model. None where this rank has no copy.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.

    Raises:
        AgreementError: the ranks give other names, or copies of other shapes, dtypes or shardings; raised on all of them.
        ConfigurationError: a parameter is on the meta device, or it is a `Loopback`'s group.

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
        self.weights = {name: weight for name, weight in sorted(weights.items()) if weight is not None}
        told = [json.loads(data) for data in self._ranks.gather_bytes(_described(weights))]
        _check_alike(told)
        self._summed: dict[str, tuple[Any, int]] = {}
        self._holders = {name: [rank for rank, names in enumerate(told) if names[name] is not None] for name in self.weights}
        self.copies = [weight for name, weight in self.weights.items() if self._holders[name][0] != self._ranks.rank]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give all copies the value of the first holder's.

        Communicates, between the holders alone, the weight once to each of the others. Collective over them; blocks the host.
        """
        for name, weight in self.weights.items():
            first, *others = self._holders[name]
            wire = local(weight).to(self._ranks.device).contiguous()
            if self._ranks.rank == first:
                self._ranks.send(wire, others)
            else:
                wire = torch.empty_like(wire)
                self._ranks.receive(wire, first)
                local(weight).copy_(wire)

    @torch.no_grad()
    def sum_grads(self) -> None:
        """Replace each copy's gradient by the sum of all copies', the same bits for all of them.

        Summed in the order of the ranks. A single process adds up microbatch by microbatch what its two uses of a weight give:
        the sums differ in the order of their additions alone, by some units in the last place.

        Call it once before each of the optimizer's steps: what a step adds to a sum would be summed with it again.

        Communicates, between the holders alone, 24 bytes and then the gradient, each to each. Collective over them; blocks
        the host; needs memory for one gradient a holder.

        Raises:
            StageError: copies have another value than the first one, or a weight that is trained has no gradient anywhere,
                or a sparse one, or one that nothing was added to since it was summed; raised on all its holders.
        """
        for name, weight in self.weights.items():
            if len(self._holders[name]) > 1 and self._check(name, weight):
                self._sum(weight, self._holders[name])
                self._summed[name] = weakref.ref(weight.grad), local(weight.grad)._version

    def _check(self, name: str, weight: nn.Parameter) -> bool:
        """Whether there is something to sum: what the holders agree on, or raise alike."""
        holders = self._holders[name]
        told = [SUMMED if self._is_summed(name, weight) else _kind(weight.grad), checksum(weight), int(weight.requires_grad)]
        mine = torch.tensor(told, device=self._ranks.device)
        kinds, sums, trained = torch.stack(self._ranks.exchange(mine, holders)).T.tolist()
        if len(set(sums)) > 1:
            raise StageError(
                f"the copies of {name!r} on ranks {holders} of the group have other values: call broadcast() before the first "
                "step, sum_grads() in each, clip by one norm, and give all of them the same optimizer and settings"
            )
        if SPARSE in kinds:
            raise StageError(f"the gradient of {name!r} is sparse on one of the ranks {holders}: use nn.Embedding(sparse=False)")
        if SUMMED in kinds:
            raise StageError(
                f"the gradient of {name!r} on one of the ranks {holders} is the sum that it was made before: call sum_grads() once "
                "before each of the optimizer's steps, and zero_grad() after it"
            )
        if any(trained) and WITH_GRADIENT not in kinds:
            raise StageError(
                f"{name!r} has no gradient on any of its ranks {holders}: call sum_grads() between step() and zero_grad(), and "
                "make TiedWeights when the parameters are final, after FSDP or a meta-device initialisation has replaced them"
            )
        return WITH_GRADIENT in kinds

    def _is_summed(self, name: str, weight: nn.Parameter) -> bool:
        """Whether nothing has changed the gradient since it was summed."""
        of, version = self._summed.get(name, (lambda: None, 0))
        return weight.grad is not None and of() is weight.grad and local(weight.grad)._version == version

    def _sum(self, weight: nn.Parameter, holders: Sequence[int]) -> None:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        own = local(weight.grad)
        first, *others = self._ranks.exchange(own.to(self._ranks.device).contiguous(), holders)
        total = first.clone()
        for part in others:
            total += part
        own.copy_(total)


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return NO_GRADIENT
    return SPARSE if gradient.is_sparse else WITH_GRADIENT


def _described(weights: Mapping[str, nn.Parameter | None]) -> bytes:
    return json.dumps({name: None if weight is None else _looks(weight) for name, weight in weights.items()}).encode()


def _looks(weight: nn.Parameter) -> str:
    if weight.device.type == "meta":
        return ON_META
    placements = f" {weight.placements}" if hasattr(weight, "placements") else ""
    return f"{list(weight.shape)} {weight.dtype}{placements}, {list(local(weight).shape)} a rank"


def _check_alike(told: Sequence[Mapping[str, str | None]]) -> None:
    if any(names.keys() != told[0].keys() for names in told):
        seen = ", ".join(f"rank {rank} {sorted(names)}" for rank, names in enumerate(told))
        raise AgreementError(f"the ranks give other names: {seen}. Give the same ones on all, with None where a rank has no copy.")
    for name in told[0]:
        looks = {rank: names[name] for rank, names in enumerate(told) if names[name] is not None}
        if ON_META in looks.values():
            raise ConfigurationError(f"{name!r} is on the meta device: make TiedWeights when the parameters are initialised")
        if len(set(looks.values())) > 1:
            seen = "; ".join(f"rank {rank}: {look}" for rank, look in looks.items())
            raise AgreementError(f"the copies of {name!r} differ: {seen}. Tied weights have one shape, dtype and sharding.")
        if not looks:
            raise AgreementError(f"no rank has a copy of {name!r}: give the parameter on the ranks that hold it")
