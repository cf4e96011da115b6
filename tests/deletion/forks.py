"""Run the program of this folder with other packages: `python forks.py FOLDER...` prints `FOLDER STEP what`, or an error.

One process loads torch, which takes longer than all the rest, and has a child for each folder.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

from tests.deletion.rooms import only_from


def run(folder: str) -> None:
    only_from(folder)
    shown = io.StringIO()
    with redirect_stdout(shown):
        runpy.run_path(str(Path(__file__).with_name("program.py")), run_name="__main__")
    print(*(f"{folder} {line}" for line in shown.getvalue().splitlines()), sep="\n", flush=True)


for folder in sys.argv[1:]:
    if not (child := os.fork()):
        status = 1
        try:
            run(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"the program failed in {folder}")
