"""The graph of stages that torch's tracer has cut a model into: what passes a stage in between is refused when a stage is given."""

from __future__ import annotations

from typing import Any

from bpipe.errors import ConfigurationError

__all__: list[str] = []


def check_neighbours(stage: Any) -> None:
    """Raise if a stage of torch's tracer belongs to a model whose stages need values of others than the one before.

    Raises:
        ConfigurationError: one does; it names both stages.
    """
    graph = getattr(getattr(stage, "pipe_info", None), "graph", None)
    stages = [] if graph is None else [node for node in graph.nodes if node.op == "call_module"]
    for index, node in enumerate(stages):
        for source in map(_maker, node.all_input_nodes):
            if source in stages and stages.index(source) != index - 1:
                raise ConfigurationError(
                    f"torch's tracer has cut the model so that stage {index} needs a value of stage {stages.index(source)}, which "
                    "does not stand before it, and schedules hand values on from stage to stage: cut the model with "
                    "bpipe.split_traced, which makes skips of such values (docs/skips.md)"
                )


def _maker(node: Any) -> Any:
    """Return the node whose value, or a part of it, a node of the graph of stages stands for."""
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
