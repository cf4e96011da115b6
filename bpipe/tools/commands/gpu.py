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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bpipe._version import __version__
from bpipe.errors import ConfigurationError
from bpipe.tools.gpu.issue_page import page, summary
from bpipe.tools.gpu.runner import LIMITS_S, Ran, count, run_all
from bpipe.tools.gpu.verdict import Outcome
from bpipe.tools.terminal import Result

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe gpu
  bpipe gpu --out results --only environment,equality,nccl
Exit code 1: a check failed; 2: there is no GPU."""

NAME = "bpipe-gpu"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", type=Path, default=Path(), metavar="FOLDER", help=f"for {NAME}.json and .md (default: here)")
    parser.add_argument("--only", metavar="CHECK", help=f"some of {','.join(LIMITS_S)} (default: all)")


def run(args: argparse.Namespace) -> Result:
    names = _chosen(args.only)
    if not args.out.is_dir():
        raise ConfigurationError(f"there is no folder {args.out}")
    about = _gpus()
    began = time.monotonic()
    ran = run_all({name: LIMITS_S[name] for name in names}, {}, _say)
    data = data_of(ran, about, time.monotonic() - began)
    for suffix, text in (("json", json.dumps(data, indent=1) + "\n"), ("md", page(data))):
        (args.out / f"{NAME}.{suffix}").write_text(text, encoding="utf-8")
    lines = [data["summary"], f"wrote {args.out / NAME}.json and {args.out / NAME}.md: paste the latter into an issue"]
    return Result(data=data, shown=lambda: lines, exit_code=int(data["counts"][Outcome.FAILED.value] > 0))


def _chosen(only: str | None) -> list[str]:
    names = list(LIMITS_S) if only is None else only.split(",")
    unknown = [name for name in names if name not in LIMITS_S]
    if unknown:
        raise ConfigurationError(f"no check {unknown[0]!r}; there are {', '.join(LIMITS_S)}")
    return names


def _gpus() -> str:
    """Describe what the page is about: versions, and the GPUs."""
    try:
        import torch
    except ImportError as error:
        raise ConfigurationError(f"torch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"no GPU: torch {torch.__version__} finds none on this machine, and all checks of this command need one. Run it "
            "where nvidia-smi lists a GPU, with a torch that was built for CUDA"
        )
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
    print(f"bpipe gpu: {text}", file=sys.stderr, flush=True)
