"""The messages that carry skips: values that a stage hands on to later stages than the next one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

__all__: list[str] = []

Skip = tuple[int, ...]  # the stage that makes a value, and the later ones that use it, in ascending order


class Routes(NamedTuple):
    """The ways of a plan's skips. A rank gets a value once: its first user there keeps it for the others.

    Args:
        ways: by the stage that makes values and the first one on a rank that uses them: the places of these in `skips`.
        sent: by stage, the stages to which it sends messages of their own, in the order in which it sends them.
        received: by stage, the stages that send it messages of their own, likewise.
        shared: the stages that share a value with another one on their rank.
    """

    ways: dict[tuple[int, int], tuple[int, ...]]
    sent: dict[int, tuple[int, ...]]
    received: dict[int, tuple[int, ...]]
    shared: frozenset[int]


def routes_of(skips: tuple[Skip, ...], stage_ranks: tuple[int, ...], directions: int = 1) -> Routes:
    """Return the ways of a plan's skips.

    What the next stage uses first is in its message from the stage before. What a stage on the same rank uses first needs none.

    Args:
        skips: by number of stage in one direction; the other one has the same.
        stage_ranks: the rank of each stage.
        directions: of the plan.

    Example:
        >>> routes = routes_of(((0, 1, 3), (0, 2)), stage_ranks=(0, 1, 2, 1))
        >>> routes.ways, routes.sent, routes.received
        ({(0, 1): (0,), (0, 2): (1,)}, {0: (2,)}, {2: (0,)})
    """
    depth = len(stage_ranks) // directions
    ways: dict[tuple[int, int], list[int]] = defaultdict(list)
    shared: set[int] = set()
    for first in range(0, directions * depth, depth):
        for place, (source, *users) in enumerate(skips):
            by_rank = {stage_ranks[first + user]: first + user for user in reversed(users)}
            for user in sorted(by_rank.values()):
                ways[first + source, user].append(place)
            involved = [first + stage for stage in (source, *users)]
            num_involved = Counter(stage_ranks[stage] for stage in involved)
            shared.update(stage for stage in involved if num_involved[stage_ranks[stage]] > 1)
    sent: dict[int, list[int]] = defaultdict(list)
    received: dict[int, list[int]] = defaultdict(list)
    for source, user in sorted(ways):
        if stage_ranks[source] != stage_ranks[user] and user != source + 1:
            sent[source].append(user)
            received[user].append(source)
    return Routes(
        {way: tuple(ways[way]) for way in sorted(ways)},
        {stage: tuple(users) for stage, users in sent.items()},
        {stage: tuple(sources) for stage, sources in received.items()},
        frozenset(shared),
    )


def wrong_with(skips: Sequence[Skip], depth: int) -> str:
    """Return why a plan of so many stages cannot have these skips; empty if it can."""
    if list(skips) != sorted(set(skips)):
        return f"skips {skips!r:.200} are not in ascending order, or one is there twice"
    for skip in skips:
        if len(skip) < 2 or list(skip) != sorted(set(skip)) or skip[0] < 0 or skip[-1] >= depth:
            return f"a skip {skip!r:.200}: expected a stage, then later ones in ascending order, up to {depth - 1}"
    return ""
