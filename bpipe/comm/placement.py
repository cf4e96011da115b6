"""Where the stages of a pipeline live: which nodes keep evictor and acceptor together."""

from __future__ import annotations

from bpipe.errors import ConfigurationError

__all__ = ["pair_adjacent"]


def pair_adjacent(num_stages: int, ranks_per_node: int) -> list[int]:
    """The stage that each rank should hold, so that stages x and p-1-x share a node.

    Pair-adjacent assignment (Kim et al., ICML 2023), in closed form: with n nodes and q = p/(2n), node j holds stages
    jq..(j+1)q-1 and their mirrors. Neighbouring stages then cross nodes twice as often (PipeOffload, appendix C).

    Args:
        num_stages: p, one stage a rank.
        ranks_per_node: ranks of this pipeline on each node, consecutive.

    Returns:
        p stage indices: entry r is the stage of rank r of the pipeline's group.

    Raises:
        ConfigurationError: p is no multiple of the ranks on a node, or a node would split a pair.

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
            f"a node of {ranks_per_node} ranks would split a pair of stages: choose an even number of ranks a node"
        )
    q = ranks_per_node // 2
    order: list[int] = []
    for node in range(num_stages // ranks_per_node):
        early = range(node * q, (node + 1) * q)
        order += [*early, *(num_stages - 1 - stage for stage in reversed(early))]
    return order
