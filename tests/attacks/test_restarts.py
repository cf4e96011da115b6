"""`torchrun --max-restarts` over one store, with a rank killed in a phase of an attempt or two: the next one is exact.

Large tensors travel through memory that ranks share, or over gloo, and the ranks have a secret then.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.job import LENT, PHASES, victims_of
from tests.docs.blocks import blocks

TIMEOUT_S = 280
PAGE = Path(__file__).parents[2] / "docs" / "when-it-hangs.md"


def ranks_in(phase: str) -> int:
    """How many ranks it takes: three evict nothing."""
    return 4 if phase in LENT else 3


SHARED = {"BPIPE_SHARED_MEMORY": "1", "BPIPE_SECRET": ""}
GLOO = {"BPIPE_SHARED_MEMORY": "0", "BPIPE_SECRET": "open sesame"}
CASES = [
    pytest.param(phase, ranks_in(phase), by, id=f"{phase}-{'gloo' if by is GLOO else 'shared'}")
    for phase in PHASES  # each in one way, because both ways of all take ten minutes
    for by in [SHARED if phase in LENT else GLOO]
]


@pytest.mark.parametrize("phase, size, by", CASES)
def test_the_attempt_after_a_kill_is_exact(phase: str, size: int, by: dict[str, str]) -> None:
    last = len(victims_of(phase, size))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(size)),
        *("--max-restarts", str(last)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "tests.attacks.job", phase),
    ]
    environment = {**os.environ, **by, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as agent:
        try:
            printed, _ = agent.communicate(timeout=TIMEOUT_S)
        finally:
            agent.terminate()  # which ends the ranks, too
    assert agent.returncode == 0, printed
    done = {(int(attempt), int(rank)) for attempt, rank in re.findall(r"attempt (\d), rank (\d): exact", printed)}
    assert {(last, rank) for rank in range(size)} <= done, printed
    assert "disagree" not in printed
    assert {attempt for attempt, _ in done} == {last} or phase == "closing", printed  # the victims were really killed


# The recipe of docs/when-it-hangs.md

ATTEMPTS = """
import signal
import torch
import bpipe
from torch import nn

model = nn.Sequential(*(nn.Linear(4, 4).requires_grad_(True) for _ in range(size)))
for number, parameter in enumerate(model.parameters()):
    nn.init.constant_(parameter, 0.1 * number)
x = torch.linspace(-1, 1, 32).reshape(8, 4)
stage = bpipe.PipelineStage(model[rank], rank, size, "cpu")
schedule = bpipe.OneFOneB(stage, 4, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=60.0))


def end(when):
    if when == WHEN and rank == WHO and int(attempt) < LAST:
        END()


schedule.step(x, target=x)
end("between steps")
if rank == WHO:
    stage.submod.register_forward_hook(lambda *_: end("in a step"))
stage.submod.zero_grad()
schedule.step(x, target=x)
mine = stage.submod.weight.grad.clone()
model.zero_grad()
for part in x.chunk(4):
    (nn.functional.mse_loss(model(part), part) / 4).backward()
assert torch.equal(mine, model[rank].weight.grad)
end("before closing")
schedule.close()
dist.barrier()
print(f"attempt {attempt}, rank {rank}: exact", flush=True)
dist.destroy_process_group()
"""
ENDS = [  # how a rank ends, when, which, and in how many attempts
    pytest.param("lambda: os.kill(os.getpid(), 9)", "in a step", 1, 2, id="killed in a step, twice"),
    pytest.param("lambda: 1 / 0", "in a step", 1, 1, id="raises in a step"),
    pytest.param("lambda: sys.exit(1)", "before closing", 0, 1, id="leaves before closing"),
    pytest.param("signal.raise_signal", "between steps", 1, 1, id="is terminated"),
]


@pytest.mark.parametrize("how, when, who, last", ENDS)
def test_the_recipe_of_the_page_restarts_all_ranks(how: str, when: str, who: int, last: int, tmp_path: Path) -> None:
    """Without it a plain program of gloo fails as well, in the second attempt."""
    if how == "signal.raise_signal":
        how = f"lambda: signal.raise_signal({int(signal.SIGTERM)})"
    (recipe,) = [block.code for block in blocks(PAGE.read_text()) if block.note == "run by tests/attacks/test_restarts.py"]
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nEND, WHEN, WHO, LAST = {how}, {when!r}, {who}, {last}\n{recipe}{ATTEMPTS}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["--max-restarts", str(last), str(program)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PAGE.parents[1])}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout
    done = sorted(re.findall(r"attempt (\d), rank (\d): exact", ran.stdout))
    assert done == [(str(last), str(rank)) for rank in range(3)], ran.stdout
