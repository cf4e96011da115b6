"""The text every machine has: the sources of Python's standard library, as one array of bytes.

Files go to train or to validation by a hash of their path, so the split is the same wherever Python is the same. The
array on disk is train, then validation; the JSON file beside it says where the one ends, and, as it is written last,
that the array is whole.
"""

from __future__ import annotations

import json
import platform
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from files import whole, write_json
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "Text", "open_text", "write_text"]

# Installed packages, tests and tables of characters are not what one would call Python's sources.
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})

# One file in ten is kept for validation.
VALIDATION_SHARE = 10

# Bytes, and the byte that follows each: int64, (num_sequences, sequence_length) both.
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Bytes to train on and bytes to validate on, and batches of sequences from both."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    sequence_length: int

    def train_batch(self, num_sequences: int, *, seed: int, step: int) -> Batch:
        """Return random sequences, the same ones for the same seed and step."""
        num_starts = len(self.train) - self.sequence_length
        starts = np.random.default_rng((seed, step)).integers(num_starts, size=num_sequences)
        return self._sequences(self.train, starts)

    def validation_batches(self, num_sequences: int, *, num_batches: int) -> list[Batch]:
        """Return batches spread evenly over the validation bytes, always the same ones."""
        last = len(self.validation) - self.sequence_length - 1
        starts = np.linspace(0, last, num_sequences * num_batches).astype(np.int64)
        return [self._sequences(self.validation, part) for part in np.split(starts, num_batches)]

    def _sequences(self, data: NDArray[np.uint8], starts: NDArray[np.int64]) -> Batch:
        rows = np.stack([data[start : start + self.sequence_length + 1] for start in starts])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def write_text(folder: Path) -> None:
    """Collect the text and write it, unless that was done before. For one process; the others wait, then open it."""
    array_path, description_path = _paths(folder)
    if description_path.exists():
        return
    train, validation = _read_sources(Path(sysconfig.get_path("stdlib")))
    with whole(array_path) as part, part.open("wb") as file:
        np.save(file, np.frombuffer(train + validation, dtype=np.uint8))
    write_json(description_path, {"train_bytes": len(train), "validation_bytes": len(validation)})


def open_text(folder: Path, *, sequence_length: int) -> Text:
    """Map the text that `write_text` wrote into memory; processes share its pages."""
    array_path, description_path = _paths(folder)
    train_bytes = json.loads(description_path.read_text())["train_bytes"]
    data = np.load(array_path, mmap_mode="r")
    return Text(train=data[:train_bytes], validation=data[train_bytes:], sequence_length=sequence_length)


def _paths(folder: Path) -> tuple[Path, Path]:
    name = f"text-python-{platform.python_version()}"
    return folder / f"{name}.npy", folder / f"{name}.json"


def _read_sources(root: Path) -> tuple[bytes, bytes]:
    train, validation = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if SKIPPED.isdisjoint(place.parts):
            is_validation = zlib.crc32(place.as_posix().encode()) % VALIDATION_SHARE == 0
            (validation if is_validation else train).extend(path.read_bytes())
    return bytes(train), bytes(validation)
