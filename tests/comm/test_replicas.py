"""What replicas tell each other of their sizes, over whatever their group has."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from bpipe.parallel.replicas import difference


class CarriedError(Exception):
    """Says where the numbers are that the group is to carry."""


@pytest.mark.parametrize(
    ("backends", "place"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,meta:any", "cpu"), ("meta:nccl", "meta"), ("meta:any", "meta")],
)
def test_numbers_are_where_the_group_has_a_backend(backends: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU wherever one is for it, as gloo: else on the device, whichever backend that has."""

    def carry(gathered: Any, mine: torch.Tensor, group: Any) -> NoReturn:
        raise CarriedError(mine.device.type)

    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_gather", carry)
    group: Any = None
    with pytest.raises(CarriedError, match=place):
        difference(group, {}, (), torch.device("meta"))
