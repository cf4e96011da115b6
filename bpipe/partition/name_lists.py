"""Find out from lists of names which of a model's modules each stage keeps, and everything that is wrong with such lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise

import torch
from torch import nn

from bpipe.errors import ConfigurationError

__all__: list[str] = []

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # nothing but a series of other modules
OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
MOST_SHOWN = 8


class Names:
    """The fully qualified names of a model's modules, parameters and buffers; one with several names is under each of them."""

    def __init__(self, model: nn.Module, caller: str) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"{caller} an nn.Module, got {type(model).__qualname__}")
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.tensors: dict[str, torch.Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def in_step(self, stages: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the lists with the entries added of parameter lists that no stage names, each where the layer beside it is."""
        completed = [list(names) for names in stages]
        for parameters, series in self._of_layers():
            if not any(self.is_kept(parameters, names) or self.is_above(parameters, names) for names in stages):
                for names in completed:
                    entries = self.modules[series]._modules
                    names += [f"{parameters}.{entry}" for entry in entries if self.is_kept(f"{series}.{entry}", names)]
        return completed

    def check(self, stages: Sequence[Sequence[str]], *, keep_positions: bool = False) -> None:
        """Raise unless the lists make up the model.

        Args:
            keep_positions: whether missing entries are replaced, so that a list of parameters may have more entries than the series
                of layers beside it.
        """
        problems = [*self._unusable(stages, "stage")] or [
            *self._missing(stages),
            *self._disordered(stages),
            *self._out_of_step(stages, keep_positions),
        ]
        raise_all(f"these {len(stages)} stages are not a split of the model:", problems)

    def check_known(self, layers: Sequence[Sequence[str]]) -> None:
        """Raise unless each name is in the model, is given once, and is not inside another one that is given."""
        problems = [*self._unusable(layers, "layer")]
        place = {name: index for index, names in enumerate(layers) for name in names}
        for index, names in enumerate(layers):
            for name in names:
                around = [one for one in place if name.startswith(f"{one}.")]
                problems += [f"{name} of layer {index} is part of {one} of layer {place[one]}" for one in around]
                problems += [f"{name} is in layers {index} and {place[name]}"] * (place[name] != index)
        raise_all("these are not layers of the model:", problems)

    def is_kept(self, name: str, kept: Iterable[str]) -> bool:
        """Return whether a stage that keeps some names has a module or tensor: it, or a module around it, is named."""
        return any(name == one or name.startswith(f"{one}.") for one in kept)

    def is_above(self, name: str, kept: Iterable[str]) -> bool:
        """Return whether something inside a module is kept."""
        return not name or any(one.startswith(f"{name}.") for one in kept)

    def is_copied(self, name: str, kept: Iterable[str]) -> bool:
        """Return whether a stage has a copy of a module with less in it: one above what is kept, or a list that may be empty."""
        if self.is_kept(name, kept):
            return False
        may_be_empty = isinstance(self.modules[name], (nn.ModuleList, nn.ModuleDict, *OF_PARAMETERS))
        return self.is_above(name, kept) or (may_be_empty and self.is_copied(self.owner(name), kept))

    def owner(self, name: str) -> str:
        """Return the name of the module that a module or tensor is registered on."""
        return name.rpartition(".")[0]

    def _unusable(self, stages: Sequence[Sequence[str]], what: str) -> Iterator[str]:
        if not stages:
            yield "there are none"
        known = {*self.modules, *self.tensors} - {""}
        for index, names in enumerate(stages):
            if not names:
                yield f"{what} {index} is empty"
            for name in names:
                if name not in known:
                    near = get_close_matches(name, known, n=1)
                    yield f"{what} {index} names {name!r}, which the model does not have" + (f": {near[0]!r}?" if near else "")
            for name in {one for one in names if names.count(one) > 1}:
                yield f"{what} {index} names {name!r} twice"

    def _missing(self, stages: Sequence[Sequence[str]]) -> Iterator[str]:
        """Yield a problem for all that no stage has: modules that compute, even without parameters, and parameters above them."""
        named = [name for names in stages for name in names]
        for name, module in self.modules.items():
            above = self.is_above(name, named)
            if not (above or self.is_kept(name, named)) and self.is_above(self.owner(name), named) and any(_parts(module)):
                yield f"no stage has {name} ({type(module).__name__})"
        for name in self.tensors:
            is_loose = isinstance(self.tensors[name], nn.Parameter) and self.is_above(self.owner(name), named)
            if is_loose and not self.is_kept(name, named):
                yield f"no stage has the parameter {name}: name it in the stage that uses it"

    def _disordered(self, stages: Sequence[Sequence[str]]) -> Iterator[str]:
        """Yield a problem for each entry of a series on several stages, or on an earlier stage than the entries before it."""
        named = [name for names in stages for name in names]
        for name, module in self.modules.items():
            if not is_series(module) or not self.is_above(name, named):
                continue
            places: dict[str, list[int]] = {}
            for path in (f"{name}.{entry}".lstrip(".") for entry in module._modules):
                if found := [index for index, one in enumerate(stages) if self.is_kept(path, one) or self.is_above(path, one)]:
                    places[path] = found
                if len(found) > 1 and any(self.is_kept(path, stages[index]) for index in found):
                    yield f"{path} is in stages {', '.join(map(str, found))} and would run in each of them"
            for (before, (*_, last)), (after, (first, *_)) in pairwise(places.items()):
                if first < last:
                    yield f"{before} is in stage {last}, and {after}, which comes after it, in stage {first}"

    def _out_of_step(self, stages: Sequence[Sequence[str]], keep_positions: bool) -> Iterator[str]:
        """Yield a problem for each entry of a parameter list on another stage than its layer: a loop over both would go wrong."""
        for parameters, series in self._of_layers():
            for index, names in enumerate(stages):
                for entry in self.modules[series]._modules:
                    has_layer = self.is_kept(f"{series}.{entry}", names)
                    has_parameter = self.is_kept(f"{parameters}.{entry}", names)
                    if has_layer and not has_parameter:
                        yield f"stage {index} has {series}.{entry} without {parameters}.{entry}, which belongs to it"
                    if has_parameter and not has_layer and not keep_positions:
                        yield f"stage {index} has {parameters}.{entry} without {series}.{entry}, which it belongs to"

    def _of_layers(self) -> Iterator[tuple[str, str]]:
        """Yield lists or dicts of parameters, each with a series of modules beside it that has the same entries."""
        for parameters, module in self.modules.items():
            if isinstance(module, OF_PARAMETERS) and module._parameters:
                beside = (one for one in self.modules if one and self.owner(one) == self.owner(parameters))
                series = (one for one in beside if isinstance(self.modules[one], CONTAINERS))
                same = next((one for one in series if self.modules[one]._modules.keys() == module._parameters.keys()), None)
                if same is not None:
                    yield parameters, same


def raise_all(headline: str, problems: list[str]) -> None:
    """Raise a ConfigurationError with the first problems of several, if there are any."""
    if problems:
        more = [f"... and {len(problems) - MOST_SHOWN} more"] * (len(problems) > MOST_SHOWN)
        raise ConfigurationError("\n  ".join([headline, *problems[:MOST_SHOWN], *more]))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside a module, itself included, that do or hold something."""
    return (one for one in module.modules() if not isinstance(one, (*CONTAINERS, nn.Identity)))


def is_series(module: nn.Module) -> bool:
    """Return whether the entries of a container run in order: always, unless it is a dict whose keys are not all numbers."""
    if isinstance(module, nn.ModuleDict):
        return bool(len(module)) and all(key.isdigit() for key in module)
    return isinstance(module, (nn.Sequential, nn.ModuleList))
