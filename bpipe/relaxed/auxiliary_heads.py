"""Auxiliary heads for the blocks of common models, as local learning needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from bpipe.checks import check_count
from bpipe.errors import ConfigurationError

__all__ = ["local_heads"]


def local_heads(
    shapes: Iterable[Sequence[int]], num_classes: int, *, residual: bool = True, per_token: bool = False
) -> list[nn.Module]:
    """Make an auxiliary head for each of some blocks, which predicts classes from the block's output.

    The number of dimensions tells the kind of features: (N, C) of an MLP, (N, T, C) of a transformer, whose tokens are averaged,
    and (N, C, H, W) of a convolutional network, whose positions are. No layer mixes samples, so a prediction does not depend on the
    size of a microbatch. Parameters are on the CPU, in torch's default dtype.

    Args:
        shapes: of the blocks' outputs, with the dimension of samples, such as `[block(x).shape]`.
        num_classes: the numbers that each prediction has.
        residual: whether a residual block comes before the linear layer, so that the features that a stage sends on need not be
            such as a linear classifier wants.
        per_token: for features of transformers, predict for each token, (N, T, num_classes), as language models do.

    Returns:
        A head for each shape; it takes features of that kind with as many channels C, whatever N, T, H and W are.

    Raises:
        ConfigurationError: a shape tells no kind of features, or `per_token` was given for one without tokens; `LocalBlock` takes
            any module of yours as a head.

    Example:
        >>> mlp, conv = local_heads([(32, 64), (32, 16, 8, 8)], num_classes=10)
        >>> mlp(torch.zeros(4, 64)).shape, conv(torch.zeros(4, 16, 8, 8)).shape
        (torch.Size([4, 10]), torch.Size([4, 10]))
    """
    check_count("num_classes", num_classes)
    shapes = list(shapes)
    if any(isinstance(shape, int) for shape in shapes):
        raise ConfigurationError(f"shapes={shapes}: give a list with a shape for each head, such as [block(x).shape]")
    return [_head(tuple(shape), num_classes, residual=residual, per_token=per_token) for shape in shapes]


def _head(shape: tuple[int, ...], num_classes: int, *, residual: bool, per_token: bool) -> nn.Module:
    if not 2 <= len(shape) <= 4 or not all(isinstance(size, int) and size >= 1 for size in shape):
        raise ConfigurationError(
            f"no head is known for features of shape {shape}: those of (N, C) of an MLP, (N, T, C) of a transformer and "
            "(N, C, H, W) of a convolutional network are. Give LocalBlock a head of your own"
        )
    if per_token and len(shape) != 3:
        raise ConfigurationError(f"per_token=True predicts for each token, and features of shape {shape} have none: leave it out")
    if len(shape) == 4:
        channels = shape[1]
        return nn.Sequential(*[_convolutions(channels)] * residual, _Mean((2, 3)), nn.Linear(channels, num_classes))
    channels = shape[-1]
    pooled = [_Mean((1,))] if len(shape) == 3 and not per_token else []
    norm, linear = nn.LayerNorm(channels), nn.Linear(channels, num_classes)
    mlp = _Residual(nn.LayerNorm(channels), nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels))
    return nn.Sequential(*[mlp] * residual, norm, *pooled, linear)


class _Residual(nn.Module):
    """Layers beside a shortcut."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = features + self.layers(features)
        return out


def _convolutions(channels: int) -> nn.Module:
    """Return two convolutions beside a shortcut, for features (N, C, H, W); each sample is normalized by itself."""
    layers = [(nn.GroupNorm(1, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2)]
    return _Residual(*(layer for of_one in layers for layer in of_one))


class _Mean(nn.Module):
    """The mean over some dimensions."""

    def __init__(self, dimensions: tuple[int, ...]) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.mean(self.dimensions)
