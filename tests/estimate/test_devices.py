"""Devices and links by name."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.errors import ConfigurationError
from bpipe.estimate import Device, device_named
from bpipe.estimate.devices import DEVICES, is_named, link_named

GOOD: dict[str, Any] = {"name": "mine", "memory_bytes": 2**30, "flops_per_s": 1e12, "link_bytes_per_s": 1e9}


def test_a100() -> None:
    """NVIDIA's A100 data sheet: 80 GB, 312 TFLOP/s dense in bf16, NVLink 600 GB/s both ways."""
    a100 = device_named("A100-80GB")
    assert (a100.memory_bytes, a100.flops_per_s, a100.link_bytes_per_s) == (80 * 2**30, 312e12, 300e9)


def test_every_device_is_found_by_its_name() -> None:
    assert all(device_named(name.upper()).name == name and is_named(device_named(name)) for name in DEVICES)
    assert not is_named(Device(**GOOD))


def test_pcie() -> None:
    assert link_named("PCIe4") == 25e9


@pytest.mark.parametrize("field", ["memory_bytes", "flops_per_s", "link_bytes_per_s"])
@pytest.mark.parametrize("value", [0, -1, None, float("nan")])
def test_impossible_devices(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=field):
        Device(**(GOOD | {field: value}))


def test_unknown() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'h100'"):
        device_named("h101")
    with pytest.raises(ConfigurationError, match="did you mean 'nvlink3'"):
        link_named("nvlinc3")
