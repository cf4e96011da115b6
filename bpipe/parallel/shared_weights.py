"""Weights that stages of several processes share: each rank says what it knows of its own, and all conclude what to add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.comm.health.agreement import RoomRecord, StepRecord
from bpipe.comm.wire.dtensor import local
from bpipe.errors import AgreementError, ConfigurationError
from bpipe.model.stage import ModuleSnapshot
from bpipe.model.state.checksums import own_checksum
from bpipe.model.ties import is_summed, tied_in
from bpipe.parallel.fsdp import trained
from bpipe.parallel.replicas import gradient_bytes

__all__: list[str] = []

StageName = tuple[int, str]  # a stage, and a name in its module


class SharedWeight(NamedTuple):
    """A weight of a stage that other stages have, too, as its rank describes it."""

    stage: int
    keys: tuple[str, ...]  # each stands for it on all stages that know this key
    name: str  # in the stage's module
    look: str  # its shape, dtype and sharding
    is_trained: bool
    is_summed: bool  # by `TiedWeights`
    values: int  # a checksum of its bits, in the first step


class AgreedWeight(NamedTuple):
    """A weight whose gradients stages of several ranks add up."""

    names: tuple[StageName, ...]  # these stages, and its name on each
    is_equal: bool  # whether its copies are equal

    @property
    def holders(self) -> tuple[int, ...]:
        """The stages."""
        return tuple(dict(self.names))


@dataclass(frozen=True, slots=True)
class SharedRecord(RoomRecord):
    """The weights of a rank's stages that other stages have, too."""

    weights: tuple[SharedWeight, ...] = ()
    is_by_stage = True

    @classmethod
    def check(cls, records: Sequence[StepRecord]) -> None:
        for rank, (record, own) in enumerate(zip(records, cls.of(records))):
            if unheld := [one for one in own.weights if one.stage not in record.stages]:
                raise AgreementError(
                    f"rank {rank} describes {unheld[0].name!r} of stage {unheld[0].stage}, and holds the stages {record.stages}"
                )
        unequal = [one for one in agree_on(records) if not one.is_equal]
        if unequal and not records[0].is_training:
            where = ", ".join(f"stage {stage} as {name!r}" for stage, name in unequal[0].names)
            raise AgreementError(
                f"the copies of a weight that stages share ({where}) have different values, of which an evaluation would use "
                "each: load the same values into all, or train first, as the first step() lets all begin as the first one"
            )


def agree_on(records: Sequence[StepRecord]) -> list[AgreedWeight]:
    """Return the weights that a step has to sum, given the records of all ranks; in the same order on all of them.

    Raises:
        AgreementError: stages have copies that look different, or of which some are frozen, or only some are in `TiedWeights`.
    """
    groups: list[tuple[set[str], list[SharedWeight]]] = []
    rank_of = {weight: rank for rank, one in enumerate(SharedRecord.of(records)) for weight in one.weights}
    for weight in sorted(rank_of):
        keys, members = {*weight.keys}, [weight]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys, members = keys | group[0], group[1] + members
        groups.append((keys, members))
    found = []
    for _, members in groups:
        members.sort()
        if len({rank_of[one] for one in members}) > 1 and not _is_left_alone(members):
            names = tuple((one.stage, one.name) for one in members)
            is_equal = len({one.values for one in members}) == 1
            found.append(AgreedWeight(names, is_equal))
    return sorted(found, key=lambda one: (one.holders, one.names))


def _is_left_alone(members: Sequence[SharedWeight]) -> bool:
    """Return whether nothing is to be summed: copies are frozen, or the user sums them."""
    frozen = {one.values for one in members if not one.is_trained}
    for what, values in (
        ("has other shapes, dtypes or shardings", {one.look for one in members}),
        ("is frozen on some of them", {one.is_trained for one in members}),
        ("has other values on some of them, and is frozen", frozen),
        ("is in bpipe.TiedWeights on some of them alone", {one.is_summed for one in members if one.is_trained}),
    ):
        if len(values) > 1:
            seen = "; ".join(f"stage {one.stage}: {one.name!r}, {one.look}" for one in members)
            raise AgreementError(
                f"a weight that stages share {what} ({seen}): give all of them the same weight, and train it in the same way"
            )
    return not members[0].is_trained or members[0].is_summed


class Shared(NamedTuple):
    """The weights of this rank whose gradients a step adds up with those of other ranks.

    Args:
        weights: for the stages that have some in common, these weights on this rank, in the same order on all of their ranks.
        unequal: those of them whose copies are not equal yet.
    """

    weights: Mapping[tuple[int, ...], Sequence[nn.Parameter]]
    unequal: frozenset[int]  # their identities

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The stages that have some in common, of all ranks."""
        return tuple(self.weights)


NOTHING = Shared({}, frozenset())


class SharedWeights:
    """The weights of one rank's stages that other stages have, too."""

    def __init__(self) -> None:
        self._makeups: dict[int, int] = {}
        self._known: dict[int, dict[str, list[str]]] = {}  # by stage, the names of its weights, and their keys
        self._own: dict[StageName, nn.Parameter] = {}
        self._agreed: tuple[Sequence[StepRecord], list[AgreedWeight]] = (), []  # the latest records, and what follows from them
        self._summed: list[nn.Parameter] = []  # those that the latest step has added up
        self.held_bytes = 0  # the most bytes of gradients of earlier steps that a step has set aside
        self.has_compared = False  # whether a step has begun with equal copies

    def record(self, parts: Mapping[int, ModuleSnapshot]) -> SharedRecord:
        """Return what this rank has to say of its weights before a step."""
        self.held_bytes = max(self.held_bytes, gradient_bytes(self._summed))
        self._own, found, of_key = {}, [], dict[str, nn.Parameter]()
        for stage, part in parts.items():
            if self._makeups.get(stage) != part.makeup:
                self._makeups[stage] = part.makeup
                self._known[stage] = _keys_of(part.modules[0], stage)
            for name, keys in self._known[stage].items():
                owner, _, entry = name.rpartition(".")
                [weight] = trained(part.modules, [getattr(part.modules[0].get_submodule(owner), entry)])
                self._own[stage, name] = weight
                if any(of_key.setdefault(key, weight) is not weight for key in keys):
                    raise ConfigurationError(
                        f"{name!r} of stage {stage} is one weight of several stages by the names that the model gives, and these "
                        "stages, in one process, have copies of it: let their modules have the same parameter"
                    )
                values = 0 if self.has_compared or is_lazy(weight) else own_checksum(weight)
                found.append(SharedWeight(stage, tuple(keys), name, _look(weight), weight.requires_grad, is_summed(weight), values))
        return SharedRecord(tuple(found))

    def agreed(self, records: Sequence[StepRecord]) -> Shared:
        """Return what this rank adds up, after all ranks have described their weights, and these fit together."""
        if records is not self._agreed[0]:
            self._agreed = records, agree_on(records)
        if not self._agreed[1]:
            return NOTHING
        weights: dict[tuple[int, ...], list[nn.Parameter]] = {}
        unequal = set()
        for agreed in self._agreed[1]:
            own = weights.setdefault(agreed.holders, [])
            here = next((self._own[place] for place in agreed.names if place in self._own), None)
            if here is not None:
                own.append(here)
                unequal |= set() if agreed.is_equal else {id(here)}
        self._summed = list(chain.from_iterable(weights.values()))
        return Shared(weights, frozenset(unequal))


def _keys_of(module: nn.Module, stage: int) -> dict[str, list[str]]:
    """Return the names of a stage's weights that other stages have, too, and what each is called by all of them."""
    keys: dict[str, list[str]] = {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for tied in tied_in(module, stage):
        keys.setdefault(names[id(tied.parameter)], []).append(tied.key)
    return keys


def _look(weight: nn.Parameter) -> str:
    if is_lazy(weight):
        return "lazy"
    placements = f" {weight.placements}" if hasattr(weight, "placements") else ""
    return f"{list(weight.shape)} {weight.dtype}{placements}, {list(local(weight).shape)} a rank"
