"""New environments: which Pythons are here, and what uv installs into them. It links what it has unpacked before."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 1200.0


class FailedError(Exception):
    """A command failed; the text has its last lines."""


def run(*words: object, cwd: Path, limit_s: float = LIMIT_S, **variables: str) -> str:
    """What a command prints. It sees neither this checkout nor this environment.

    Raises:
        FailedError: it ended with another exit status than 0, or did not end in time.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [str(word) for word in words]
    environment = kept | variables
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{' '.join(command)}\ndid not end within {limit_s:.0f} s") from error
    if done.returncode:
        raise FailedError(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return done.stdout


def find_python(version: str) -> Path | None:
    """A Python of this version, such as 3.12: on the path, or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}*/bin/python{version}"))]
    return next((Path(path) for path in found if path is not None and _answers(path)), None)


def _answers(python: str | Path) -> bool:
    """Whether it is one: a shim of pyenv's stands on the path for versions that are not chosen, too."""
    return subprocess.run([python, "-c", "import ssl, venv"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Environment:
    """A virtual environment in a folder of its own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @staticmethod
    def new(folder: Path, python: Path) -> Environment:
        folder.mkdir(parents=True)
        run("uv", "venv", "--quiet", "--python", python, "venv", cwd=folder)
        return Environment(folder)

    def install(self, *what: str, sources: bool = False, dry: bool = False, leave_out: Sequence[str] = ()) -> None:
        """Install this, built already unless it may be sources, and remove all else: it has what a new environment would have.

        Args:
            leave_out: packages that are not installed, whatever asks for them.
        """
        (self.folder / "left_out").write_text("".join(f"{name}; python_version < '0'\n" for name in leave_out))
        flags = ["--overrides", "left_out"]
        flags += ["--dry-run"] * dry + ["--only-binary=:all:"] * (not sources) + ["--exact", "--reinstall-package", "bpipe-torch"]
        run("uv", "pip", "install", "--python", self.python, *flags, *what, cwd=self.folder)

    def remove(self) -> None:
        shutil.rmtree(self.folder)
