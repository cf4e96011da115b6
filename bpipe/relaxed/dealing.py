"""Deal microbatches to the replicas of a stage by their speed, as SWARM does (Ryabinin et al., ICML 2023, arXiv 2301.11913)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace

from bpipe.errors import ConfigurationError

__all__ = ["deal"]


def deal(num_microbatches: int, throughputs: Sequence[float]) -> list[int]:
    """Deal microbatches to the replicas of a stage, in proportion to their speeds.

    It is SWARM's interleaved round robin: a heap has the time for which each replica has been given work; the one with the least
    gets the next microbatch, and 1/throughput more. Of those with equal times the first one gets it, so that all ranks deal alike.

    Args:
        num_microbatches: m, how many to deal.
        throughputs: of each replica, the microbatches it computes in a second, or in any unit; 0 for one that is not there.

    Returns:
        The replica of each microbatch.

    Raises:
        ConfigurationError: a throughput is negative or not finite, or no replica is there.

    Example:
        >>> deal(7, [1, 2, 4])
        [0, 1, 2, 2, 1, 2, 2]
        >>> [deal(56, [1, 2, 4]).count(replica) for replica in range(3)]
        [8, 16, 32]
    """
    if not all(math.isfinite(one) and one >= 0 for one in throughputs):
        given = list(throughputs)
        raise ConfigurationError(f"throughputs {given}: give microbatches per second, and 0 for a replica that is not there")
    counts = [0] * len(throughputs)  # because sums of 1/throughput are rounded
    heap = [(0.0, replica) for replica, throughput in enumerate(throughputs) if throughput]
    if not heap:
        raise ConfigurationError(f"throughputs {list(throughputs)}: no replica is there, and the stage is on one at least")
    heapify(heap)
    dealt = []
    for _ in range(num_microbatches):
        _, replica = heap[0]
        counts[replica] += 1
        heapreplace(heap, (counts[replica] / throughputs[replica], replica))
        dealt.append(replica)
    return dealt
