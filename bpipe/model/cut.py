"""Mark how bpipe cut a stage's module from a model, so that ranks detect that they cut differently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bpipe.comm.health.agreement import RoomRecord, StepRecord, unlike
from bpipe.errors import AgreementError
from bpipe.model.microbatch import digest
from bpipe.model.ties import mark_ties

__all__: list[str] = []

MARK = "_bpipe_cut"


@dataclass(frozen=True, slots=True)
class Cut(RoomRecord):
    """The place of a module among the stages of a model; without digest if it is unknown."""

    digest: bytes = b""  # 16 bytes that stand for the names of all stages' modules
    stage: int = 0  # the index of this stage
    num_stages: int = 0  # the number of all stages

    @classmethod
    def check(cls, records: Sequence[StepRecord]) -> None:
        if found := unlike([one.digest for one in cls.of(records)]):  # layers would run twice, or not at all
            raise AgreementError(
                "ranks {} and {} have cut the model into different stages: choose the stages on one rank, because two measurements "
                "differ, and send the lists of names to the others (torch.distributed.broadcast_object_list)".format(*found)
            )


def mark(parts: Sequence[Any], names: Sequence[Sequence[str]]) -> None:
    """Mark the stages that were cut by these names, and what they share."""
    of_names = digest([json.dumps([list(one) for one in names])])
    for index, part in enumerate(parts):
        setattr(part, MARK, Cut(of_names, index, len(parts)))
    mark_ties(parts)


def mark_around(wrapper: Any, module: Any) -> None:
    """Mark a module around another one as that is marked, if it is."""
    if (cut := cut_of(module)) is not None:
        setattr(wrapper, MARK, cut)


def cut_of(module: Any) -> Cut | None:
    """Return how a module was cut; None if unknown, as for a module that you wrote, or one inside a wrapper."""
    found = getattr(module, MARK, None)
    return found if isinstance(found, Cut) else None
