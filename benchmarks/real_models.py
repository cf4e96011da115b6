"""Three models whose layers cost different amounts: a large vocabulary, a U-Net with skips, and a long context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from benchmarks.blocks import GPTBlock, Size
from benchmarks.device_layers import OnDevice
from bpipe.partition import LayerCost

Skips = Mapping[int, int]  # by a layer that makes a value: the later layer that uses it, beside the output of the one before

Cut = Sequence[tuple[int, int]]  # of each stage, its first layer and the one behind its last


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, as layers in order.

    Args:
        layers: makes them, with the same parameters each time.
        batch: makes an input and a target, of so many microbatches.
        loss_fn: the loss.
        flops_per_s: of the device: such that all real work is some tenth of its time.
        skips: between layers.
        budget_share: what each rank may hold, of what plain 1F1B takes on its fullest rank.
    """

    name: str
    layers: Callable[[], list[nn.Module]]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    flops_per_s: float
    skips: Skips = field(default_factory=dict)
    budget_share: float = 0.65

    def on_device(self) -> list[OnDevice]:
        """The layers, each on a device."""
        return list(map(OnDevice, self.layers(), self.device_costs))

    @cached_property
    def device_costs(self) -> tuple[LayerCost, ...]:
        """What a device takes for each layer: its operations, counted on the meta device."""
        with torch.device("meta"):
            whole = Layers(self.layers(), self.skips)
            x, target = self.batch(1)
        return bpipe.measure_layers(whole, x, loss_fn=self.loss_fn, target=target, flops_per_s=self.flops_per_s)

    def measured(self, *, repeats: int = 5) -> tuple[LayerCost, ...]:
        """What bpipe measures of the layers on their device."""
        x, target = self.batch(1)
        whole = Layers(self.on_device(), self.skips)
        return bpipe.measure_layers(whole, x, loss_fn=self.loss_fn, target=target, bytes_per_parameter=8, repeats=repeats)

    def stages(self, cut: Cut, stages: Sequence[int]) -> list[nn.Module]:
        """Some stages of a cut, of new layers."""
        layers = self.on_device()
        return [Layers(layers[slice(*cut[stage])], self.skips, cut[stage][0]) for stage in stages]

    def stage_skips(self, cut: Cut) -> dict[str, tuple[int, int]]:
        """The skips between stages, as `PipelineStage` takes them."""
        of = [stage for stage, (start, end) in enumerate(cut) for _ in range(start, end)]
        return {name_of(maker): (of[maker], of[user]) for maker, user in self.skips.items() if of[maker] != of[user]}


def name_of(maker: int) -> str:
    """The name of what a layer makes for a later one."""
    return f"of{maker}"


class Layers(nn.Module):
    """Some layers of a model in a row, which hand on what later layers need.

    Args:
        layers: these layers.
        skips: between all layers of the model.
        start: the place of the first one.
    """

    def __init__(self, layers: Sequence[nn.Module], skips: Skips, start: int = 0) -> None:
        super().__init__()
        self.layers, self._skips, self._start = nn.ModuleList(layers), skips, start

    def forward(self, x: torch.Tensor, **given: torch.Tensor) -> Any:
        makers, kept = {user: maker for maker, user in self._skips.items()}, dict(given)
        for place, layer in enumerate(self.layers, self._start):
            x = layer(x, kept.pop(name_of(makers[place]))) if place in makers else layer(x)
            if place in self._skips:
                kept[name_of(place)] = x
        return (x, kept) if kept else x


class Words(nn.Module):
    """Words and positions, as vectors."""

    def __init__(self, num_words: int, width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(num_words, width), nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> Any:
        return self.words(x) + self.places.weight


class Block(GPTBlock):
    """A transformer block, whose attention goes back so many positions, or to the beginning."""

    def __init__(self, width: int, reach: int | None = None) -> None:
        super().__init__(Size(width, 0, 0), "any")
        self._reach = reach

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._reach is None:
            return super()._attend(q, k, v)
        windows = [one.unflatten(2, (-1, self._reach)).transpose(1, 2).flatten(0, 1) for one in (q, k, v)]  # one beside the other
        return super()._attend(*windows).unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)


class Head(nn.Module):
    """The scores of all words."""

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(width), nn.Linear(width, num_words, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.words(self.norm(x))


def of_words(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a language model."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def words(num_words: int, length: int, rows: int, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of words, and the ones that follow."""
    device = torch.empty(0).device  # the meta device draws no numbers
    made = torch.randint(num_words, (num_microbatches * rows, length + 1), device=device)
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def vocabulary(num_blocks: int = 14, width: int = 64, num_words: int = 4096) -> list[nn.Module]:
    """A language model whose head takes as long as five blocks."""
    torch.manual_seed(0)
    return [Words(num_words, width, 64), *(Block(width) for _ in range(num_blocks)), Head(num_words, width)]


def context(num_blocks: int = 15, width: int = 32, length: int = 384, window: int = 24) -> list[nn.Module]:
    """A language model with long sequences: of three blocks one attends to all positions, and the others to some."""
    torch.manual_seed(0)
    blocks = (Block(width, None if place % 3 == 2 else window) for place in range(num_blocks))
    return [Words(256, width, length), *blocks, Head(256, width)]


class Convolutions(nn.Module):
    """Two convolutions of [rows, channels, height, width]; before them it may halve the size, or double and join what it had been.

    Args:
        channels: of its input, with what it joins; and of its output.
        size: "same", "half" or "double".
    """

    def __init__(self, channels: tuple[int, int], size: str = "same") -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(*channels, 3, padding=1), nn.Conv2d(channels[1], channels[1], 3, padding=1)
        self._size = size

    def forward(self, x: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
        x = F.max_pool2d(x, 2) if self._size == "half" else x
        if earlier is not None:
            x = torch.cat([F.interpolate(x, scale_factor=2.0), earlier], 1)
        return F.silu(self.second(F.silu(self.first(x))))


def unet(width: int = 16) -> list[nn.Module]:
    """A U-Net of three sizes and the smallest one in the middle, with two layers for each on both ways."""
    torch.manual_seed(0)
    c = [width, 2 * width, 4 * width, 4 * width]
    down = [Convolutions((3, c[0])), Convolutions((c[0], c[0]))]
    for one, other in ((c[0], c[1]), (c[1], c[2])):
        down += [Convolutions((one, other), "half"), Convolutions((other, other))]
    middle = [Convolutions((c[2], c[3]), "half"), Convolutions((c[3], c[3]))]
    up = []
    for below, one in ((c[3], c[2]), (c[2], c[1]), (c[1], c[0])):
        up += [Convolutions((below + one, one), "double"), Convolutions((one, one))]
    return [*down, *middle, *up, nn.Conv2d(c[0], 3, 1)]


def images(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with noise, and without."""
    target = torch.randn(4 * num_microbatches, 3, 32, 32)
    return target + 0.3 * torch.randn_like(target), target


MODELS = {
    model.name: model
    for model in (
        Model(name="large vocabulary", layers=vocabulary, batch=partial(words, 4096, 64, 2), loss_fn=of_words, flops_per_s=2e9),
        Model(
            name="U-Net with skips",
            layers=unet,
            batch=images,
            loss_fn=F.mse_loss,
            flops_per_s=3e9,
            skips={1: 12, 3: 10, 5: 8},
            budget_share=0.85,
        ),
        Model(
            name="long context",
            layers=context,
            batch=partial(words, 256, 384, 1),
            loss_fn=of_words,
            flops_per_s=2e9,
        ),
    )
}
