"""The messages that carry skips: values that a stage hands on to later stages than the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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

    What the next stage uses first is in its message from the stage before. What a stage on the same rank uses first needs none.

    Args:
        ways: by the stage that makes values and the first one on a rank that uses them: the places of these in `skips`.
        behind: by way, the later stages on that rank that use some of these values.
    """

    ways: dict[Way, tuple[int, ...]]
    behind: dict[Way, tuple[int, ...]]


def skips_of(flow: Flow) -> tuple[Skip, ...]:
    """Return the skips of a flow: for each, the part of the model that makes a value, and those that use it."""
    found: tuple[tuple[Skip, ...]] = flow.arguments("skips") or ((),)
    return found[0]


@lru_cache(maxsize=16)
def routes_in(flow: Flow) -> Routes:
    """Return the ways of a flow's skips, which are by number of stage in one direction: the other one has the same.

    They are looked up for every action.

    Example:
        >>> routes = routes_in(shaped(shaped(None, "chain", (0, 1, 2, 1), 1), "skips", ((0, 1, 3), (0, 2))))
        >>> routes.ways, routes.behind
        ({(0, 1): (0,), (0, 2): (1,)}, {(0, 1): (3,), (0, 2): ()})
    """
    ways: dict[Way, list[int]] = defaultdict(list)
    behind: dict[Way, set[int]] = defaultdict(set)
    for first in range(0, len(flow.stage_ranks), len(flow.routes)):
        for place, skip in enumerate(skips_of(flow)):
            source, *users = (first + stage for stage in skip)
            by_rank: dict[int, list[int]] = defaultdict(list)
            for user in users:
                by_rank[flow.stage_ranks[user]].append(user)
            for user, *later in by_rank.values():
                ways[source, user].append(place)
                behind[source, user].update(later)
    return Routes({way: tuple(ways[way]) for way in sorted(ways)}, {way: tuple(sorted(behind[way])) for way in sorted(ways)})


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
