"""Lists and dicts of parameters beside layers: each stage has the entries of its layers, whatever the forward does with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError
from tests.partition.models import assert_equal

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS = 5


class Scaled(nn.Module):
    """Multiplies what each layer gives with a parameter of its own."""

    def __init__(self, scales: nn.Module) -> None:
        super().__init__()
        self.layers, self.scales = nn.ModuleList([nn.Linear(4, 4) for _ in range(NUM_LAYERS)]), scales


class Zipped(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales):
            x = layer(x) * scale
        return x


class Numbered(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) * self.scales[index]
        return x


class Sliced(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0:1][0](x) * self.scales[-len(self.scales)]
        for layer, scale in zip(self.layers[1:], self.scales[1:]):
            x = layer(x) * scale
        return x


class OfDict(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales.values()):
            x = layer(x) * scale
        return x


class Named(nn.Module):
    """Layers and parameters by name."""

    def __init__(self) -> None:
        super().__init__()
        names = ["first", "second", "third", "fourth"]
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        self.shifts = nn.ParameterDict({name: nn.Parameter(torch.randn(4)) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            x = layer(x) + self.shifts[name]
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Zipped(list_of(NUM_LAYERS)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def list_of(num_entries: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(num_entries)])


def dict_of(num_entries: int) -> nn.ParameterDict:
    return nn.ParameterDict({str(index): nn.Parameter(torch.randn(4)) for index in range(num_entries)})


CUTS = [["layers.0", "layers.1"], ["layers.2"], ["layers.3", "layers.4"]]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[list[str]]]] = {
    "zipped": (lambda: Zipped(list_of(NUM_LAYERS)), CUTS),
    "numbered": (lambda: Numbered(list_of(NUM_LAYERS)), CUTS),
    "sliced": (lambda: Sliced(list_of(NUM_LAYERS)), CUTS),
    "dict": (lambda: OfDict(dict_of(NUM_LAYERS)), CUTS),
    "by name": (Named, [["layers.first"], ["layers.second", "layers.third"], ["layers.fourth"]]),
    "nested": (Nested, [["body.layers.0"], [f"body.layers.{index}" for index in range(1, NUM_LAYERS)], ["head"]]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_each_stage_has_its_layers_parameters(kind: str) -> None:
    torch.manual_seed(0)
    make, stages = MODELS[kind]
    model, x = make(), torch.randn(3, 4)
    y = model(x)
    y.square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    parts = bpipe.split_model(model, stages)
    assert {name for part in parts for name in part.state_dict()} == set(model.state_dict())
    found = x
    for part in parts:
        found = part(found)
    assert torch.equal(found, y)
    found.square().sum().backward()
    assert_equal(expected, {name: parameter.grad for part in parts for name, parameter in part.named_parameters()})


def test_entries_named_by_hand_and_places_that_are_kept() -> None:
    model = Zipped(list_of(NUM_LAYERS))
    stages = [[*names, *(name.replace("layers", "scales") for name in names)] for names in CUTS]
    bpipe.check_split(model, bpipe.split_model(model, stages), torch.randn(2, 4))
    part = bpipe.split_model(model, CUTS, keep_positions=True)[1]
    assert [None if one is None else name for name, one in part.scales._parameters.items()] == [None, None, "2", None, None]
    assert len(model.scales) == NUM_LAYERS and type(model.scales) is nn.ParameterList


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ([["scales"], [], []], r"stage 1 has layers.2 without scales.2, which belongs to it"),
        ([["scales"], ["scales"], ["scales"]], r"stage 0 has scales.2 without layers.2, which it belongs to"),
        ([["scales.0"], ["scales.1", "scales.2"], ["scales.3", "scales.4"]], "stage 0 has layers.1 without scales.1"),
    ],
)
def test_entries_that_are_out_of_step_are_refused(where: list[list[str]], message: str) -> None:
    stages = [[*names, *more] for names, more in zip(CUTS, where)]
    with pytest.raises(ConfigurationError, match=message):
        bpipe.split_model(Zipped(list_of(NUM_LAYERS)), stages)


def test_a_list_that_is_no_layers_business() -> None:
    """With another number of entries it is on the stage that names it, and must be named."""
    model = Zipped(list_of(NUM_LAYERS))
    model.extra = list_of(2)
    with pytest.raises(ConfigurationError, match=r"no stage has extra \(ParameterList\)"):
        bpipe.split_model(model, CUTS)
    parts = bpipe.split_model(model, [[*CUTS[0], "extra"], *CUTS[1:]])
    assert [len(part.extra) for part in parts] == [2, 0, 0]
