"""What it costs that a device's transfers are issued when both their ends are due: predicted steps, beside receives issued ahead.

.venv/bin/python -m benchmarks.issue_order
"""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.tables import table
from bpipe.plan.action import SERVED
from bpipe.plan.issue_order import issue_orders
from bpipe.schedules import build
from bpipe.simulator.costs import Costs, Link
from bpipe.simulator.simulation import simulate

RANKS, MICROBATCHES = 4, 16
SCHEDULES = {"1f1b": 1, "balanced_1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_h2": 1, "zbv": 2, "dualpipe_v": 2, "v_half": 2}
SAVED = 10  # times a message


def cases(num_stages: int) -> dict[str, Costs]:
    """Messages that take a share of a forward; stages that are uneven; forwards that vary by a fifth."""
    drawn = random.Random(1)
    uneven = [1 + 0.3 * (stage % 3) for stage in range(num_stages)]
    varying = [[drawn.uniform(0.8, 1.2) for _ in range(MICROBATCHES)] for _ in range(num_stages)]
    small, large = Link(bytes_per_s=20.0), Link(bytes_per_s=4.0)
    return {
        "messages 5%": Costs(output_bytes=1, saved_bytes=SAVED, link=small),
        "messages 25%": Costs(output_bytes=1, saved_bytes=SAVED, link=large),
        "5%, uneven stages": Costs(forward_s=uneven, output_bytes=1, saved_bytes=SAVED, link=small),
        "5%, varying": Costs(forward_s=varying, output_bytes=1, saved_bytes=SAVED, link=small),
    }


def main() -> None:
    rows = []
    for name, stages_per_rank in SCHEDULES.items():
        plan = build(name, RANKS * stages_per_rank, MICROBATCHES)
        issued = replace(plan, actions=tuple(tuple(a for a in order if a.op not in SERVED) for order in issue_orders(plan)))
        costs = cases(plan.num_stages).values()
        rows.append([name, *(f"{simulate(issued, one).makespan_s / simulate(plan, one).makespan_s:.3f}" for one in costs)])
    print("\n".join(table(["schedule", *cases(1)], rows)))


if __name__ == "__main__":
    main()
