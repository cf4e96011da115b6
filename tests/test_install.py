"""What bpipe's pages and messages say of installing: every line is run, in an environment in which bpipe is not yet."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import bpipe
from bpipe.extras import EXTRAS, how_to_install
from tests.test_repository import NOT_OURS, ROOT

OURS = ("bpipe", "docs", "examples", "benchmarks", "README.md", "CONTRIBUTING.md")
LINE = re.compile(r"\bpip (?:install|wheel)((?: +(?:'[^'\n]+'|[-\w./*=>+]+))+)")
GIT = "pip install git+URL"  # URL is what a reader puts in
WHEEL = "pip wheel --no-deps --wheel-dir dist ."
WORKS = (
    "import bpipe, importlib.metadata\n"
    "from bpipe.tools.cli import main\n"
    "assert importlib.metadata.version('bpipe-torch') == bpipe.__version__\n"
    "assert main(['simulate', 'balanced_1f1b', '-p', '4', '-m', '8', '--json']) == 0\n"
    "print(bpipe.__file__)"
)


def texts() -> dict[str, str]:
    """What our own files say, by name; binary ones as far as they are text."""
    roots = [ROOT / name for name in (*OURS, "tests", "Makefile", "setup.py", "CHANGELOG.md")]
    found = [path for root in roots for path in (root, *root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)): path.read_bytes().decode(errors="ignore") for path in found}


def lines() -> list[str]:
    """All that is said, those first that others need; of messages that are put together, what they say."""
    said = [text for name, text in texts().items() if name.split("/")[0] in OURS and name != "bpipe/extras.py"]
    said = [text.replace("{oldest}", ".".join(map(str, bpipe.OLDEST_TORCH))) for text in said]
    said += [how_to_install(extra) for extra in EXTRAS]
    return sorted({match[0].strip() for text in said for match in LINE.finditer(text)}, key=lambda line: ("dist/" in line, line))


def is_here(line: str) -> bool:
    """Whether this environment has what the line brings, so that no index is needed."""
    wanted = [word for word in shlex.split(line)[2:] if not word.startswith("-")]
    extras = [extra for word in wanted for extra in re.findall(r"\w+", word.partition("[")[2])]
    packages = [word for word in wanted if re.match(r"[\w-]+[<=>]", word)] + [one for extra in extras for one in EXTRAS[extra]]
    try:
        return all(distribution(re.split("[<=>]", package)[0]) for package in packages)
    except PackageNotFoundError:
        return False


def pip(environment: Path, line: str, *flags: str, cwd: Path) -> None:
    """Run a line as it is said, and nobody's compiler: it would take most of the time."""
    words = [hit for word in shlex.split(line)[1:] for hit in (map(str, cwd.glob(word)) if "*" in word else [word])]
    command = [environment / "bin" / "python", "-m", "pip", *words, *flags, *["--no-compile"] * (words[0] == "install")]
    own = os.environ | {"PIP_CONFIG_FILE": os.devnull}  # a machine's own may cap the versions
    done = subprocess.run(command, cwd=cwd, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{line}:\n{done.stdout}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages of this environment but bpipe: what an index would have."""
    here, site = Path(sysconfig.get_path("purelib")), tmp_path_factory.mktemp("packages")
    for path in here.iterdir():
        if not path.name.startswith(("bpipe", "__editable__", "__pycache__")) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return site


@pytest.fixture
def environment(tmp_path: Path, packages: Path) -> Path:
    """A new one, which has the packages, pip among them, but none of its own."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    (site_of(home) / "others.pth").write_text(str(packages))
    return home


def site_of(environment: Path) -> Path:
    return next((environment / "lib").glob("*/site-packages"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout") / "bpipe"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_OURS, "tests"))
    return copy


def test_nobody_is_told_to_install_somebody_else_s_package() -> None:
    """On the index, the name of the import is another project's."""
    stranger = re.compile(r"pip\s+install\s+(?:-\S+\s+)*['\"]?bpipe\b(?!_|-)|bpip" + r"e\[")
    assert {name: match[0] for name, text in texts().items() if (match := stranger.search(text))} == {}


def test_the_lines_are_found() -> None:
    assert {WHEEL, GIT, "pip install .", "pip install -e .", "pip install '.[cli,plot]'", "pip install 'rich>=13'"} <= set(lines())
    assert "pip install 'torch>=2.11'" in lines() and len(lines()) > 10


@pytest.mark.parametrize("line", list(filter(is_here, lines())))
def test_lines_work_in_a_new_environment(line: str, environment: Path, checkout: Path, tmp_path: Path) -> None:
    """Without an index: what bpipe needs is there, and bpipe itself comes from the checkout."""
    offline = ("--isolated", "--no-index", "--no-build-isolation", "--quiet")
    if line == GIT:
        if not (ROOT / ".git").exists():
            pytest.skip("not a checkout of git's")
        line = line.replace("URL", ROOT.as_uri())
    if "dist/" in line and not (checkout / "dist").exists():
        pip(environment, WHEEL, *offline, cwd=checkout)
    pip(environment, line, *offline, cwd=checkout)
    if line.startswith("pip install") and re.search(r"['\s](?:\.|dist/|git\+)", line):
        done = subprocess.run([environment / "bin" / "python", "-I", "-c", WORKS], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        home = checkout if "-e" in line.split() else site_of(environment)
        assert Path(done.stdout.splitlines()[-1]) == home / "bpipe" / "__init__.py"
        assert (environment / "bin" / "bpipe").exists()


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_index_has_what_an_extra_brings(extra: str, environment: Path, tmp_path: Path) -> None:
    """Resolved, not installed. The packages' own needs are their own matter: torch alone is a gigabyte."""
    try:
        pip(environment, "pip download --no-deps --quiet wheel", cwd=tmp_path)
    except AssertionError as error:
        pytest.skip(f"no package index can be reached: {str(error)[-200:]}")
    wanted = " ".join(f"'{package}'" for package in EXTRAS[extra])
    pip(environment, f"pip install --dry-run --ignore-installed --no-deps --only-binary :all: {wanted}", cwd=tmp_path)
