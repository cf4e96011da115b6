"""Models with skips, as lists of stages: a U-Net, attention over the outputs of all earlier stages, an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

WIDTH, POSITIONS = 8, 16


class Down(nn.Module):
    """Halves the positions of [batch, channels, positions], and hands on what it had before."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.conv = name, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu(self.conv(x))
        return nn.functional.avg_pool1d(x, 2), {self.name: x}


class Up(nn.Module):
    """Doubles the positions, and joins what the stage of the same size handed on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.conv = name, nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor, **skips: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.interpolate(x, scale_factor=2.0)
        return torch.tanh(self.conv(torch.cat([wide, skips[self.name]], 1)))


class Residual(nn.Module):
    """Attends to the outputs of all earlier stages [batch, positions, channels], and hands on its own to all later ones."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.index, self.is_last = index, index == num_stages - 1
        self.query, self.norm = nn.Parameter(torch.randn(WIDTH)), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, **earlier: torch.Tensor) -> Any:
        if earlier:
            kept = torch.stack([earlier[name] for name in sorted(earlier)])
            weights = (self.norm(kept) * self.query).sum(-1, keepdim=True).softmax(0)
            x = (weights * kept).sum(0)
        y = x + self.down(torch.tanh(self.up(x)))
        return y if self.is_last else (y, {f"y{self.index}": y})


class Encoder(nn.Module):
    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.is_last, self.layer = is_last, nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, words: torch.Tensor | None = None) -> Any:
        x = self.layer(x)
        return (x, {"encoded": x}) if self.is_last else x


class Decoder(nn.Module):
    """Attends to what the encoder handed on; the first one takes its own input, and the encoder's only as that."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.is_first, self.layer = is_first, nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, words: torch.Tensor | None = None) -> Any:
        return self.layer(words if self.is_first else x, encoded)


class Model(NamedTuple):
    """A model's stages, their skips, its batch, and the keyword arguments of `step`."""

    stages: list[nn.Module]
    skips: dict[str, tuple[int, ...]]
    x: torch.Tensor
    target: torch.Tensor
    kwargs: dict[str, torch.Tensor]


def model_of(kind: str, num_stages: int, batch_size: int) -> Model:
    torch.manual_seed(0)
    half, kwargs = num_stages // 2, dict[str, torch.Tensor]()
    x = torch.randn(batch_size, POSITIONS, WIDTH, dtype=torch.float64)
    if kind == "unet":
        stages: list[nn.Module] = [*(Down(f"of{i}") for i in range(half)), *(Up(f"of{half - 1 - i}") for i in range(half))]
        skips = {f"of{i}": (i, num_stages - 1 - i) for i in range(half)}
        x = x.transpose(1, 2).contiguous()
    elif kind == "residuals":
        stages = [Residual(i, num_stages) for i in range(num_stages)]
        skips = {f"y{i}": tuple(range(i, num_stages)) for i in range(num_stages - 1)}
    else:
        stages = [Encoder(is_last=i == half - 1) for i in range(half)] + [Decoder(is_first=i == 0) for i in range(half)]
        skips = {"encoded": tuple(range(half - 1, num_stages))}
        kwargs["words"] = torch.randn(batch_size, POSITIONS, WIDTH, dtype=torch.float64)
    return Model([stage.double() for stage in stages], skips, x, torch.randn_like(x), kwargs)


KINDS = ("unet", "residuals", "encoder and decoder")


def by_itself(
    stages: Sequence[Callable[..., Any]], skips: Mapping[str, Sequence[int]], x: Any, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """The output of a model in a single process."""
    kept: dict[str, Any] = {}
    for index, stage in enumerate(stages):
        used = {name: kept[name] for name, (_, *users) in skips.items() if index in users}
        x = stage(x, **used, **kwargs)
        if isinstance(x, tuple):
            x, made = x
            kept |= made
    assert isinstance(x, torch.Tensor)
    return x


def gradients_by_itself(model: Model, num_microbatches: int) -> list[torch.Tensor | None]:
    """The gradients of all stages' parameters in a single process."""
    chunks = [whole.chunk(num_microbatches) for whole in (model.x, model.target)]
    words = {name: whole.chunk(num_microbatches) for name, whole in model.kwargs.items()}
    for number, (x, target) in enumerate(zip(*chunks)):
        kwargs = {name: pieces[number] for name, pieces in words.items()}
        (nn.functional.mse_loss(by_itself(model.stages, model.skips, x, kwargs), target) / num_microbatches).backward()
    return [parameter.grad for stage in model.stages for parameter in stage.parameters()]
