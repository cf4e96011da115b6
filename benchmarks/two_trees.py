"""Two trees of bpipe beside each other: what a change costs a step, in seconds, CPU seconds, calls and allocations.

    git worktree add ../before <commit>
    .venv/bin/python -m benchmarks.two_trees ../before .

Each tree has processes of its own, which live side by side and step in turns: while one tree's ranks run, the other's wait for
their turn. A ratio is the second tree's time over the first's in the same round. The processes of one and the same tree differ from
each other, too, for as long as they live (give it one tree twice): so they are started again several times, each start gives the
median of its rounds, and an interval is the 95% interval of the median over starts. Calls and allocations are
counted on rank 0 in one step, and do not depend on what else the machine does. What is loaded is out of the collector's
way: its full collections are rare and long beside a step, and whether one falls into these rounds differs between trees.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STARTS, ROUNDS, STEPS = 9, 5, 4  # starts of both trees' processes, rounds in each, and steps of each tree in a round
CASES = {  # ranks, microbatches, width of the blocks, and how the schedule is made
    "1F1B, 1 ms microbatches": (2, 8, 64, "1f1b"),
    "1F1B": (2, 8, 256, "1f1b"),
    "1F1B, 4 ranks": (4, 8, 128, "1f1b"),
    "ZB-H1": (2, 8, 256, "zb_h1"),
    "balanced 1F1B, 4 ranks": (4, 8, 128, "balanced_1f1b"),
    "Balanced in bytes, 4 ranks": (4, 8, 128, "bytes"),
    "recomputation, 4 ranks": (4, 8, 128, "recompute"),
}


def schedule_of(kind: str, stage: Any, m: int) -> Any:
    """The schedule of a case."""
    from torch.nn.functional import mse_loss

    import bpipe

    classes = {"zb_h1": bpipe.ZBH1, "balanced_1f1b": bpipe.BalancedOneFOneB}
    schedule = classes.get(kind, bpipe.OneFOneB)(stage, m, loss_fn=mse_loss)
    options = {"bytes": {"budget": "lowest"}, "recompute": {"budget": None, "by": "recompute"}}
    return bpipe.Balanced(schedule, **options[kind]) if kind in options else schedule


def rank_main(folder: str, rank: int, case: str) -> None:
    """One rank of one tree: it steps when it is told to, and answers with what that took."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import bpipe

    size, m, width, kind = CASES[case]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=size)
    torch.manual_seed(rank)
    blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
    module = nn.Sequential(*blocks)
    schedule = schedule_of(kind, bpipe.PipelineStage(module, rank, size, "cpu"), m)
    batch = torch.randn(m, 64, width, generator=torch.Generator().manual_seed(0))  # the same on all ranks

    def step() -> None:
        schedule.step(batch, target=batch, return_outputs=False)
        module.zero_grad()

    for _ in range(4):
        step()
    gc.collect()
    gc.freeze()
    answer: dict[str, Any] = {"from": str(Path(bpipe.__file__).parents[1])}
    for line in sys.stdin:
        answer |= counted(step) if line.strip() == "count" else timed(step)
        print(json.dumps(answer), flush=True)
    schedule.close()
    dist.destroy_process_group()


def timed(step: Callable[[], None]) -> dict[str, float]:
    """Seconds and CPU seconds of some steps."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        step()
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def counted(step: Callable[[], None]) -> dict[str, float]:
    """Calls of Python and C functions in the caller's thread, and allocations of tensors and their bytes."""
    from torch.profiler import ProfilerActivity, profile

    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert seen.profiler is not None
    events: Any = seen.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return {"calls": calls, "allocations": len(sizes), "bytes": sum(sizes)}


class Tree:
    """The ranks of one tree.

    Args:
        root: of the tree.
        case: what they run.
        folder: where they meet.
    """

    def __init__(self, root: Path, case: str, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, str(Path(__file__).resolve()), "rank", str(folder)]
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank), case], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
            )
            for rank in range(CASES[case][0])
        ]

    def ask(self, what: str) -> list[dict[str, Any]]:
        """Let all ranks do it at once; return their answers."""
        for process in self._ranks:
            assert process.stdin is not None
            print(what, file=process.stdin, flush=True)
        return [json.loads(process.stdout.readline()) for process in self._ranks if process.stdout is not None]

    def close(self) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            process.wait(60)


def compare(roots: Sequence[Path], case: str) -> str:
    """One case, as a row of the table."""
    from benchmarks.intervals import interval

    starts = [start(roots, case) for _ in range(STARTS)]
    cells = [case]
    for what in ("seconds", "cpu_s"):
        found = interval([ratios[what] for ratios, _ in starts])
        cells.append(f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})")
    before, after = starts[0][1]
    cells += [f"{after[what]:,.0f} / {before[what]:,.0f}" for what in ("calls", "allocations", "bytes")]
    return f"| {' | '.join(cells)} |"


def start(roots: Sequence[Path], case: str) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Start the ranks of both trees; the median ratios of their times, the second tree's over the first's, and their counts."""
    from benchmarks.intervals import ratios

    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree(root, case, Path(folder) / str(index)) for index, root in enumerate(roots)]
        times: dict[str, list[list[float]]] = {"seconds": [[], []], "cpu_s": [[], []]}
        for turn in range(ROUNDS + 1):
            for index in (0, 1) if turn % 2 else (1, 0):
                answers = trees[index].ask("time")
                assert {answer["from"] for answer in answers} == {str(roots[index])}, answers
                if turn:  # the first one warms up
                    times["seconds"][index].append(max(answer["seconds"] for answer in answers))
                    times["cpu_s"][index].append(sum(answer["cpu_s"] for answer in answers))
        counts = [tree.ask("count")[0] for tree in trees]
        for tree in trees:
            tree.close()
    return {what: ratios(after, before).median for what, (before, after) in times.items()}, counts


def main() -> None:
    if sys.argv[1] == "rank":
        rank_main(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    roots = [Path(given).resolve() for given in sys.argv[1:3]]
    print("| case | step time | CPU time | calls | allocations | bytes allocated |\n|---|---|---|---|---|---|", flush=True)
    for case in sys.argv[3:] or CASES:
        print(compare(roots, case), flush=True)


if __name__ == "__main__":
    main()
