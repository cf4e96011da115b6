"""Train without one of torch's private names that bpipe asks for while it is imported.

`python -m tests.torch_private.without` prints a line of JSON for each.
"""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn

RUNS = "runs"


@contextmanager
def hidden(*hidden_names: str) -> Iterator[list[str]]:
    """Let bpipe find nothing where it asks torch for some private names; get a list of all that it asks for meanwhile."""
    from bpipe.torch_private import names

    asked: list[str] = []

    def found(owner: object, name: str, default: object) -> object:
        asked.append(name)
        return default if name in hidden_names else builtins.getattr(owner, name, default)

    names.getattr = found  # type: ignore[attr-defined]  # a global of the module comes before the builtin
    try:
        yield asked
    finally:
        del names.getattr  # type: ignore[attr-defined]


def trained(kind: str) -> str:
    """Run a step, and return RUNS or the error's type and text."""
    import bpipe

    stages = 4
    loopback = bpipe.Loopback(stages)
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(stages)]
    made = [bpipe.PipelineStage(module, i, stages, "cpu", group=loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [getattr(bpipe, kind)(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss) for stage in made]
    try:
        loopback.step(schedules, torch.ones(4, 4), target=torch.zeros(4, 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return RUNS


def imports(*hidden_names: str) -> list[str]:
    """Import all public names without some of torch's private ones, and return those that this asked for."""
    import bpipe

    with hidden(*hidden_names) as asked:
        for name in bpipe.__all__:
            getattr(bpipe, name)
    return list(dict.fromkeys(asked))


def imported_and_trained(name: str) -> dict[str, str]:
    imports(name)
    with hidden(name):
        return {"name": name, **{kind: trained(kind) for kind in ("OneFOneB", "BalancedOneFOneB")}}


def in_a_child(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process that has not imported bpipe's rooms, and return its result."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, json.dumps(function(*args)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    os.waitpid(child, 0)
    return json.loads(text)


if __name__ == "__main__":
    for name in in_a_child(imports):
        print(json.dumps(in_a_child(imported_and_trained, name)), flush=True)
