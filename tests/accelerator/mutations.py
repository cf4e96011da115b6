"""bpipe with one ordering removed: the checker has to report it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import NamedTuple, cast


class Mutation(NamedTuple):
    """A change of one place in bpipe's source.

    Args:
        name: what is removed.
        module: where.
        old: the text, which is there once.
        new: what stands there instead.
        schedule: of `work.RULES`, one that does what was changed.
    """

    name: str
    module: str
    old: str
    new: str = "pass"
    schedule: str = "balanced_1f1b"


IN_LOOPBACK = [
    Mutation("copy before the sender is ready", "bpipe.comm.loopback", "stream.wait_event(sent.ready)"),
    Mutation("copy before the receiver's memory is free", "bpipe.comm.loopback", "stream.wait_event(received.ready)"),
    Mutation(
        "use before the copy is made", "bpipe.comm.loopback", "torch.cuda.current_stream(self._device).wait_event(self.copied)"
    ),
    Mutation(
        "start before the caller's work",
        "bpipe.loopback",
        "self._streams[lane].wait_stream(torch.cuda.current_stream(lane.device))",
    ),
    Mutation(
        "return before the ranks' work", "bpipe.loopback", "torch.cuda.current_stream(lane.device).wait_stream(self._streams[lane])"
    ),
    Mutation(
        "copy to the host before it is computed",
        "bpipe.memory.host",
        "self._stream.wait_stream(torch.cuda.current_stream(self._device))",
        schedule="host",
    ),
    Mutation(
        "free or use before the host's copy is made",
        "bpipe.memory.host",
        "torch.cuda.current_stream(self._device).wait_event(self._event)",
        schedule="host",
    ),
]
OVER_GLOO = [
    Mutation(
        "copy to pinned memory before it is computed",
        "bpipe.comm.staging",
        "self._stream.wait_stream(torch.cuda.current_stream(self._device))",
    ),
    Mutation("send pinned memory before it is copied", "bpipe.comm.staging", "copied.synchronize()"),
    Mutation("write what arrived before its memory is free", "bpipe.comm.staging", "self._stream.wait_event(allocated)"),
    Mutation(
        "use what arrived before it is copied", "bpipe.comm.staging", "torch.cuda.current_stream(self._device).wait_event(copied)"
    ),
]
OVER_NCCL = [
    Mutation("use what is received before it has arrived", "bpipe.comm.works", "            wait_for(work)", "            pass"),
]


class _Mutating(SourceFileLoader):
    """Loads a module's source with the change made."""

    def __init__(self, name: str, path: str, mutation: Mutation) -> None:
        super().__init__(name, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> object:  # not from the compiled file beside it
        return SourceLoader.source_to_code(self, self.get_data(self.path), self.path)

    def get_data(self, path: str) -> bytes:
        source = super().get_data(path).decode()
        assert source.count(self._mutation.old) == 1, f"{self._mutation} is not in {path} once"
        return source.replace(self._mutation.old, self._mutation.new).encode()


class _Finder(MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._mutation.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        return importlib.util.spec_from_file_location(name, spec.origin, loader=_Mutating(name, spec.origin, self._mutation))


def apply(mutation: Mutation) -> None:
    """Let this process import bpipe with the change made, in place of the one that it has."""
    ours = ("bpipe", "tests.models", "tests.over", "tests.edge_cases", "tests.accelerator.work", "tests.accelerator.nccl")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]
    sys.meta_path.insert(0, cast(MetaPathFinder, _Finder(mutation)))
