"""The bytes that microbatches of a kind have taken, and the signs that one takes a different amount."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bpipe.memory.saved.footprint import Footprint, spanning
from bpipe.memory.saved.shown import Shown

__all__: list[str] = []

MOST_IDLE = 8  # after this many microbatches of a kind without a gradient, all are assumed to have none
SAMPLED = 401  # one in 401 that look like a measured one is measured anyway; a prime, so that its place in a step rotates
WATCHED = 64  # microbatches in a row that must be equal before later ones are first assumed to be equal too


@dataclass
class Known:
    """Everything known about the followed microbatches of a kind."""

    footprint: Footprint  # that of the latest ones; they are equal
    largest: Footprint  # a footprint that covers all since they began to differ
    cuts: tuple[int, ...]  # the positions where parts begin
    has_kept: bool  # whether custom Functions or checkpointed regions keep tensors themselves
    varies: bool = False  # whether they differ
    is_settled: bool = False  # whether one was followed until its backward
    # how many followed ones had no gradients, and so did not show the bytes between the two passes of a split backward
    num_idle: int = 0
    shown: dict[int, int] = field(default_factory=dict)  # the bytes that their graphs show, by the number of nodes
    took: dict[int, int] = field(default_factory=dict)  # their footprints, likewise
    _patience: int = WATCHED // 2
    _num_watched: int = 0  # how many more must be followed and be equal
    _num_assumed: int = 0

    @classmethod
    def first(cls, footprint: Footprint, cuts: Sequence[int], *, has_kept: bool) -> Known:
        """Start from the footprint that the first microbatch of a kind shows after its forward."""
        return cls(footprint, footprint, tuple(cuts), has_kept)

    @property
    def is_watched(self) -> bool:
        """Whether to follow the next one, because the latest differed, or because those before did not show everything."""
        return self._num_watched > 0 or (0 < self.num_idle < MOST_IDLE and self.is_settled and self.footprint.between_bytes is None)

    @property
    def expected(self) -> Footprint:
        """The footprint of the next microbatch, or an upper bound, as far as is known."""
        return self.largest if self.varies else self.footprint

    def is_sample(self) -> bool:
        """Count a microbatch that seems to be like those before, and return whether to measure it anyway."""
        self._num_assumed += 1
        return self._num_assumed % SAMPLED == 0

    def saw(self, footprint: Footprint, num_nodes: int, shown: Shown | None) -> None:
        """Learn from a followed microbatch whose backward has ended."""
        differs = self.is_settled and footprint.num_bytes != self.footprint.num_bytes
        if differs:
            self.differed()
        if self.varies:
            self.largest = spanning(self.largest, footprint)
        if self._num_watched and not differs and shown is not None:
            self._num_watched -= 1
            self.varies &= self._num_watched > 0  # otherwise the difference was long ago
        if differs or not self.is_settled or footprint.own_bytes >= self.footprint.own_bytes:
            self.footprint = footprint.with_between_of(self.footprint)  # of the equal ones, that with the most own bytes
        self.is_settled = True
        if shown is not None:
            self.shown[num_nodes], self.took[num_nodes] = shown.num_bytes, footprint.num_bytes

    def is_like_latest(self, num_nodes: int) -> bool:
        """Return whether microbatches with `num_nodes` graph nodes had the footprint of the latest ones."""
        return self.took.get(num_nodes) == self.footprint.num_bytes

    def found(self, num_nodes: int, shown: Shown) -> Footprint:
        """Estimate the footprint of a microbatch seen only after its forward, from how its bytes differ from those before."""
        usual = next(reversed(self.shown.values()), shown.num_bytes)
        if shown.num_bytes != usual:
            self.differed()
        footprint = self.footprint.with_more(shown.num_bytes - usual) if shown.num_bytes != usual else self.footprint
        self.shown[num_nodes], self.took[num_nodes] = shown.num_bytes, footprint.num_bytes
        return footprint

    def differed(self) -> None:
        """Watch the following microbatches, and longer each time that watching ended too early."""
        if not self._num_watched:
            self._patience *= 2
        if not self.varies:
            self.largest = self.footprint
        self._num_watched, self.varies = self._patience, True
        self.shown.clear()
        self.took.clear()
