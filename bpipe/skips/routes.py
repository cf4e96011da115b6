"""The messages that carry skips: values that a stage hands on to later stages than the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from keyword import iskeyword
from typing import NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.flow.flow import Flow
from bpipe.flow.shaping import shaped

__all__: list[str] = []

TAKEN = ("self", "past")  # arguments of a forward, the latter with the state of earlier slices
Skip = tuple[int, ...]  # the stage that makes a value, and the later ones that use it, in ascending order
Way = tuple[int, int]  # the stage that makes values, and the first one on a rank that uses them


class Routes(NamedTuple):
    """The ways of a plan's skips. A rank gets a value once: its first user there keeps it for the others.

    Args:
        ways: by the stage that makes values and the first one on a rank that uses them: the places of these in `skips`.
        behind: by way, the later stages on that rank that use some of these values.
        sent: by stage, the stages to which it sends messages of their own, in the order in which it sends them.
        received: by stage, the stages that send it messages of their own, likewise.
        shared: the stages that share a value with another one on their rank.
    """

    ways: dict[Way, tuple[int, ...]]
    behind: dict[Way, tuple[int, ...]]
    sent: dict[int, tuple[int, ...]]
    received: dict[int, tuple[int, ...]]
    shared: frozenset[int]

    def sources(self, stage: int) -> list[int]:
        """Return the stages that give a stage skips: those that made them, or the ones on its rank that used them first."""
        return [source if first == stage else first for (source, first), behind in self.behind.items() if stage in (first, *behind)]


def skips_of(flow: Flow) -> tuple[Skip, ...]:
    """Return the skips of a flow: for each, the part of the model that makes a value, and those that use it."""
    found: tuple[tuple[Skip, ...]] = flow.arguments("skips") or ((),)
    return found[0]


@lru_cache(maxsize=16)
def routes_in(flow: Flow) -> Routes:
    """Return the ways of a flow's skips. They are looked up for every action."""
    return routes_of(skips_of(flow), flow.stage_ranks, len(flow.stage_ranks) // len(flow.routes))


def routes_of(skips: tuple[Skip, ...], stage_ranks: tuple[int, ...], directions: int = 1) -> Routes:
    """Return the ways of a plan's skips.

    What the next stage uses first is in its message from the stage before. What a stage on the same rank uses first needs none.

    Args:
        skips: by number of stage in one direction; the other one has the same.
        stage_ranks: the rank of each stage.
        directions: of the plan.

    Example:
        >>> routes = routes_of(((0, 1, 3), (0, 2)), stage_ranks=(0, 1, 2, 1))
        >>> routes.ways, routes.behind, routes.sent, routes.received
        ({(0, 1): (0,), (0, 2): (1,)}, {(0, 1): (3,), (0, 2): ()}, {0: (2,)}, {2: (0,)})
    """
    depth = len(stage_ranks) // directions
    ways: dict[Way, list[int]] = defaultdict(list)
    behind: dict[Way, set[int]] = defaultdict(set)
    shared: set[int] = set()
    for first in range(0, directions * depth, depth):
        for place, skip in enumerate(skips):
            source, *users = (first + stage for stage in skip)
            by_rank = users_by_rank(users, stage_ranks)
            for user, *later in by_rank.values():
                ways[source, user].append(place)
                behind[source, user].update(later)
            by_rank.setdefault(stage_ranks[source], []).append(source)
            shared.update(*(stages for stages in by_rank.values() if len(stages) > 1))
    sent: dict[int, list[int]] = defaultdict(list)
    received: dict[int, list[int]] = defaultdict(list)
    for source, user in sorted(ways):
        if stage_ranks[source] != stage_ranks[user] and user != source + 1:
            sent[source].append(user)
            received[user].append(source)
    return Routes(
        {way: tuple(ways[way]) for way in sorted(ways)},
        {way: tuple(sorted(behind[way])) for way in sorted(ways)},
        {stage: tuple(users) for stage, users in sent.items()},
        {stage: tuple(sources) for stage, sources in received.items()},
        frozenset(shared),
    )


def users_by_rank(users: Iterable[int], stage_ranks: Sequence[int]) -> dict[int, list[int]]:
    """Return by rank the stages that use a value, in ascending order."""
    by_rank: dict[int, list[int]] = {}
    for user in users:
        by_rank.setdefault(stage_ranks[user], []).append(user)
    return by_rank


def named_skips(skips: Mapping[str, Sequence[int]], depth: int) -> dict[str, Skip]:
    """Return a stage's skips, by name, in the form in which plans have them.

    Raises:
        ConfigurationError: a name is not one of an argument, or a skip does not lead to later stages.
    """
    found: dict[str, Skip] = {}
    if not isinstance(skips, Mapping):
        raise ConfigurationError(f"skips={skips!r:.200}: give a dict of names, such as {{'encoded': (0, 2, 3)}}")
    for name, given in skips.items():
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name in TAKEN:
            raise ConfigurationError(f"skips={{{name!r}: ...}}: the name is that of a keyword argument of the stages that use it")
        found[name] = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        try:
            shaped(shaped(None, "chain", (0,) * depth, 1), "skips", (found[name],))
        except ValueError as error:
            raise ConfigurationError(f"skip {name!r}: {error}") from error
    return found
