"""Devices and links by name, from their manufacturers' data sheets; programs reach less, which is what `efficiency` expresses.

Peaks are those of dense 16-bit matrix products. Bandwidths are for one direction: half of the total that data sheets give.
"""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.checks import check_count, check_positive, lookup

__all__ = ["Device", "device_named", "link_named"]

GIB = 1024**3

LINKS = {  # bytes per second and direction
    "nvlink2": 150e9,  # V100 data sheet: 300 GB/s both ways
    "nvlink3": 300e9,  # A100 data sheet: 600 GB/s
    "nvlink4": 450e9,  # H100 and H200 data sheets: 900 GB/s
    "nvlink-a800": 200e9,  # A800 and H800: NVLink cut to 400 GB/s
    "pcie4": 25e9,  # x16: 31.5 GB/s on the wire, about 25 in copies
    "pcie5": 50e9,  # x16: twice that
    "infiniband-hdr": 25e9,  # 200 Gb/s
    "infiniband-ndr": 50e9,  # 400 Gb/s
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Args:
        name: for messages.
        memory_bytes: all of its memory.
        flops_per_s: peak of dense 16-bit matrix products.
        link_bytes_per_s: to its neighbours within a node, in one direction.

    Raises:
        ConfigurationError: a number is not positive.

    Example:
        >>> Device(name="mine", memory_bytes=24 * 2**30, flops_per_s=100e12, link_bytes_per_s=25e9).name
        'mine'
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        check_count("memory_bytes", self.memory_bytes)
        check_positive("flops_per_s", self.flops_per_s)
        check_positive("link_bytes_per_s", self.link_bytes_per_s)


def _device(name: str, gib: int, tera_flops_per_s: float, link: str) -> Device:
    return Device(name=name, memory_bytes=gib * GIB, flops_per_s=tera_flops_per_s * 1e12, link_bytes_per_s=LINKS[link])


DEVICES = {
    device.name: device
    for device in (
        _device("v100-32gb", 32, 125, "nvlink2"),  # fp16: it has no bf16
        _device("a100-40gb", 40, 312, "nvlink3"),
        _device("a100-80gb", 80, 312, "nvlink3"),
        _device("a100-80gb-pcie", 80, 312, "pcie4"),
        _device("a800-80gb", 80, 312, "nvlink-a800"),
        _device("h100", 80, 989.4, "nvlink4"),  # SXM5
        _device("h800", 80, 989.4, "nvlink-a800"),
        _device("h200", 139, 989.4, "nvlink4"),  # 141 GB on the data sheet; 139 GiB seen by CUDA
    )
}


def device_named(name: str) -> Device:
    """Look up a device by its name, in any case and punctuation.

    Raises:
        ConfigurationError: no such device; the message names the nearest.

    Example:
        >>> device_named("A100 80GB").link_bytes_per_s
        300000000000.0
    """
    return lookup("device", name, DEVICES)


def is_named(device: Device) -> bool:
    """Return whether a device is one of those that have a name here, with the same numbers."""
    return device in DEVICES.values()


def link_named(name: str) -> float:
    """Look up the bytes per second and direction of a kind of link.

    Raises:
        ConfigurationError: no such link; the message names the nearest.
    """
    return lookup("link", name, LINKS)
