"""Whether a step finds the sizes of its microbatches anew."""

from __future__ import annotations

import bpipe


def finds_sizes(schedule: bpipe.Schedule) -> bool:
    """Whether the latest step of a schedule that `Balanced` wraps has measured, or had a dry run before it."""
    return schedule.plan.sizes is None or schedule.session.source._dry_run is not None
