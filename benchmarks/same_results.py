"""Two trees of bpipe beside each other: whether their gradients, plans and predicted bytes are equal, and how fast each plans.

    git worktree add ../before <commit>
    .venv/bin/python -m benchmarks.same_results ../before .

Every schedule runs two steps in one process, plain and with each kind of balance, in both trees. A case that one of the trees does
not know is named and left out. Planning is timed in processes that take turns; a ratio is of the medians of their CPU seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

RANKS, MICROBATCHES, WIDTH, STEPS, TURNS = 4, 8, 8, 2, 5
SCHEDULES = {  # and the stages of a rank
    **dict.fromkeys(("GPipe", "OneFOneB", "ZBH1", "ZBH2"), 1),
    **dict.fromkeys(("Interleaved1F1B", "BreadthFirst", "ZBV", "VHalf", "VMin", "DualPipeV"), 2),
}
OPTIONS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "lowest": {"budget": "lowest"},
    "parts": {"budget": "lowest", "parts": 2},
    "inside": {"budget": "lowest", "parts": 2, "inside": True},
    "recompute": {"budget": None, "by": "recompute"},
}
NUMBERS = ("peak_bytes", "predicted_peak_bytes", "device_peak_bytes", "predicted_device_peak_bytes", "evicted_bytes")
PLANS = {
    "1f1b, 32 x 512": ("1f1b", 32, 512),
    "balanced_1f1b, 32 x 512": ("balanced_1f1b", 32, 512),
    "zbv, 32 x 128": ("zbv", 32, 128),
}


def results() -> Iterator[tuple[str, Any]]:
    """Run every case in this process's tree, and yield its name and its result."""
    for name in SCHEDULES:
        for kind, options in OPTIONS.items():
            try:
                yield f"{name} {kind}", run(name, options)
            except Exception as error:
                yield f"{name} {kind}", {"error": f"{type(error).__name__}: {str(error)[:80]}"}


def run(name: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Run one case: a hash of all gradients and losses, the plan of each rank's schedule, and its numbers."""
    import torch
    from torch import nn

    import bpipe

    num_stages, schedule = RANKS * SCHEDULES[name], getattr(bpipe, name)
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(num_stages)
    ]
    x, losses = torch.randn(2 * MICROBATCHES, WIDTH), []
    held = bpipe.schedules.build(schedule.rule, num_stages, MICROBATCHES, num_ranks=RANKS).stage_ranks
    loopback, schedules = bpipe.Loopback(RANKS), []
    for rank in range(RANKS):
        mine = [i for i in range(num_stages) if held[i] == rank]
        stages = [bpipe.PipelineStage(blocks[i], i, num_stages, "cpu", loopback.rank(rank)) for i in mine]
        one = schedule(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        schedules.append(one if options is None else bpipe.Balanced(one, **options))
    for _ in range(STEPS):
        losses.append(torch.zeros(0))
        loopback.step(schedules, x, target=x, return_outputs=False)
    digest = hashlib.sha256()
    for block in blocks:
        for p in block.parameters():
            digest.update(p.grad.numpy().tobytes() if p.grad is not None else b"none")
    plans = [hashlib.sha256(str(one.plan.actions).encode()).hexdigest()[:16] for one in schedules]
    return {"gradients": digest.hexdigest(), "plans": plans, "numbers": [[one.stats.get(n) for n in NUMBERS] for one in schedules]}


def planning() -> dict[str, float]:
    """Time each plan once in this process, in CPU seconds."""
    from bpipe.schedules import build

    build("balanced_1f1b", 4, 8)
    seconds = {}
    for name, (rule, num_stages, num_microbatches) in PLANS.items():
        began = time.process_time()
        build(rule, num_stages, num_microbatches)
        seconds[name] = time.process_time() - began
    return seconds


def ask(root: Path, what: str) -> Any:
    """Let a new process of a tree do it, and return its answer."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), what]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer.pop("from") == str(root)
    return answer


def main() -> None:
    if sys.argv[1] in ("results", "planning"):
        import bpipe

        answer = dict(results()) if sys.argv[1] == "results" else planning()
        print(json.dumps({**answer, "from": str(Path(bpipe.__file__).parents[1])}))
        return
    roots = [Path(given).resolve() for given in sys.argv[1:3]]
    before, after = (ask(root, "results") for root in roots)
    runs = [name for name in before if "error" not in before[name] and "error" not in after[name]]
    for name in sorted(before.keys() - set(runs)):
        print(f"left out: {name}: {before[name].get('error')} / {after[name].get('error')}")
    for what in ("gradients", "plans", "numbers"):
        unlike = [name for name in runs if before[name][what] != after[name][what]]
        print(f"{what}: equal in {len(runs) - len(unlike)} of {len(runs)} cases{': but ' * bool(unlike)}{', '.join(unlike)}")
    turns = [[ask(root, "planning") for root in (roots if turn % 2 else roots[::-1])] for turn in range(TURNS)]
    pairs = [turn if index % 2 else turn[::-1] for index, turn in enumerate(turns)]
    for name in PLANS:
        first, second = (median(pair[index][name] for pair in pairs) for index in (0, 1))
        print(f"planning {name}: the second tree takes {second / first:.2f} of the first one's CPU time")


if __name__ == "__main__":
    main()
