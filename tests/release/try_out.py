"""What is tried in a new environment: the wheel, the source distribution, each extra. Each function returns what to say of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.release.environments import Environment, FailedError, run
from tests.release.packages import Packages

Try = Callable[[Environment, str, Packages], str]

WORKS = Path(__file__).with_name("works.py")
TOOLS = ("pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
TESTS = ("tests/test_equality.py", "tests/test_loopback.py")
QUICK = "test_loopback.py or (two_stages_on and quiet) or (halves_and_stages and conv)"

# What an extra brings, by the names of the modules; those that need a GPU are only resolved.
EXTRAS_TRIED = {"cli": ["rich"], "plot": ["matplotlib"], "perfetto": ["perfetto", "viztracer"], "search": ["ortools"]}


def is_there(here: Environment, torch: str) -> bool:
    """Whether an index has this version of torch for this Python."""
    try:
        here.install(f"torch=={torch}", dry=True)
    except FailedError as error:
        if "No solution found" in str(error):
            return False
        raise
    return True


def without_extras(here: Environment, torch: str, packages: Packages) -> str:
    """The wheel alone; then a part of the tests, on the installed package."""
    here.install(f"torch=={torch}", str(packages.wheel))
    _works(here)
    here.install(f"torch=={torch}", str(packages.wheel), *TOOLS)
    return f"works; {_tests(here, packages)} tests pass"


def source_distribution(here: Environment, torch: str, packages: Packages) -> str:
    here.install(f"torch=={torch}", str(packages.sdist), sources=True)
    _works(here)
    return "works"


def one_extra(here: Environment, torch: str, packages: Packages, extra: str) -> str:
    here.install(f"torch=={torch}", f"{packages.wheel}[{extra}]")
    _works(here, *EXTRAS_TRIED[extra])
    return "works"


def resolves(here: Environment, torch: str, packages: Packages, extra: str) -> str:
    """Of packages that run on GPUs alone: that there is a set of versions that go together."""
    here.install(f"torch=={torch}", f"{packages.wheel}[{extra}]", dry=True)
    return "resolves (needs a GPU to run)"


def _works(here: Environment, *modules: str) -> None:
    run(here.python, "-I", "-W", "error", WORKS, *modules, cwd=here.folder, OMP_NUM_THREADS="1")
    run(here.python.with_name("bpipe"), "env", cwd=here.folder)


def _tests(here: Environment, packages: Packages) -> int:
    """How many passed: those of the source distribution, beside which there is no bpipe but the installed one."""
    copy = Path(shutil.copytree(packages.tests, here.folder / "tests"))
    shown = run(here.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, "-k", QUICK, cwd=copy, OMP_NUM_THREADS="1")
    passed = re.search(r"(\d+) passed", shown)
    assert passed is not None, shown
    return int(passed[1])
