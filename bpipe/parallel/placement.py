"""Placement of a pipeline's stages on nodes, so that evictor and acceptor share a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bpipe.environment import ranks_on_this_node
from bpipe.errors import ConfigurationError
from bpipe.logs import LOG
from bpipe.schedules.registry import rule_named

__all__ = ["Place", "pair_adjacent", "place"]


def pair_adjacent(num_stages: int, ranks_per_node: int) -> list[int]:
    """Return the stage that each rank should hold, so that stages x and p-1-x share a node.

    Pair-adjacent assignment (Kim et al., ICML 2023), in closed form: with n nodes and q = p/(2n), node j holds stages
    jq..(j+1)q-1 and their mirrors. Neighbouring stages then cross nodes twice as often (PipeOffload, appendix C).

    Args:
        num_stages: p, one stage per rank.
        ranks_per_node: ranks of this pipeline on each node, consecutive.

    Returns:
        p stage indices: entry r is the stage of rank r of the pipeline's group.

    Raises:
        ConfigurationError: p is not a multiple of the ranks on a node, or a node would split a pair.

    Example:
        >>> pair_adjacent(8, 4)
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if num_stages < 1 or ranks_per_node < 1 or num_stages % ranks_per_node:
        raise ConfigurationError(
            f"{num_stages} stages do not fill nodes of {ranks_per_node} ranks: choose a divisor of {num_stages}"
        )
    if ranks_per_node == num_stages:
        return list(range(num_stages))
    if ranks_per_node % 2:
        raise ConfigurationError(
            f"a node of {ranks_per_node} ranks would split a pair of stages: choose an even number of ranks per node"
        )
    q = ranks_per_node // 2
    order: list[int] = []
    for node in range(num_stages // ranks_per_node):
        early = range(node * q, (node + 1) * q)
        order += [*early, *(num_stages - 1 - stage for stage in reversed(early))]
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of a process in its pipeline.

    Args:
        group: the process group of the pipeline's ranks, for `PipelineStage`.
        index: this process among the pipeline's ranks, in the order of the stages: 0 has the first stage.
        num_ranks: p.
        stages: the stages that it holds.
        num_stages: the number of stages in the whole pipeline.
    """

    group: Any
    index: int
    num_ranks: int
    stages: tuple[int, ...]
    num_stages: int


def place(mesh: Any, *, rule: str = "1f1b", stages_per_rank: int | None = None, ranks_per_node: int | None = None) -> Place:
    """Choose the stages that this process holds in a pipeline along a dimension of a `DeviceMesh`, so that pairs share a node.

    Nothing is communicated: every rank computes the same order.

    Args:
        mesh: a mesh of one dimension, such as `init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("dp", "pp", "tp"))["pp"]`.
        rule: the schedule's name, one of `bpipe.schedules.names()`; it decides which stages share a rank.
        stages_per_rank: v; default: 1 or 2, as the rule requires.
        ranks_per_node: processes on each node, numbered consecutively; default: as many as torchrun has started here, or all.

    Raises:
        ConfigurationError: the mesh has several dimensions, or the rule is unknown or does not take these stages.

    Example:
        >>> place = bpipe.place(mesh["pp"])  # doctest: +SKIP
        >>> stage = bpipe.PipelineStage(parts[place.index], place.index, place.num_stages, device, place.group)  # doctest: +SKIP
    """
    if mesh.ndim != 1:
        raise ConfigurationError(f"a pipeline needs a mesh of one dimension, got {mesh}: choose a dimension, such as mesh['pp']")
    ranks, here = mesh.mesh.flatten().tolist(), mesh.get_local_rank()
    nodes = [rank // (ranks_per_node or ranks_on_this_node() or max(ranks) + 1) for rank in ranks]
    order = _pairs_together(nodes)
    if order is None and here == 0:
        LOG.warning(
            "rank %s: processes %s of a pipeline lie on nodes %s, where pairs of ranks x and p-1-x cannot share a node, so that "
            "evictions cross nodes. To avoid this, put an even number of consecutive ranks of the pipeline on each node.",
            *(ranks[0], ranks, nodes),
        )
    index = here if order is None else order[here]
    found = rule_named(rule)
    per_rank = found.default_stages_per_rank if stages_per_rank is None else stages_per_rank
    num_stages = per_rank * len(ranks)
    found.check_placement(num_stages, len(ranks))
    stage_ranks = found.placement.stage_ranks(len(ranks), per_rank)
    stages = tuple(stage for stage, rank in enumerate(stage_ranks) if rank == index)
    return Place(group=mesh.get_group(), index=index, num_ranks=len(ranks), stages=stages, num_stages=num_stages)


def _pairs_together(nodes: Sequence[int]) -> list[int] | None:
    """Return the pipeline's rank of each process, so that x and p-1-x are on one node; None if the nodes do not allow it."""
    num_ranks, counts = len(nodes), set(Counter(nodes).values())
    if len(counts) > 1 or list(nodes) != sorted(nodes):
        return None
    (per_node,) = counts
    return pair_adjacent(num_ranks, per_node) if per_node == num_ranks or per_node % 2 == 0 else None
