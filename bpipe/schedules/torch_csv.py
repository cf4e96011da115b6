"""Read the schedules that torch.distributed.pipelining writes as CSV; `Plan.to_csv` writes them."""

from __future__ import annotations

import csv
import io
import re

from bpipe.errors import PlanError
from bpipe.flow.shaping import shaped, sliced
from bpipe.passes.communicate import communicate
from bpipe.plan.action import COMPUTE, MicrobatchKey, Op
from bpipe.plan.plan import Plan
from bpipe.plan.text import read_word, wrong_with_name

__all__ = ["from_csv"]

# torch writes it; FSDP shards by itself if the plan does not.
SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)")
SLICES = re.compile(r"slices=([1-9]\d{0,8})", re.ASCII)  # the first cell of a plan of slices, which torch has not


def from_csv(text: str, name: str = "csv") -> Plan:
    """Read the CSV of a schedule: keep the order of its computations, and add new transfers and completions.

    Each row is a rank, whose every stage computes; blank rows are left out, as those that editors and spreadsheets add.

    Raises:
        PlanError: the text is not such a CSV, or its order of computations is not a pipeline schedule.

    Example:
        >>> plan = from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", name="mine")
        >>> [str(action) for action in plan.actions[1]][:3]
        ['1RECV_F0', '1WAIT_RECV_F0', '1F0']
    """
    if wrong := wrong_with_name(name):
        raise PlanError(wrong)
    try:
        cells = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"))))  # which spreadsheets write first
    except csv.Error as error:
        raise PlanError(f"not a schedule: the text is not CSV, {error}") from error
    cells = [row for row in cells if any(cell.strip() for cell in row)]
    slices = 1
    if cells and (found := SLICES.fullmatch(cells[0][0].strip())):
        slices, cells[0] = int(found[1]), cells[0][1:]
    overlapped: set[MicrobatchKey] = set()
    rows = [[cell.strip() for cell in row if cell.strip() and not SHARDING.fullmatch(cell.strip())] for row in cells]
    read = ((action for cell in row for action in read_word(cell, slices, overlapped)) for row in rows)
    lanes = tuple(tuple(action for action in row if action.op in COMPUTE) for row in read)
    owners = {action.stage: rank for rank, lane in enumerate(lanes) for action in lane}
    if sorted(owners) != list(range(len(owners))) or not owners:
        raise PlanError(f"not a schedule: stages {sorted(owners)} have computations, expected 0 to {max(owners, default=0)}")
    stage_ranks = tuple(owners[stage] for stage in range(len(owners)))
    num_microbatches = 1 + max(action.microbatch for lane in lanes for action in lane) // slices
    has_backward = any(action.op is not Op.F for lane in lanes for action in lane)
    return communicate(
        Plan(
            name=name,
            flow=sliced(shaped(None, "chain", stage_ranks, num_microbatches, has_backward), slices),
            actions=lanes,
            served=((),) * len(lanes),
            slots=(None,) * len(lanes),
            overlapped=frozenset(overlapped),
        )
    )
