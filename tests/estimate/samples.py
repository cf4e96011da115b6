"""What tests of advice share: a small model, a device, a measured stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from bpipe.estimate import Advice, Device, Measurement, Profile, Transformer
from bpipe.estimate.advisor import advise
from bpipe.estimate.devices import GIB

MODEL = Transformer(num_layers=16, hidden=1024, num_heads=16, sequence=1024, vocabulary=32000, name="small")
DEVICE = Device(name="toy", memory_bytes=4 * GIB, flops_per_s=1e14, link_bytes_per_s=300e9)
SETUP: dict[str, Any] = {"batch": 32, "num_stages": 8, "device": DEVICE}
ONE = Measurement(
    microbatch_size=2,
    own_bytes=100,
    movable_bytes=90,
    shared_bytes=7,
    output_bytes=10,
    input_gradient_bytes=11,
    forward_s=1.0,
    backward_s=2.0,
)
STAGE = Profile(
    name="Stage",
    device="cpu",
    num_parameters=10,
    num_trainable=8,
    parameter_bytes=40,
    trainable_bytes=32,
    gradient_bytes=32,
    buffer_bytes=5,
    measurements=(ONE,),
)


def first_line(advice: Advice) -> str:
    return advice.verdict.splitlines()[0]


@cache
def between(size: int) -> int:
    """Memory in which a microbatch of `size` fits plain, and twice that only balanced."""
    sizes = {"microbatch_sizes": [size, 2 * size], "recomputations": ["none"], "memory_bytes": 1000 * GIB}
    peaks = {
        (one.is_balanced, one.microbatch_size): max(one.device_peak_bytes)
        for one in advise(MODEL, **(SETUP | sizes)).candidates
        if one.schedule == "1f1b"
    }
    least = max(peaks[False, size], peaks[True, 2 * size])
    assert least < peaks[False, 2 * size]
    return round((least + peaks[False, 2 * size]) / 2 / 0.95)


def stage(size_to_seconds: dict[int, float]) -> Profile:
    """Saves 100 bytes a row, takes as long as said."""
    measured = tuple(
        replace(ONE, microbatch_size=b, own_bytes=100 * b, movable_bytes=100 * b, shared_bytes=0, forward_s=s, backward_s=2 * s)
        for b, s in size_to_seconds.items()
    )
    return replace(STAGE, measurements=measured)
