"""The peers that may store a rank's remote activations, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from bpipe.checks import check_choice
from bpipe.errors import ConfigurationError
from bpipe.plan.action import HOST

__all__ = ["Destinations"]

Host = Literal["no", "last", "only"]


def mirror_pairs(num_ranks: int) -> tuple[int, ...]:
    """Return the paper's pairs: rank x evicts to rank p-1-x."""
    return tuple(reversed(range(num_ranks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """The peers that may store a rank's remote activations.

    Args:
        pairs: the rank to which each rank evicts first; default: p-1-x.
        others: whether any other rank with free memory may store activations that the pair cannot.
        nodes: the node of each rank; the others on the rank's own node come first. Default: all on one.
        host: whether a rank may evict to its own host's memory: "no", "last" (if no rank has free memory) or "only".

    Example:
        >>> Destinations(nodes=(0, 0, 1, 1)).of(0, room=[0, 2, 5, None])
        [3, 1, 2]
    """

    pairs: Sequence[int] | None = None
    others: bool = True
    nodes: Sequence[int] | None = None
    host: Host = "no"

    def check(self, num_ranks: int) -> None:
        """Raise unless the destinations fit a number of ranks.

        Raises:
            ConfigurationError: they do not fit.
        """
        ranks = range(num_ranks)
        if self.pairs is not None and (len(self.pairs) != num_ranks or any(pair not in ranks for pair in self.pairs)):
            raise ConfigurationError(
                f"pairs={tuple(self.pairs)}: name one acceptor, a rank from 0 to {num_ranks - 1}, for each rank"
            )
        if self.nodes is not None and len(self.nodes) != num_ranks:
            raise ConfigurationError(f"nodes={tuple(self.nodes)}: give the node of each of {num_ranks} ranks")
        check_choice("host", self.host, get_args(Host))

    def of(self, rank: int, room: Sequence[int | None]) -> list[int]:
        """Return the acceptors of a rank, best first: its pair, its node, then by free memory; None means unlimited."""
        pair = (mirror_pairs(len(room)) if self.pairs is None else self.pairs)[rank]
        others = [other for other in range(len(room)) if self.others or other == pair]
        node = None if self.nodes is None else self.nodes[rank]

        def distance(other: int) -> tuple[bool, bool, float]:
            left = room[other]
            is_across = self.nodes is not None and self.nodes[other] != node
            return other != pair, is_across, float("-inf") if left is None else -left

        peers = [] if self.host == "only" else sorted((other for other in others if other != rank), key=distance)
        return peers + [HOST] * (self.host != "no")
