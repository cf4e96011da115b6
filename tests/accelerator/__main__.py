"""Run tests on the simulated device: `python -m tests.accelerator tests/accelerator/on_device`. Takes pytest's arguments."""

from __future__ import annotations

import sys

import tests.accelerator.device  # noqa: F401  (before torch)

if __name__ == "__main__":
    import pytest

    sys.exit(pytest.main(["-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]]))
