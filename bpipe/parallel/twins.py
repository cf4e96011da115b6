"""Twins: two stages that hold the same weights and run different microbatches. They exchange their gradients, and add them up.

    0B6   REDUCE_GRAD: both twins post what they have      ...   WAIT_REDUCE_GRAD: .grad = .grad + the twin's
    8B7   REDUCE_GRAD                                      ...   WAIT_REDUCE_GRAD

Addition of two numbers has the same bits either way round, so both twins have the same gradients, and after the same optimizer step
the same weights. What was in `.grad` before the step is set aside meanwhile, because both twins have it already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire.dtensor import local
from bpipe.engine.traffic import Traffic
from bpipe.errors import ConfigurationError, StageError
from bpipe.model.stage import ModuleSnapshot
from bpipe.parallel.fsdp import trained
from bpipe.plan.plan import Plan
from bpipe.recomputation.checksums import own_checksum
from bpipe.schedules import Action, Channel, Purpose
from bpipe.torch_private.modules import OF_ALL, SEES_HOOKS, hooks_of
from bpipe.torch_private.owners_and_versions import hooks_on

__all__: list[str] = []

WRAPPERS = "torch.nn.parallel."  # DDP's settings name its rank's GPU; the module inside is looked at by itself
COPY = "_bpipe_copy"  # the attribute of a twin: whether another rank counts its gradient when gradients are clipped


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


def held_by(parts: Mapping[int, ModuleSnapshot]) -> int:
    """Return the bytes of the gradients of earlier steps, which a step sets aside."""
    parameters = {id(p): p for one in parts.values() for p in trained(one.modules, one.parameters) if p.requires_grad}
    return sum(local(p.grad).nbytes for p in parameters.values() if p.grad is not None)


class Twins:
    """The exchanges of one rank of a plan during one step."""

    def __init__(self, plan: Plan, rank: int, parts: Mapping[int, ModuleSnapshot], traffic: Traffic) -> None:
        self._traffic = traffic
        self._parameters: dict[int, list[nn.Parameter]] = {}  # by stage; one that stages of a rank share goes with the last of them
        seen: set[int] = set()
        for stage in (action.stage for action in reversed(plan.actions[rank]) if action.is_exchange):
            all_of_stage = trained(parts[stage].modules, parts[stage].parameters)
            self._parameters[stage] = [one for one in all_of_stage if one.requires_grad and id(one) not in seen]
            seen.update(map(id, self._parameters[stage]))
        self.exchanged_bytes: dict[int, int] = {}  # by stage: the copies that an exchange makes
        self._before: dict[int, torch.Tensor] = {}  # by parameter: its gradient from earlier steps
        self.held_bytes = 0  # of those gradients, which stay beside the ones of this step
        self._under_way: dict[int, tuple[list[torch.Tensor], list[torch.Tensor], list[Transfer]]] = {}  # sent and received
        self._depth = plan.depth

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Set aside the gradients of earlier steps; if the step fails, give those back to which nothing was added yet.

        What an exchange still sends or receives stays in `_under_way`: a device may not have come to it.
        """
        everything = [parameter for parameters in self._parameters.values() for parameter in parameters]
        for parameter in everything:
            if parameter.grad is not None:
                self._before[id(parameter)], parameter.grad = parameter.grad, None
        self.held_bytes = sum(local(gradient).nbytes for gradient in self._before.values())
        try:
            yield
        except BaseException:
            for parameter in everything:
                parameter.grad = self._before.pop(id(parameter), parameter.grad)
            raise

    @torch.no_grad()
    def _give_back(self, parameter: nn.Parameter) -> None:
        """Add what a step has made to the gradient of earlier steps, in the tensor of that."""
        before = self._before.pop(id(parameter), None)
        if before is not None:
            if parameter.grad is not None:
                before += parameter.grad
            parameter.grad = before

    @torch.no_grad()
    def start(self, action: Action) -> None:
        """Post this stage's gradients, and the receive of its twin's; nothing may change them until `complete`."""
        assert action.peer is not None
        parameters, rank, transport = self._parameters[action.stage], self._traffic.rank, self._traffic.transport
        has = [parameter.grad is not None for parameter in parameters]
        flags = torch.tensor([True, *has], dtype=torch.uint8, device=transport.device)  # never empty
        sent = [flags, *(dense_gradient(parameter, f"stage {action.stage}") for parameter in parameters)]
        received = [torch.empty_like(tensor) for tensor in sent]
        send = partial(transport.send, Channel(Purpose.TWIN, rank, action.peer), sent)
        receive = partial(transport.receive, Channel(Purpose.TWIN, action.peer, rank), received)
        # One rank sends first, the other receives first: a send on a device may end only with its receive.
        transfers = [post() for post in ((send, receive) if rank < action.peer else (receive, send))]
        # Zeros take the place of gradients that are still to come, and are counted among the static bytes.
        made = zip(sent[1:], has, parameters)
        copies = [copy for copy, is_there, parameter in made if is_there and not local(parameter.grad).is_contiguous()]
        self.exchanged_bytes[action.stage] = sum(one.nbytes for one in (*received, flags, *copies))
        self._under_way[action.stage] = sent, received, transfers

    @torch.no_grad()
    def complete(self, action: Action) -> None:
        """Wait for the twin's gradients, and add them."""
        sent, received, transfers = self._under_way[action.stage]
        for transfer in transfers:
            self._traffic.timed(action.op, transfer.wait)
        parameters = self._parameters[action.stage]
        is_whole = all(parameter.grad is not None for parameter in parameters)
        there = [True] * len(parameters) if is_whole else received[0][1:].tolist()  # the host waits only for what it does not know
        for parameter, twin_has, made, gradient in zip(parameters, there, sent[1:], received[1:], strict=True):
            if parameter.grad is None and twin_has:
                parameter.grad = torch.zeros_like(parameter, dtype=made.dtype)
            if parameter.grad is not None:
                torch.add(made, gradient, out=local(parameter.grad))  # zeros are added, too: a sum has no negative zero then
            self._give_back(parameter)
            setattr(parameter, COPY, action.stage >= self._depth)
        del self._under_way[action.stage]


def dense_gradient(parameter: nn.Parameter, place: str) -> torch.Tensor:
    """Return what is sent of a parameter's gradient: zeros if it has none.

    Raises:
        StageError: it is sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        dtype = getattr(parameter, "grad_dtype", None)
        return torch.zeros_like(local(parameter), dtype=dtype, memory_format=torch.contiguous_format)
    if gradient.layout is not torch.strided:
        raise StageError(
            f"{place}: a gradient of shape {list(gradient.shape)} is sparse, and ranks exchange dense ones: use "
            "nn.Embedding(sparse=False)"
        )
    return local(gradient).contiguous()
