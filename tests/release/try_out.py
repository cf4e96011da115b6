"""What is tried in a new environment: the wheel, the source distribution, each extra. Each function returns what to say of it."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.release.environments import Environment, FailedError, run
from tests.release.packages import Packages

Try = Callable[[Environment, str, Packages], str]

WORKS, LOOP = (Path(__file__).with_name(name) for name in ("works.py", "readme_loop.py"))
STEPS = 3  # of README's main job
TOOLS = ("pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
TESTS = ("tests/test_equality.py", "tests/test_loopback.py")
QUICK = "test_loopback.py or (two_stages_on and quiet) or (halves_and_stages and conv)"
# What depends on torch most: equality, balanced bytes, FSDP2, the originals of saved tensors, torch's names, private and public.
CLOSE_TO_TORCH = (
    *("tests/test_equality.py", "tests/test_loopback.py", "tests/test_balanced.py", "tests/test_sharding.py"),
    *("tests/edge_cases/test_saved_originals.py", "tests/test_checkpointing.py"),
    *("tests/torch_private", "tests/test_torch_names.py", "tests/torch_api"),
)

# What torch's CUDA build needs neither to be imported nor to compute on CPU: 1.0 of 5.2 GB. It is linked to the rest.
NOT_ON_CPU = ("triton",)

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
    """The wheel alone; then README's main job, and a part of the tests, on the installed package."""
    return _tried(here, torch, packages, TESTS, QUICK)


def close_to_torch(here: Environment, torch: str, packages: Packages) -> str:
    """As `without_extras`, with more of the tests, those of `make test`, and without what a CPU does not need."""
    return _tried(here, torch, packages, CLOSE_TO_TORCH, "test_", tier="test", leave_out=NOT_ON_CPU)


def whole_suite(here: Environment, torch: str, packages: Packages) -> str:
    """`make test`, in an environment that has all that the tests need; the package is the checkout's."""
    copy = Path(shutil.copytree(packages.checkout, here.folder / "checkout"))
    here.install(f"torch=={torch}", "--editable", f"{copy}[test,examples]", "pip", sources=True)
    start = (here.python, "-m", "pytest", "-q", "-rfEs", "-n", 3, "--dist", "worksteal")
    shown = run(*start, cwd=copy, limit_s=5400.0, OMP_NUM_THREADS="1")
    skipped = re.findall(r"^SKIPPED \[(\d+)\] \S+ (.+)$", shown, re.MULTILINE)
    reasons = Counter[str]()
    for number, reason in skipped:
        reasons[reason] += int(number)
    return "; ".join([f"{_passed(shown)} tests pass", *(f"{number} skipped: {reason}" for reason, number in reasons.items())])


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


def _works(here: Environment, *modules: str) -> int:
    """Run the program that shows that an installation works, and return the number of public names."""
    shown = run(here.python, "-I", "-W", "error", WORKS, *modules, cwd=here.folder, OMP_NUM_THREADS="1")
    run(here.python.with_name("bpipe"), "env", cwd=here.folder)
    return int(shown.rsplit(":", 1)[1].split()[0])


def _tried(
    here: Environment,
    torch: str,
    packages: Packages,
    tests: Sequence[str],
    k: str,
    tier: str = "every",
    leave_out: Sequence[str] = (),
) -> str:
    """Try bpipe and what it brings alone; then with what the main job and the tests need."""
    here.install(f"torch=={torch}", str(packages.wheel), leave_out=leave_out)
    num_names = _works(here)
    run(here.python, "-W", "error", LOOP, packages.checkout / "README.md", cwd=here.folder, OMP_NUM_THREADS="1")
    here.install(f"torch=={torch}", f"{packages.wheel}[cli,plot]", *TOOLS, leave_out=leave_out)
    _main_job(here, packages)
    return f"{num_names} public names, README's loop and main job work; {_tests(here, packages, *tests, k=k, tier=tier)} tests pass"


def _main_job(here: Environment, packages: Packages) -> None:
    """Run a few steps of README's main job."""
    local = ("--nnodes", 1, "--nproc-per-node", 4, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    job = (packages.checkout / "examples" / "train_gpt.py", "--steps", STEPS)
    start = (here.python, "-m", "torch.distributed.run", *local, "--local-addr", "127.0.0.1", *job)
    shown = run(*start, cwd=here.folder, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert f"step {STEPS}/{STEPS}" in shown, shown


def _tests(here: Environment, packages: Packages, *tests: str, k: str, tier: str) -> int:
    """How many passed: those of the source distribution, beside which there is no bpipe but the installed one."""
    copy = Path(shutil.copytree(packages.tests, here.folder / "tests"))
    start = (here.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", 2, "--dist", "worksteal", "--tier", tier)
    return _passed(run(*start, *tests, "-k", k, cwd=copy, OMP_NUM_THREADS="1"))


def _passed(shown: str) -> int:
    passed = re.search(r"(\d+) passed", shown)
    assert passed is not None, shown
    return int(passed[1])
