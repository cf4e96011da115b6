"""Measure the layers of a model: seconds and bytes where it can run, operations and bytes on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bpipe.backward.autograd import edges_of, enter
from bpipe.checks import check_count, check_positive
from bpipe.errors import ConfigurationError
from bpipe.estimate.bench import Forward, Measured, clock, halves_s
from bpipe.estimate.layers import LayerCost
from bpipe.estimate.state_bytes import MASTER_BYTES, STATE_BYTES
from bpipe.flow.flow import value_name
from bpipe.flow.shape_arguments import Skip
from bpipe.memory.saved.storages import element_bytes
from bpipe.model.microbatch import tensors_in
from bpipe.model.preserve_state import preserved_state
from bpipe.model.pytree import mapped
from bpipe.partition.name_lists import CONTAINERS, Names, is_series
from bpipe.partition.observe import Loss, Seen, observed
from bpipe.partition.split_check import in_a_row, without_cache
from bpipe.plan.sizes import Amount

__all__ = ["measure_layers"]

Times = Sequence[float]  # the seconds of a forward, of its backward, and of both halves of a split one
Parts = tuple[Sequence[nn.Module], Mapping[str, Skip]]  # as `split_traced` returns them


def measure_layers(
    model: nn.Module | Parts,
    example: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    layers: Sequence[str | Sequence[str]] | None = None,
    loss_fn: Loss | None = None,
    target: Any = None,
    bytes_per_parameter: float | None = None,
    repeats: int = 5,
    flops_per_s: float = 1e12,
) -> tuple[LayerCost, ...]:
    """Measure what each layer of a model takes for one microbatch, for `bpipe.choose_stages`.

    The model runs once as a whole, one of Transformers without its cache, which shows the order of its layers, what each is given,
    and what each saves. Then each layer runs alone, forward and backward, and is timed; so is a backward that is split into halves,
    for schedules that split it. On the meta device the operations of matrix products and attention are counted instead, so that a
    model that fits on no device can be cut; attention counts there as one kernel that does not save its weights. The model is left
    unchanged. Not collective; blocks the host. Two ranks never measure the same: measure on one.

    Where layers hand values on to later ones than the next, as in a U-Net, cut the model into single layers, and measure these:

        costs = bpipe.measure_layers(bpipe.split_traced(model, layers, (example,)), example, layers=layers)

    Args:
        model: the whole model, in train mode, where and as it will train; or on the meta device; or what `split_traced` has cut
            into layers, or such parts and their skips by hand.
        example: a microbatch: its input, or a tuple of positional arguments. Its values do not matter on the meta device.
        kwargs: keyword arguments of the model.
        layers: the layers: names of modules, or groups of names that stay together; default: the modules of the model itself, and
            the entries of `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`; what runs before, between and after such entries
            stays together. `transformer_layers` names those of a Hugging Face model. What is not named is not measured. For parts,
            the names of each; default: its number.
        loss_fn: `loss_fn(output, target)`, counted with the last layer.
        target: the target that it gets.
        bytes_per_parameter: what stays for each trainable parameter; default: parameter, gradient, Adam's two fp32 moments, and
            an fp32 copy where it has 16 bits.
        repeats: timed runs of each layer after one that is not timed; the median counts.
        flops_per_s: on the meta device, the operations per second that convert operations to seconds.

    Raises:
        ConfigurationError: not a module, unknown names, layers inside others or out of order, or one that runs twice or not at all.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [(one.names, one.saved_bytes, one.shared_bytes) for one in measure_layers(model, torch.zeros(1, 8))]
        [(('0',), 0, 0), (('1',), 32, 0), (('2',), 32, 32)]
    """
    if isinstance(layers, str):
        raise ConfigurationError(f"layers={layers!r}: give a list of names, such as [{layers!r}]")
    groups = None if layers is None else [(one,) if isinstance(one, str) else tuple[str, ...](one) for one in layers]
    if isinstance(model, tuple):
        model = _Row(*model, groups)
        groups = [(f"parts.{index}",) for index in range(len(model.parts))]
    check_count("repeats", repeats)
    check_positive("flops_per_s", flops_per_s)
    names = Names(model, "measure_layers measures")
    modules = _modules(names, groups)
    args = example if isinstance(example, tuple) else (example,)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_meta:
        args, kwargs, target = mapped(lambda one: one.to("meta"), (args, kwargs, target))
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers(), *tensors_in((args, kwargs)))}
    measured, num_runs = (_operations(flops_per_s), 1) if is_meta else (clock(devices), repeats + 1)
    with preserved_state([model]), torch.enable_grad():
        seen = observed(model, modules, args, {**without_cache(model), **(kwargs or {})}, loss_fn, target)
        times = {name: _timed(modules.get(name, loss_fn), one, measured, num_runs) for name, one in seen.items()}
    silent = [name for name in modules if name not in seen]
    if silent:
        raise ConfigurationError(f"{', '.join(silent[:8])} did not run in the model's forward: in layers=, name modules that run")
    _check_order(groups or [], list(seen))
    costs = _costs(names, groups or list(_found(names, seen)), seen, times, bytes_per_parameter)
    return tuple(model.with_values(costs) if isinstance(model, _Row) else costs)


class _Row(nn.Module):
    """Parts of a model that run one after the other, each of them a layer.

    Args:
        parts: as modules.
        skips: between them.
        names: of each part; None: its number.
    """

    def __init__(self, parts: Sequence[nn.Module], skips: Mapping[str, Skip], names: Sequence[tuple[str, ...]] | None) -> None:
        super().__init__()
        self.parts, self._skips = nn.ModuleList(parts), skips
        self._names = [(str(index),) for index in range(len(parts))] if names is None else names
        if len(self._names) != len(parts):
            raise ConfigurationError(f"layers= names {len(self._names)} layers, and there are {len(parts)} parts: name each part")
        self._made: list[tuple[int, list[Amount]]] = []  # the bytes for the next part, and the values for others, of the latest run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ran = list(in_a_row(list(self.parts), args, kwargs, self._skips))
        self._made = [(_num_bytes(value), [self._amount(*one) for one in made.items()]) for value, made in ran]
        return ran[-1][0]

    def _amount(self, name: str, value: Any) -> Amount:
        return Amount(value_name(self._skips[name]), _num_bytes(value), gradient=_num_bytes(_differentiable(value)))

    def with_values(self, costs: Iterable[LayerCost]) -> Iterator[LayerCost]:
        """Yield the costs of the parts with their names, and with what they have made."""
        for one, names, (output_bytes, values) in zip(costs, self._names, self._made):
            yield replace(one, names=names, output_bytes=output_bytes, values=tuple(values))


def _num_bytes(value: Any) -> int:
    return sum(element_bytes(one) for one in tensors_in(value))


def _modules(names: Names, groups: list[tuple[str, ...]] | None) -> dict[str, nn.Module]:
    """Return the modules to watch, by name."""
    if groups is None:
        return dict(_leaves(names.modules[""]))
    names.check_known(groups)
    return {name: names.modules[name] for group in groups for name in group if name in names.modules}


def _check_order(groups: Sequence[tuple[str, ...]], order: Sequence[str]) -> None:
    """Raise unless layers are given in the order that they run in, because stages are made of neighbours."""
    first = {group: min(map(order.index, ran)) for group in groups if (ran := set(group) & set(order))}
    for before, after in pairwise(first):
        if first[after] < first[before]:
            raise ConfigurationError(
                f"{', '.join(after)} runs before {', '.join(before)}: give layers= in the order of the forward"
            )


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's children with their names, and in place of containers those of their entries."""
    for name, child in module._modules.items():
        if isinstance(child, CONTAINERS):
            yield from _leaves(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _found(names: Names, seen: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the modules that ran, in order: each entry of a series by itself, the others grouped with their neighbours."""
    for is_entry, group in groupby((name for name in seen if name), key=lambda name: is_series(names.modules[names.owner(name)])):
        members = tuple(group)
        yield from ((name,) for name in members) if is_entry else (members,)


def _operations(flops_per_s: float) -> Measured:
    """Count the operations of work, as the seconds that they would take."""

    def measured(work: Callable[[], Any]) -> tuple[Any, float]:
        with FlopCounterMode(display=False) as counter:
            result = work()
        return result, counter.get_total_flops() / flops_per_s

    return measured


def _timed(run: Callable[..., Any] | None, seen: Seen, measured: Measured, num_runs: int) -> Times:
    """Run a module alone, some times; return the median of all runs but the first."""
    times = [_alone(run, seen, measured) for _ in range(num_runs)]
    return [*map(median, zip(*(times[1:] or times)))]


def _alone(run: Callable[..., Any] | None, seen: Seen, measured: Measured) -> Times:
    """Run a module on what it was given, forward and backward; then again, with a backward in halves."""
    assert run is not None, "only the loss has no module"
    args, kwargs = mapped(torch.Tensor.clone, (seen.args, seen.kwargs))  # a clone may be changed in place
    output, forward_s = measured(lambda: run(*args, **kwargs))
    results = _differentiable(output)
    if not results:
        return forward_s, 0.0, 0.0, 0.0
    gradients = [torch.ones_like(one) for one in results]
    backward_s = measured(lambda: torch.autograd.backward(results, gradients))[1]
    if not _differentiable([seen.args, seen.kwargs]):
        return forward_s, backward_s, 0.0, backward_s
    module = run if isinstance(run, nn.Module) else nn.Module()
    return forward_s, backward_s, *halves_s(module, lambda: _entered(run, seen), measured, {})


def _entered(run: Callable[..., Any], seen: Seen) -> Forward:
    """Run the forward of a module as if its inputs had come from another stage."""
    given: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor)
        return tensor

    inputs = mapped(noted, (seen.args, seen.kwargs))
    entered, box = enter([one.detach().clone() for one in given], [one.requires_grad for one in given])
    left = iter(entered)
    args, kwargs = mapped(lambda _: next(left), inputs)
    results = _differentiable(run(*args, **kwargs))
    return Forward(edges_of(results), [torch.ones_like(one) for one in results], box, [], [])


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [one for one in tensors_in(values) if one.requires_grad]


def _costs(
    names: Names,
    groups: Sequence[tuple[str, ...]],
    seen: dict[str, Seen],
    times: dict[str, Times],
    bytes_per_parameter: float | None,
) -> Iterator[LayerCost]:
    before: dict[int, Any] = {}
    for index, group in enumerate(groups):
        members = [name for name in group if name in seen] + [""] * (index == len(groups) - 1 and "" in seen)
        saved = {key: storage for name in members for key, storage in seen[name].saved.items()}
        last = next((name for name in reversed(seen) if name and name in members), None)
        forward_s, backward_s, input_s, weight_s = (sum(times[name][at] for name in members) for at in range(4))
        waits = index == 0 and not any(_differentiable([seen[name].args, seen[name].kwargs]) for name in members[:1])
        yield LayerCost(
            names=group,
            forward_s=forward_s,
            backward_s=backward_s,
            input_s=0.0 if waits else input_s,
            weight_s=backward_s if waits else weight_s,
            saved_bytes=_bytes(saved.values()),
            shared_bytes=_bytes(storage for key, storage in saved.items() if key in before),
            output_bytes=0 if last is None else seen[last].output_bytes,
            static_bytes=_static_bytes(names, group, bytes_per_parameter),
        )
        before = saved


def _bytes(storages: Iterable[Any]) -> int:
    return sum(storage.nbytes() for storage in storages)


def _static_bytes(names: Names, group: Sequence[str], bytes_per_parameter: float | None) -> int:
    """Return the bytes of the parameters and buffers under some names, each once, with gradients and optimizer states."""
    tensors = {id(tensor): tensor for name, tensor in names.tensors.items() if names.is_kept(name, group)}
    return round(sum(_kept_bytes(tensor, bytes_per_parameter) for tensor in tensors.values()))


def _kept_bytes(tensor: torch.Tensor, bytes_per_parameter: float | None) -> float:
    if not tensor.requires_grad:
        return element_bytes(tensor)
    if bytes_per_parameter is not None:
        return tensor.numel() * bytes_per_parameter
    return 2 * tensor.nbytes + tensor.numel() * (STATE_BYTES["adam"] + MASTER_BYTES * (tensor.element_size() == 2))
