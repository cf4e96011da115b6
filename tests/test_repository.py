"""The repository itself: its commands, and packages that work without the repository around them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bpipe.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = (".git", ".venv*", "runs", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


def run(*command: object, cwd: Path = ROOT) -> str:
    """What the command prints; a failure shows it."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


MAKES = re.compile("cuda|nccl|xccl|xpu|privateuse", re.IGNORECASE)
KNOW_MAKES = {
    *("device/__init__.py", "device/counters.py", "device/handles.py", "comm/transport/communicators.py", "environment.py"),
    *("slices/by_pieces.py", "slices/flash.py"),  # kernels have names of their own for each
    "torch_private/process_settings.py",  # torch has settings of its own for each
}


def test_few_modules_know_a_make_of_device() -> None:
    """Names and texts of all others, docstrings and comments aside, name none."""
    found = set()
    for path in (ROOT / "bpipe").rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            words = [word for _, word in ast.iter_fields(node) if isinstance(word, str)] if id(node) not in prose else []
            found |= {str(path.relative_to(ROOT / "bpipe")) for word in words if MAKES.search(word)}
    assert found == KNOW_MAKES


def test_make_without_a_target_shows_every_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = run("make", "--no-print-directory")
    assert {"train", "test", "test-all", "lint", "clean"} <= set(targets)
    assert [line.split()[0] for line in shown.splitlines()[1:]] == targets


def test_ci_runs_the_tests() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    steps = re.findall(r'^step ".+" make (\S+)$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps == ["lint", "test", "test-timed", "test-newest", "test-all"]


def test_no_file_names_a_machine() -> None:
    """No absolute path of one machine, no package registry's host: what works here works elsewhere."""
    machine = re.compile(r"(?<![\w.~$)}/])/(?:home|root|work|opt|mnt|Users)/|py[p]i\.org|pythonhosted\.org|download\.pytorch\.org")
    named = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not any(Path(name).match(pattern) for pattern in NOT_OURS)]
        for path in (Path(folder) / name for name in files):
            text = path.read_bytes().decode(errors="ignore")
            named += [f"{path.relative_to(ROOT)}: {match[0]}" for match in machine.finditer(text)]
    assert not named


def test_what_the_pages_name_is_there() -> None:
    """A row of a table names the test that shows it: the file exists."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    path = re.compile(r"`((?:tests|examples|docs|benchmarks|bpipe)/[\w./]+)")
    named = {name for page in pages for name in path.findall(page.read_text())}
    assert len(named) > 50
    assert not [name for name in sorted(named) if not (ROOT / name.rstrip("/.")).exists()]


# Packages.


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source distribution, and a wheel built from it, of a copy of the repository."""
    source, out = tmp_path_factory.mktemp("copy") / "bpipe", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_OURS))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    return {"sdist": next(out.glob("*.tar.gz")), "wheel": next(out.glob("*.whl"))}


def test_wheel_has_the_package_and_nothing_else(packages: dict[str, Path]) -> None:
    with zipfile.ZipFile(packages["wheel"]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "bpipe").rglob("*.py")} | {"bpipe/py.typed", "bpipe/tools/page.html"}
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert any(name.endswith("/LICENSE") for name in names)
    assert packages["wheel"].name.startswith("bpipe_torch-") and metadata.startswith("Metadata-Version")
    assert "Name: bpipe-torch\n" in metadata  # the index has somebody else's package of our own name
    brought = {(extra, one) for extra, ones in EXTRAS.items() for one in ones}
    said = {(extra, one) for one, extra in re.findall(r"""Requires-Dist: (.+); extra == ["'](\w+)["']""", metadata)}
    assert brought <= said
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata


def test_sdist_has_what_it_takes_to_test_it(packages: dict[str, Path]) -> None:
    with tarfile.open(packages["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"Makefile", "LICENSE", "pyproject.toml", "tests/test_repository.py", "tests/ranks.py", "examples/train_gpt.py"}
    needed |= {"CHANGELOG.md", "CITATION.cff", "mkdocs.yml", ".ci/run", ".github/workflows/test.yml"}  # tests read these
    needed |= {"tests/tools/page_test.js", "tests/tools/perfetto.js", "bpipe/tools/page.html"}
    assert needed <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize("kind", ["sdist", "wheel"])  # the wheel is built from it
def test_package_installs_and_works_elsewhere(packages: dict[str, Path], kind: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--quiet"]
    run(sys.executable, "-m", "pip", "install", *flags, "--target", site, packages[kind], cwd=tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import bpipe, bpipe.schedules\n"
        "from bpipe.tools.cli import main\n"
        "assert main(['simulate', 'balanced_1f1b', '-p', '4', '-m', '8', '--json', '--out', 'page.html']) == 0\n"
        "from importlib.metadata import version\n"
        "assert version('bpipe-torch') == bpipe.__version__\n"
        "print(bpipe.__file__, bpipe.__version__, *bpipe.schedules.build('balanced_1f1b', 4, 8).peak_slots)"
    )
    version = re.search(r'"(.+)"', (ROOT / "bpipe" / "_version.py").read_text())
    assert version is not None
    shown = run(sys.executable, "-I", "-c", code, cwd=tmp_path)
    assert shown.splitlines()[-1].split() == [str(site / "bpipe" / "__init__.py"), version[1], *"3323"]
    assert (site / "bpipe" / "py.typed").exists() and (site / "bin" / "bpipe").exists()
    assert "</html>" in (tmp_path / "page.html").read_text()
