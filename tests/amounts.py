"""A stage's amounts by the names of their numbers: what a test says of messages, states and gradients."""

from __future__ import annotations

from collections import defaultdict

from bpipe.schedules import Amount, StageSizes

# What each number is: the amount's name, and its field.
NUMBERS = {
    "received": ("in", "num_bytes"),
    "kept_received": ("in", "kept"),
    "sent": ("out", "num_bytes"),
    "kept_sent": ("out", "kept"),
    "results": ("loss", "num_bytes"),
    "kept_results": ("loss", "kept"),
    "state": ("state", "num_bytes"),
    "given": ("given", "num_bytes"),
    "collected": ("collected", "num_bytes"),
    "gradients": ("gradients", "num_bytes"),
}


def amounts(**numbers: int) -> tuple[Amount, ...]:
    """The amounts that have these numbers, and 0 for the others."""
    fields: dict[str, dict[str, int]] = defaultdict(lambda: {"num_bytes": 0})
    for number, value in numbers.items():
        name, field = NUMBERS[number]
        fields[name][field] = value
    return tuple(Amount(name, **of_name) for name, of_name in fields.items())


def number_of(sizes: StageSizes, number: str) -> int:
    """One number of a stage's sizes; `fixed` is one, too."""
    if number not in NUMBERS:
        return int(getattr(sizes, number))
    name, field = NUMBERS[number]
    return int(getattr(sizes[name], field))


def changed(sizes: StageSizes, **numbers: int) -> StageSizes:
    """Sizes with other numbers of amounts."""
    known = {number: number_of(sizes, number) for number in NUMBERS}
    return sizes.with_amounts(*amounts(**(known | numbers)))
