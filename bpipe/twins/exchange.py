"""Twins: two stages that hold the same weights and run different microbatches. Before a step they are compared.

Within the step they exchange their gradients, and add them up: `sums/gradient_sums.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.comm.health.agreement import RoomRecord, StepRecord
from bpipe.errors import AgreementError, ConfigurationError
from bpipe.flow.shape_arguments import directions_of
from bpipe.model.stage import ModuleSnapshot
from bpipe.model.state.checksums import checksum_of, own_checksum
from bpipe.model.ties import STATISTICS
from bpipe.parallel.fsdp import trained
from bpipe.parallel.replicas import gradient_bytes
from bpipe.plan.plan import Plan
from bpipe.torch_private.modules import OF_ALL, SEES_HOOKS, hooks_of
from bpipe.torch_private.owners_and_versions import hooks_on, version_of

__all__: list[str] = []

WRAPPERS = "torch.nn.parallel."  # DDP's settings name its rank's GPU; the module inside is looked at by itself


def weights_of(parts: Mapping[int, ModuleSnapshot], depth: int, *, with_values: bool) -> tuple[int, ...]:
    """Return a checksum for each stage, in ascending order, by which twins compare what they exchange.

    Args:
        depth: the number of stages in a direction.
        with_values: whether to count the weights' bits, for which the host waits, or only what they look like, and which stages
            of the rank share them.

    Raises:
        ConfigurationError: a lazy module has no weights yet.
    """
    found = {stage: trained(parts[stage].modules, parts[stage].parameters) for stage in sorted(parts)}
    sharing: dict[int, list[int]] = {}
    for stage, parameters in found.items():
        for parameter in parameters:
            sharing.setdefault(id(parameter), []).append(stage % depth)
    return tuple(_checksum(stage, parameters, sharing, with_values=with_values) for stage, parameters in found.items())


def _checksum(stage: int, parameters: Sequence[nn.Parameter], sharing: Mapping[int, list[int]], *, with_values: bool) -> int:
    total = len(parameters)
    for parameter in parameters:
        if is_lazy(parameter):
            raise ConfigurationError(
                f"stage {stage} has a lazy module, whose weights its twin cannot have yet: run it once, and load the same values "
                "into both, before the first step"
            )
        looks = f"{parameter.requires_grad} {parameter.dtype} {list(parameter.shape)} {sorted(sharing[id(parameter)])}"
        values = own_checksum(parameter) if with_values else 0
        total = (31 * (total + values) + crc32(looks.encode())) % 2**61
    return total


def kinds_of(parts: Mapping[int, ModuleSnapshot]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two checksums for each stage, in ascending order, by which twins compare what they compute.

    The first is of what decides it: classes, modes, settings of torch's own modules, functions that modules hold. The second is of
    what may decide it: settings of the user's classes, and hooks.
    """
    ordered = [parts[stage] for stage in sorted(parts)]
    kinds = [tuple(zip(*_kinds(one.modules))) for one in ordered]
    hooks = [[[*map(_function, its.values())] for one in part.parameters for its in hooks_on(one)] for part in ordered]
    return tuple(_sum(sure) for sure, _ in kinds), tuple(_sum([likely, on]) for (_, likely), on in zip(kinds, hooks))


def _sum(value: object) -> int:
    return crc32(repr(value).encode())


def _kinds(modules: Iterable[nn.Module]) -> Iterator[tuple[object, object]]:
    sums: dict[int, int] = {}  # of holders of settings, such as a configuration that all modules have
    for module in modules:
        sure, likely = _kind(module)
        own = {} if type(module).__module__.startswith(WRAPPERS) else vars(module)
        holders = {name: one for name, one in own.items() if name not in OF_ALL and _holds_settings(one)}
        for one in holders.values():
            if id(one) not in sums:
                settings = (one if isinstance(one, dict) else vars(one)).items()
                sums[id(one)] = _sum({name: value for name, value in settings if _is_plain(name) and _is_plain(value)})
        yield sure, (likely, {name: sums[id(one)] for name, one in holders.items()})


def _holds_settings(value: object) -> bool:
    """Return whether a value is a dict, or an object of a class of the user's."""
    is_users = hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in ("torch", "bpipe")
    return isinstance(value, dict) or (is_users and not callable(value))


def _kind(module: nn.Module) -> tuple[object, object]:
    cls, own = type(module), {name: value for name, value in vars(module).items() if name not in OF_ALL}
    functions = {name: _function(value) for name, value in own.items() if callable(value) and not isinstance(value, nn.Module)}
    settings = {name: value for name, value in own.items() if name not in functions and _is_plain(value)}
    hooks = [_function(hook) for its in hooks_of(module) for hook in its.values()] if SEES_HOOKS else []
    is_torchs = cls.__module__.startswith("torch.nn.")
    settings = {} if cls.__module__.startswith(WRAPPERS) else settings
    what = cls.__module__, cls.__qualname__, module.training, functions, settings if is_torchs else {}
    return what, ({} if is_torchs else settings, hooks)


def _function(value: Any) -> object:
    """Return what tells one function from another one in all processes: its name, its code, and what a partial one is given."""
    if isinstance(value, partial):
        return _function(value.func), [one for one in (*value.args, *value.keywords.items()) if _is_plain(one)]
    code = getattr(value, "__code__", None)
    compiled = None if code is None else (code.co_code.hex(), code.co_names, [one for one in code.co_consts if _is_plain(one)])
    named = value if hasattr(value, "__qualname__") else type(value)
    return getattr(named, "__module__", None), named.__qualname__, compiled


def _is_plain(value: object) -> bool:
    """Return whether a value looks the same in all processes if it is the same."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))


def _check_is_one(parts: Mapping[int, ModuleSnapshot], depth: int) -> None:
    """Raise a ConfigurationError if twins on one rank have weights of their own: no exchange would add up their gradients."""
    for stage in (one for one in parts if one + depth in parts):
        own, of_twin = (trained(one.modules, one.parameters) for one in (parts[stage], parts[stage + depth]))
        if {id(one) for one in own if one.requires_grad} != {id(one) for one in of_twin if one.requires_grad}:
            raise ConfigurationError(
                f"stages {stage} and {stage + depth} are twins on one rank, and have weights of their own, which nothing would "
                "keep equal: make both stages of the same module"
            )


def held_by(parts: Mapping[int, ModuleSnapshot]) -> int:
    """Return the bytes of the gradients of earlier steps, which a step sets aside."""
    return gradient_bytes(p for one in parts.values() for p in trained(one.modules, one.parameters) if p.requires_grad)


@dataclass(frozen=True, slots=True)
class TwinRecord(RoomRecord):
    """Checksums of each stage of a rank.

    Args:
        weights: of the stages' weights, in some steps with their values.
        kinds: of what decides what their modules compute.
        settings: of what else may decide it: the user's attributes, hooks, and in some steps tables.
        is_changed: whether a module has changed since the step before.
    """

    weights: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()
    settings: tuple[int, ...] = ()
    is_changed: bool = False
    is_by_stage = True

    @classmethod
    def check(cls, records: Sequence[StepRecord]) -> None:
        if found := _unlike(records, "kinds"):
            raise AgreementError(
                "stages {} and {} are twins, but their modules differ (on ranks {} and {}): give both the same classes and "
                "functions in the same order, with the same settings, as a rate of dropout, and the same mode, train() or "
                "eval()".format(*found)
            )
        if found := _unlike(records, "weights"):
            raise AgreementError(
                "stages {} and {} are twins, but their weights differ (on ranks {} and {}): give both the same parameters in the "
                "same order, freeze the same of them, and load the same values before the first step".format(*found)
            )

    @classmethod
    def doubts(cls, records: Sequence[StepRecord], depth: int) -> Iterator[str]:
        if found := _unlike(records, "settings"):
            yield (
                "stages {} and {} are twins, on ranks {} and {}, and have other attributes, buffers or hooks: if these change "
                "what a stage computes, the gradients are of two different models; give both the same".format(*found)
            )


def _unlike(records: Sequence[StepRecord], field: str) -> tuple[int, int, int, int] | None:
    """Return the first two stages that are twins and differ, and their ranks; None if there are none, or two ranks hold a stage."""
    given, depth = [getattr(one, field) for one in TwinRecord.of(records)], records[0].num_stages // 2
    sums = {stage: (one, rank) for rank, record in enumerate(records) for stage, one in zip(record.stages, given[rank])}
    is_clear = len(sums) == sum(len(record.stages) for record in records)  # whoever holds one by mistake has nothing to compare
    pairs = ((stage, stage + depth) for stage in sorted(sums) if is_clear and stage + depth in sums)
    return next(((a, b, sums[a][1], sums[b][1]) for a, b in pairs if sums[a][0] != sums[b][0]), None)


def _is_dense(buffer: torch.Tensor) -> bool:
    """Return whether a buffer's bits can be read as they are."""
    if is_lazy(buffer) or type(buffer) is not torch.Tensor:
        return False
    return buffer.layout is torch.strided and not (buffer.is_quantized or buffer.is_nested or buffer.is_meta)


class Comparison:
    """The records of one rank: with values in the first step, and in the one after a module of any rank has changed."""

    held_bytes = 0  # the most bytes of gradients of earlier steps that a step has set aside
    _makeups: Mapping[int, int] | None = None  # of each stage in the latest step

    def __init__(self) -> None:
        self._buffers = WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]]()  # as each module had them first

    def record(
        self, parts: Mapping[int, ModuleSnapshot], plan: Plan, latest: Sequence[StepRecord], *, is_training: bool
    ) -> TwinRecord:
        """Return the record of a step.

        Args:
            parts: of the rank's stages.
            plan: of the step.
            latest: the records of all ranks for the step before; empty before the first one.
            is_training: False for an evaluation, which sets no gradients aside.
        """
        if directions_of(plan.flow) == 1:
            return TwinRecord()
        if is_training:
            _check_is_one(parts, plan.depth)
            exchanged = {stage for stage, _ in plan.flow.exchanges}
            self.held_bytes = max(self.held_bytes, held_by({stage: one for stage, one in parts.items() if stage in exchanged}))
        makeups = {stage: one.makeup for stage, one in parts.items()}
        is_changed, self._makeups = self._makeups not in (None, makeups), makeups
        with_values = not latest or any(one.is_changed for one in TwinRecord.of(latest))
        kinds, settings = kinds_of(parts)
        tables = [self._tables(parts[stage].modules, with_values=with_values) for stage in sorted(parts)]
        settings = tuple(map(_sum, zip(settings, tables)))
        return TwinRecord(weights_of(parts, plan.depth, with_values=with_values), kinds, settings, is_changed)

    def _tables(self, modules: Iterable[nn.Module], *, with_values: bool) -> list[object]:
        """Return what the dense buffers are, such as masks and slopes, that have not changed since a module was seen first.

        Statistics of norms are each twin's own from the start, as a checkpoint of each may have them.
        """
        found: list[object] = []
        for module in modules:
            own = {} if STATISTICS in module._buffers else module._buffers
            buffers = {name: buffer for name, buffer in own.items() if buffer is not None and _is_dense(buffer)}
            now = {name: (id(buffer), 0 if buffer.is_inference() else version_of(buffer)) for name, buffer in buffers.items()}
            before = self._buffers.setdefault(module, now)
            same = [name for name in sorted(now) if with_values and before.get(name) == now[name]]
            sums = [checksum_of(buffers[name]) for name in same]
            found += [(name, one.outline, [*map(int, one.sums)]) for name, one in zip(same, sums)]
        return found
