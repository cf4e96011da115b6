"""The release of torch that is installed."""

from __future__ import annotations

import torch

__all__: list[str] = []


def release() -> tuple[int, int]:
    """Return the first two numbers of torch's version, such as (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
