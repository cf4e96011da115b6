"""What pipelines of one process know of each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bpipe.comm.health import call_order


def test_a_pipeline_that_another_thread_opens_meanwhile_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that changes while it is read raises a RuntimeError: it is read again."""

    class Changing(set[Any]):
        reads = 0

        def __iter__(self) -> Iterator[Any]:
            self.reads += 1
            if self.reads < 3:
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    monkeypatch.setattr(call_order, "_OPEN", Changing())
    assert call_order.crossed(object(), ()) == {} and call_order._OPEN.reads == 3  # type: ignore[arg-type, attr-defined]
