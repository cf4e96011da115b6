"""Compare values that should be equal, when it costs no wait: at once on the CPU, at the end of the step on a device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from bpipe.errors import StageError
from bpipe.model.state.checksums import Sum, is_awaited, sum_of_memory
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []


class Differences:
    """The comparisons of one step."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, str]] = []  # whether something differs, and the message for that case

    def compare(self, one: Iterable[Sum], other: Iterable[Sum], message: str) -> None:
        """Compare numbers or tensors, at once (a StageError has the message) or later, if a device holds them."""
        for a, b in zip(one, other, strict=True):
            if isinstance(a, torch.Tensor) and is_awaited(a.device):
                self._found.append(((a != b).any(), message))
            elif not torch.equal(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else a != b:
                raise StageError(message)

    def check(self) -> None:
        """Wait for the comparisons on devices; raise a StageError with the first message, and how many others there are."""
        found, self._found = self._found, []
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for flag, _ in found:
            by_device.setdefault(flag.device, []).append(flag)
        seen = {device: iter(torch.stack(flags).tolist()) for device, flags in by_device.items()}
        messages = list(dict.fromkeys(message for flag, message in found if next(seen[flag.device])))
        if messages:
            others = f" (and {len(messages) - 1} more like it in this step)" if len(messages) > 1 else ""
            raise StageError(messages[0] + others)


class Constants:
    """Tensors of a stage that no forward should write, such as large ones and frozen parameters: read twice per step."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor, int | None]]) -> None:
        # Of each its name, the tensor, its version (None: torch counts none), its bytes, and the sum of its memory.
        self._constants: list[tuple[str, weakref.ref[torch.Tensor], int | None, int, Sum]] = []
        seen: set[tuple[int, int]] = set()
        for name, tensor, version in tensors:
            num_bytes, place = tensor.untyped_storage().nbytes(), (tensor.data_ptr(), tensor.numel())
            if num_bytes and place not in seen:
                seen.add(place)
                self._constants.append((name, weakref.ref(tensor), version, num_bytes, sum_of_memory(tensor.detach())))

    def compare(self, differences: Differences, stage: str) -> None:
        """Compare the tensors that are left with their first values, except those written in a way that torch counts."""
        for name, reference, version, num_bytes, total in self._constants:
            tensor = reference()
            if tensor is None or tensor.untyped_storage().nbytes() != num_bytes:
                continue
            if version is not None and version_of(tensor) != version:
                continue
            differences.compare(
                [total],
                [sum_of_memory(tensor.detach())],
                f"{stage} cannot be recomputed: its forwards write {name} in a way that torch does not count (through .data, or "
                "a fused kernel), and bpipe keeps no copy of it, so it may have been written twice. Evict instead (by='evict')",
            )
