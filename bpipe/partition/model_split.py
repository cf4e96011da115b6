"""Cut a model into stages by the names of its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from bpipe.checks import check_choice
from bpipe.errors import ConfigurationError
from bpipe.model.cut import mark
from bpipe.partition.name_lists import Names
from bpipe.partition.skeleton import KINDS, skeleton

__all__ = ["at_cuts", "split_model"]

Missing = str | Mapping[str, str]


def split_model(
    model: nn.Module, stages: Sequence[Sequence[str]], *, missing: Missing = "pass", keep_positions: bool = False
) -> list[nn.Module]:
    """Cut a model into stages, by lists of fully qualified names.

    A stage is a copy of the model without what others have: it has the same class and forward, shares the modules and
    parameters that it keeps, under their names (`layers.5.weight` keeps its name), and copies nothing that holds memory. It works
    on the meta device. `split_model(model, stages)[rank]` frees the rest as soon as nothing else holds the model.

    The forward of each stage is the model's, fed with what the stage before returned. Not every forward works with missing
    modules: `check_split` proves a split on an example, and should be run once for each kind of model. All ranks of a pipeline
    must give the same lists: the first step compares them, unless a wrapper (DDP) hides the marks on the parts.

    Args:
        model: the whole model; it is not changed.
        stages: for each stage the names of its modules, as in torchtitan's `module_fqns_per_model_part`;
            `bpipe.partition.model_split.at_cuts` makes such lists from the first layer of each stage. A module that several stages
            name, or a weight of theirs (tied embeddings), is shared by them: where they are different processes, each step adds
            its gradients up, and statistics of a norm are refused. Parameters and buffers of a module that is itself not named may
            be named: the stages that name them have them; buffers without a name in any list are on all stages. Such entries of an
            `nn.ParameterList` or `nn.ParameterDict` go with those of a series of modules beside it that has the same entries.
        missing: what stands where a module is missing: "pass" (it returns its first argument), "none" (`None`, which
            torchtitan's models expect), "zero" (a number that changes nothing when added, for embeddings of positions), or a
            dict that says so by name, and "pass" for others.
        keep_positions: True to replace missing entries of `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict` too, where a
            forward looks something up by a layer's position, and those of lists and dicts of parameters by None; by default they
            are left out, so that loops skip them, and the first parameter that a stage has is entry 0 of its list.

    Returns:
        The stages, in order.

    Raises:
        ConfigurationError: the lists do not make up the model: unknown names, modules or parameters that no stage has, layers in
            another order, empty stages. The message lists every problem.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> first, last = split_model(model, [["0", "1"], ["2"]])
        >>> list(last.state_dict()), last[0] is model[2]
        (['2.weight', '2.bias'], True)
    """
    names = Names(model, "split_model cuts")
    lists = names.in_step([listed(one) for one in stages])
    names.check(lists, keep_positions=keep_positions)
    kinds = _kinds(missing, names)
    claimed = {name for one in lists for name in one}
    parts = [
        skeleton(model, names, kept, lambda name: kinds.get(name, kinds[""]), claimed=claimed, keep_positions=keep_positions)
        for kept in lists
    ]
    mark(parts, [sorted(kept) for kept in lists])  # the order of a stage's names changes nothing
    return parts


def at_cuts(layers: Sequence[str], cuts: Sequence[str]) -> list[list[str]]:
    """Make the lists that `split_model` takes from the layers' names, in order, and the first layer of each later stage.

    Raises:
        ConfigurationError: a cut that is not a layer, or out of order.

    Example:
        >>> at_cuts(["tok", "layers.0", "layers.1", "head"], ["layers.1"])
        [['tok', 'layers.0'], ['layers.1', 'head']]
    """
    ordered = list(layers)
    unknown = [cut for cut in cuts if cut not in ordered]
    if unknown:
        raise ConfigurationError(f"cuts at {', '.join(unknown)}, which are none of the layers {', '.join(ordered)}")
    ends = [0, *(ordered.index(cut) for cut in cuts), len(ordered)]
    if any(before >= after for before, after in pairwise(ends)):
        raise ConfigurationError(f"cuts at {', '.join(cuts)}: give them once each, in the order of the layers, after the first one")
    return [ordered[start:end] for start, end in pairwise(ends)]


def listed(names: Sequence[str]) -> list[str]:
    """Return one stage's names as a list."""
    if isinstance(names, str):
        raise ConfigurationError(f"a stage is a list of names, got the text {names!r}: write [{names!r}]")
    return list(names)


def _kinds(missing: Missing, names: Names) -> dict[str, str]:
    """Return the kind of placeholder of each missing module by name, and under "" that of all others."""
    if isinstance(missing, str):
        check_choice("missing", missing, [*KINDS])
        return {"": missing}
    for name, kind in missing.items():
        check_choice(f"missing[{name!r}]", kind, [*KINDS])
        if name not in names.modules:
            raise ConfigurationError(f"missing[{name!r}]: the model has no such module")
    return {"": "pass", **missing}
