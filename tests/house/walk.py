"""What a step does, in a loopback of four ranks: for one microbatch that is evicted, call by call; and all that a reader meets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from typing import NamedTuple

from tests.house.source import Source

WALK = """
import importlib, json, sys
import torch
from torch import nn
import bpipe
from bpipe.schedules import Op
run_module, proof_module = (importlib.import_module(name) for name in sys.argv[1:])

proofs, verify = 0, proof_module.verify
def counted(plan):
    global proofs
    proofs += 1
    return verify(plan)
for module in list(sys.modules.values()):
    if getattr(module, "verify", None) is verify and module.__name__.startswith("bpipe"):
        module.verify = counted

root = bpipe.__path__[0] + "/"
before, calls, actions, execute = [], [], [], run_module.Run.execute
into = before
def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        into.append((frame.f_code.co_filename.removeprefix(root), frame.f_code.co_qualname))
def walked(self, action):
    global into
    into = calls
    if is_followed := (action.stage, action.microbatch) == (0, FOLLOWED):
        actions.append(str(action))
    sys.setprofile(enter if is_followed else None)
    try:
        execute(self, action)
    finally:
        sys.setprofile(None)
loopback = bpipe.Loopback(4)
modules = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
stages = [bpipe.PipelineStage(module, i, 4, "cpu", group=loopback.rank(i)) for i, module in enumerate(modules)]
bpipe.Balanced(bpipe.OneFOneB(stages[0], 8, loss_fn=nn.functional.mse_loss), budget="lowest").close()
made = proofs
schedules = [bpipe.BalancedOneFOneB(stage, 8, loss_fn=nn.functional.mse_loss) for stage in stages]
x = torch.randn(16, 64)
loopback.step(schedules, x, target=x)
loopback.step(schedules, x, target=x)
FOLLOWED = next(a.microbatch for a in schedules[0].plan.actions[0] if a.op is Op.EVICT)
run_module.Run.execute = walked
sys.setprofile(enter)
loopback.step(schedules, x, target=x)
run_module.Run.execute, into = execute, []
sys.setprofile(enter)
loopback.step(schedules, x, target=x)
sys.setprofile(None)
print(json.dumps([before, calls, actions, sorted(set(into)), made]))
"""

Calls = list[tuple[str, str]]  # of functions, each with its file in bpipe/


class Walk(NamedTuple):
    """What a step does, for a microbatch that is evicted and as a whole.

    Args:
        before: calls until the first action.
        calls: calls in the actions for this microbatch, on all ranks.
        actions: these.
        met: the functions that a whole step calls, on all ranks, each once. It is the fourth step: the first one learns, and in
            the second and third the first and the last rank compare their batches, which they seldom do.
        proofs: the plans that a rank proves when its balanced schedule is made.
    """

    before: Calls
    calls: Calls
    actions: list[str]
    met: Calls
    proofs: int

    @property
    def files(self) -> list[str]:
        return [file for file, _ in self.calls]

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in pairwise(self.files))

    @property
    def files_met(self) -> set[str]:
        """The files of which a whole step calls something."""
        return {file for file, _ in self.met}

    @property
    def classes_met(self) -> set[tuple[str, str]]:
        """The classes of which a whole step calls something, each with its file.

        A class counts if a function that stands in its body runs: a method, a property, a generator, a lambda or a comprehension
        inside one. What an instance inherits counts for the class that defines it. Methods that `dataclass` and `NamedTuple`
        generate count for none: nobody reads them, and a record that is only made and read is met as its fields are.
        """
        owners = [(file, name.partition(".<locals>")[0].rpartition(".")[0]) for file, name in self.met]
        return {(file, owner) for file, owner in owners if owner}


def walk(source: Source) -> Walk:
    (run,) = (module.name for module in source.package if module.path.name == "run.py")
    (proof,) = (module.name for module in source.package if re.search(r"^def verify\(", module.text, re.MULTILINE))
    command = [sys.executable, "-c", WALK, run, proof]
    environment = os.environ | {"PYTHONPATH": str(source.root)}
    done = subprocess.run(command, cwd=source.root, env=environment, capture_output=True, text=True, check=True)
    before, calls, actions, met, proofs = json.loads(done.stdout)
    return Walk(*([tuple(call) for call in of] for of in (before, calls)), actions, [tuple(call) for call in met], proofs)
