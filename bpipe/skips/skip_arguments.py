"""How stages are called that hand values on: they get them by keyword, and return (output, values)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bpipe.engine.conventions import Call, Convention
from bpipe.engine.setup import Setup
from bpipe.errors import CommError, StageError
from bpipe.flow.flow import value_name
from bpipe.flow.shape_arguments import skips_of

__all__: list[str] = []


class SkipArguments(Convention):
    """The convention of skips. A value of the flow is a dict of those that go from one stage to the same others, by name."""

    def __init__(self, setup: Setup) -> None:
        in_plan, self._depth = skips_of(setup.plan.flow), setup.plan.depth
        given = next(iter(setup.stages.values())).skips
        self._names = {value_name(skip): {name for name, of in given.items() if of == skip} for skip in in_plan}
        self._made: dict[int, list[str]] = {}  # by stage in one direction
        for source, *users in in_plan:
            self._made.setdefault(source, []).append(value_name((source, *users)))

    def title(self, name: str) -> str:
        names = ", ".join(map(repr, sorted(self._names.get(name, ()))))
        return names and f"the skip {names}"

    def arguments(self, call: Call, values: Mapping[str, Any], entered: Sequence[torch.Tensor]) -> None:
        stage = call.state.stage
        for value, parts in values.items():
            if parts.keys() != (expected := self._names[value]):
                raise CommError(
                    f"{call.state}: the message from stage {value.partition('-')[0]} carries the skips {_listed(parts)}, expected "
                    f"{_listed(expected)}: give all ranks' stages the same skips"
                )
            for name in call.kwargs.keys() & parts.keys():
                raise StageError(f"step({name}=...): stage {stage} gets a skip of this name from the pipeline; rename one")
            call.kwargs = {**call.kwargs, **parts}

    def taken(self, call: Call, result: Any) -> Any:
        made = self._made.get(call.state.stage % self._depth)
        if not made:
            return result
        names = {name for value in made for name in self._names[value]}
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        if not is_pair or result[1].keys() != names:
            seen = f"(output, a dict of {_listed(result[1])})" if is_pair else f"a {type(result).__qualname__}"
            raise StageError(
                f"{call.state}: a stage that hands on skips returns (output, values), where values is a dict with the keys "
                f"{_listed(sorted(names))}; this one returned {seen}"
            )
        output, values = result
        call.values = {value: {name: values[name] for name in sorted(self._names[value])} for value in made}
        return output


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
