"""Run a forward and a backward side by side, and change over where one of them communicates (DualPipe, arXiv 2412.19437)."""

from bpipe.overlap.points import all_to_all, yield_here
from bpipe.overlap.two_threads import TwoThreads

__all__ = ["TwoThreads", "all_to_all", "yield_here"]
