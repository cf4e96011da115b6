"""The control graph: which ranks are linked, and whom a rank sends to in each round of a collective call.

Few ranks are all linked, and one round is enough. Of p ranks that are more, rank r is linked with the ranks r + 2^k and r - 2^k
modulo p. That is at most 2 log2 p links, rounded up, and between any two ranks there are at most log2 p of them. In round k each
rank sends to r + 2^k what it knows of the 2^k ranks up to itself, so after log2 p rounds all know of all (Bruck et al., 1997:
"Efficient algorithms for all-to-all communications"). No rank is special, and a lost one leaves the others connected.
"""

from __future__ import annotations

from functools import cache

__all__: list[str] = []

FEW = 6  # ranks: the graph of more ranks has no fewer links up to here


@cache
def strides(size: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each round of a collective call, how far ahead of a rank those are that it sends to.

    >>> strides(4), strides(9)
    (((1, 2, 3),), ((1,), (2,), (4,), (8,)))
    """
    if size <= FEW:
        return (tuple(range(1, size)),)
    return tuple((1 << k,) for k in range((size - 1).bit_length()))


def links(rank: int, size: int) -> frozenset[int]:
    """Return the ranks that a rank of a pipeline of `size` ranks is linked with.

    >>> sorted(links(0, 4)), sorted(links(0, 16))
    ([1, 2, 3], [1, 2, 4, 8, 12, 14, 15])
    """
    ahead = [stride for of_round in strides(size) for stride in of_round]
    return frozenset((rank + step) % size for stride in ahead for step in (stride, -stride))


@cache
def told_by(rank: int, source: int, size: int) -> frozenset[int]:
    """Return of which ranks another one tells this rank in a call, at most.

    >>> [sorted(told_by(0, source, 12)) for source in (11, 10, 8, 4, 1)], sorted(told_by(0, 1, 4))
    ([[11], [9, 10], [5, 6, 7, 8], [1, 2, 3, 4], []], [1])
    """
    stride = (rank - source) % size
    number = 1 if size <= FEW else min(stride, size - stride) if (stride,) in strides(size) else 0
    return frozenset((source - back) % size for back in range(number))


def onward(rank: int, source: int, size: int) -> frozenset[int]:
    """Return to whom a rank forwards what all ranks have to know: its links, but for those of the rank that has told it."""
    return links(rank, size) - links(source, size) - {source}
