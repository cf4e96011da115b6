"""What flows were made with: skips, which users name, directions or paths of microbatches, own losses, and weights in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from keyword import iskeyword

from bpipe.errors import ConfigurationError
from bpipe.flow.flow import Flow
from bpipe.flow.shaping import shaped

__all__: list[str] = []

TAKEN = ("self", "past")  # arguments of a forward, the latter with the state of earlier slices
Skip = tuple[int, ...]  # the stage that makes a value, and the later ones that use it, in ascending order
Holders = tuple[int, ...]  # the stages that have a weight in common
Paths = tuple[tuple[int, ...], ...]


def skips_of(flow: Flow) -> tuple[Skip, ...]:
    """Return the skips of a flow: for each, the part of the model that makes a value, and those that use it."""
    found: tuple[tuple[Skip, ...]] = flow.arguments("skips") or ((),)
    return found[0]


def directions_of(flow: Flow) -> int:
    """Return how many streams of microbatches a flow has, each through stages of its own that hold the same weights."""
    _, routes, are_twins = flow.arguments("alternatives") or ((), ((),), True)
    return len(routes) if are_twins else 1


def has_own_losses(flow: Flow) -> bool:
    """Return whether each stage of a flow has a loss of its own, and gradients stay in it."""
    return flow.arguments("local") is not None


def holders_of(flow: Flow) -> tuple[Holders, ...]:
    """Return, for each weight that stages of several ranks have in common, these stages."""
    found: tuple[tuple[Holders, ...]] = flow.arguments("sums") or ((),)
    return found[0]


def paths_of(flow: Flow) -> Paths:
    """Return the stages that each microbatch of a flow passes, if they are replicas; empty if microbatches have no paths."""
    _, routes, are_twins = flow.arguments("alternatives") or ((), (), True)
    paths: Paths = () if are_twins else routes
    return paths


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
