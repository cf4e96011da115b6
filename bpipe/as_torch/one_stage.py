"""torch's schedules of one stage per rank: bpipe's own classes, whose arguments are torch's in the same order."""

from bpipe.api.catalogue import GPipe, OneFOneB

__all__ = ["Schedule1F1B", "ScheduleGPipe"]

Schedule1F1B = OneFOneB
ScheduleGPipe = GPipe
