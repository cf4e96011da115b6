"""Units: what passes through the stages by itself, whole microbatches, or the slices into which each one is cut."""

from __future__ import annotations

__all__: list[str] = []


class Units(int):
    """How many units a microbatch has: its slices, or 1 if it is whole. Slice s of microbatch i is unit i * units + s.

    Example:
        >>> Units(1).name(4), Units(3).name(4), Units(3).text(4)
        ('microbatch 4', 'slice 1 of microbatch 1', '1/1')
    """

    @property
    def are_slices(self) -> bool:
        """Whether microbatches are cut."""
        return self > 1

    @property
    def parts(self) -> str:
        """What a microbatch is cut into, to be said behind it; empty if it is whole."""
        return f" of {self} slices" if self.are_slices else ""

    def of(self, microbatch: int) -> range:
        """Return the units of a microbatch, in the order of its sequence."""
        return range(microbatch * self, (microbatch + 1) * self)

    def text(self, unit: int) -> str:
        """Write a unit: `3`, or `3/1` if it is a slice."""
        return f"{unit // self}/{unit % self}" if self.are_slices else f"{unit}"

    def name(self, unit: int) -> str:
        """Return the name of a unit in words."""
        return f"slice {unit % self} of microbatch {unit // self}" if self.are_slices else f"microbatch {unit}"

    def read(self, microbatch: str, place: str | None) -> int:
        """Return the unit of which the numbers are written; the second one only if it is a slice.

        Raises:
            ValueError: there is no such unit.
        """
        number = int(place or 0)
        if (place is None) is self.are_slices or number >= self:
            one = f"one of its {self} slices, such as 2F0/{self - 1}" if self.are_slices else "a whole microbatch, such as 2F0"
            raise ValueError(f"of a plan with slices={self}: expected {one}")
        return int(microbatch) * self + number


WHOLE = Units(1)
