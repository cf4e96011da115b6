"""Run on this machine's GPUs, in ten minutes at most, what cannot run without one, and write a page of verdicts.

It takes 1, 2, 4 or 8 GPUs that are otherwise idle, each with some 24 GiB free. Gradients are compared to the bit, memory with
torch's allocator, balanced steps with plain ones. Each check is a process of its own with a time limit: a crash or a hang is
a verdict, too. The page, bpipe-gpu.md, names neither the machine nor its folders, and is made to be pasted into an issue.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.issue_page import page, summary
from benchmarks.gpu_check.runner import LIMITS_S, Ran, count, run_all
from benchmarks.gpu_check.verdict import Outcome
from bpipe._version import __version__
from bpipe.whole_file import write_whole

EXAMPLES = """examples:
  python -m benchmarks.gpu_check
  python -m benchmarks.gpu_check --out results --only environment,equality,nccl
Exit code 1: a check failed; 2: there is no GPU."""

NAME = "bpipe-gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_check", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=Path(), metavar="FOLDER", help=f"for {NAME}.json and .md (default: here)")
    parser.add_argument("--only", metavar="CHECK", help=f"some of {','.join(LIMITS_S)} (default: all)")
    chosen = parser.parse_args(arguments)
    names = list(LIMITS_S) if chosen.only is None else chosen.only.split(",")
    if unknown := [name for name in names if name not in LIMITS_S]:
        parser.error(f"no check {unknown[0]!r}; there are {', '.join(LIMITS_S)}")
    if not chosen.out.is_dir():
        parser.error(f"there is no folder {chosen.out}")
    if not torch.cuda.is_available():
        parser.error(
            f"no GPU: torch {torch.__version__} finds none on this machine, and all checks need one. Run this where nvidia-smi "
            "lists a GPU, with a torch that was built for CUDA"
        )
    began = time.monotonic()
    ran = run_all({name: LIMITS_S[name] for name in names}, {}, _say)
    data = data_of(ran, _gpus(), time.monotonic() - began)
    for suffix, text in (("json", json.dumps(data, indent=1) + "\n"), ("md", page(data))):
        write_whole(chosen.out / f"{NAME}.{suffix}", text)
    print(data["summary"])
    print(f"wrote {chosen.out / NAME}.json and {chosen.out / NAME}.md: paste the latter into an issue")
    return int(data["counts"][Outcome.FAILED.value] > 0)


def _gpus() -> str:
    """Describe what the page is about: versions, and the GPUs."""
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    return f"bpipe {__version__}, torch {torch.__version__}, {torch.cuda.device_count()} x {' and '.join(names)}"


def data_of(ran: list[Ran], about: str, took_s: float) -> dict[str, Any]:
    """Return the contents of the JSON; the page is written from them."""
    counts = {outcome.value: number for outcome, number in count(ran).items()}
    return {
        "summary": summary(counts, about, took_s),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "took_s": round(took_s, 1),
        "counts": counts,
        "checks": [one.to_dict() for one in ran],
    }


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
