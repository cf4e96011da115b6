"""Without the file of any one shape, bpipe works, and the plans of all other shapes are the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
if len(sys.argv) > 1:
    sys.modules[f"bpipe.flow.shapes.{sys.argv[1]}"] = None  # as if the file were not there

import bpipe
from bpipe.relaxed.paths import routed_plan
from bpipe.schedules import Plan, build

PLANS = {
    "chain": lambda: build("balanced_1f1b", 4, 6),
    "slices": lambda: build("seq_1f1b", 4, 4, slices=3),
    "skips": lambda: build("interleaved_1f1b", 4, 4, num_ranks=2, skips=[(0, 2, 3)]),
    "local": lambda: build("local_learning", 3, 4),
    "alternatives": lambda: build("bitpipe", 8, 4),
    "alternatives for each microbatch": lambda: routed_plan(6, [[1, 1], [2, 1]]),
}
for name, make in PLANS.items():
    try:
        plan = make()
        assert Plan.from_text(plan.to_text()) == plan
        print(name, plan.fingerprint())
    except ValueError as error:
        print(name, "refused:", error)
"""


def said(*without: str) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *without], capture_output=True, text=True, check=True)
    return dict(line.rsplit(" ", 1) if "refused" not in line else line.split(" refused:", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("shape", ["slices", "skips", "local", "alternatives"])
def test_other_plans_are_the_same(shape: str) -> None:
    whole, without = said(), said(shape)
    assert not any("no shape" in one for one in whole.values())
    for name, fingerprint in whole.items():
        assert without[name] == (f" there is no shape '{shape}'" if name.startswith(shape) else fingerprint)
