"""Where the records are that features add to that of a step: each in a room of its own, which fills it, checks it and reads it."""

from __future__ import annotations

__all__: list[str] = []

ROOMS = {  # by the name of its type, in the order in which they are checked: a difference in one explains differences in later ones
    "Cut": "bpipe.model.cut",
    "BatchRecord": "bpipe.session.batches",
    "SliceLengths": "bpipe.slices.slicing",
    "TwinRecord": "bpipe.twins.exchange",
    "SharedRecord": "bpipe.parallel.shared_weights",
    "PeakRecord": "bpipe.session.fullest",
    "MeasuredRecord": "bpipe.api.measured_plans",
}
