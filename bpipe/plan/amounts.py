"""Human-readable numbers of bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence

__all__: list[str] = []


def show_bytes(num_bytes: float) -> str:
    """Format a number of bytes for people, with three digits.

    Example:
        >>> show_bytes(1610612736), show_bytes(0)
        ('1.50 GiB', '0 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """Write a time for people, with three digits.

    Example:
        >>> show_seconds(0.0123), show_seconds(33), show_seconds(0)
        ('12.3 ms', '33.0 s', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def show_each(amounts: Sequence[int | None]) -> str:
    """Format one number of bytes per rank, or a single one if all read alike; `-` stands for None.

    Example:
        >>> show_each([2**30, 2**31]), show_each([4096, 4097]), show_each([None, 1])
        ('1.00 GiB, 2.00 GiB', '4.00 KiB', '-, 1 B')
    """
    texts = ["-" if amount is None else show_bytes(amount) for amount in amounts]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def three_digits(number: float) -> str:
    return f"{number:.{max(0, 3 - len(str(int(number))))}f}"
