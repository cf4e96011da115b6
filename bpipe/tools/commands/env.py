"""Show what bpipe finds on this machine: versions, devices, backends, and the extras that are installed.

What it prints is made to be pasted into an issue: it names no machine, user or path, and needs no extra.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version

from bpipe._version import __version__
from bpipe.environment import names_set
from bpipe.extras import EXTRAS
from bpipe.tools.terminal import Result, sign_of_life

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe env
  bpipe env --json > environment.json"""

OPTIONAL = [re.split("[<=>]", package)[0] for packages in EXTRAS.values() for package in packages]
PACKAGES = ["torch", "numpy", *OPTIONAL, "transformers"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: this command has none of its own."""


def run(args: argparse.Namespace) -> Result:
    with sign_of_life("Loading torch"):
        found = {**_versions(), **_torch()}
    return Result(data=found, shown=lambda: [f"{name + ':':14} {_told(value)}" for name, value in found.items()])


def _versions() -> dict[str, str]:
    packages = {name: _version_of(name) for name in PACKAGES}
    return {"bpipe": __version__, "python": platform.python_version(), "system": platform.platform(), **packages}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _torch() -> dict[str, object]:
    """Return what torch can use here."""
    try:
        import torch

        from bpipe.comm.transport.communicators import backends
        from bpipe.device import name_of
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    kind = torch.accelerator.current_accelerator(check_available=True)
    indices = range(0 if kind is None else torch.accelerator.device_count())
    devices = [name_of(torch.device(kind.type, index)) for index in indices if kind is not None]
    found = {"cpu_cores": os.cpu_count(), "gpus": devices, "backends": backends(), "variables": names_set()}
    return {"torch": torch.__version__, **found}  # says which build it is, as the package's version does not always


def _told(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
