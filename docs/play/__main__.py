"""Build the page to play with: `python -m docs.play FOLDER` writes it there, by default into build/play.

The result is static and needs no network: runtime.js holds Pyodide, from its npm package, and bpipe's own sources.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NPM = ROOT / "build" / "npm"  # ignored by git, and no part of docs/, which the site copies
STATIC = ("index.html", "play.css", "play.js")
OF_PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")


def build(folder: Path) -> None:
    """Write the page into a folder.

    Raises:
        FileNotFoundError: there is no npm here; the page is written, but only says that it is not built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in STATIC:
        shutil.copyfile(HERE / name, folder / name)
    packages = npm_packages()
    files = {name: (packages / "pyodide" / name).read_bytes() for name in OF_PYODIDE} | {"bpipe.zip": sources()}
    runtime = {"worker": (HERE / "worker.js").read_text(encoding="utf-8"), "files": {name: _packed(files[name]) for name in files}}
    # A script, because browsers let a page that was opened from disk run scripts, but read no other file.
    (folder / "runtime.js").write_text(f"globalThis.RUNTIME = {json.dumps(runtime)};\n", encoding="utf-8")


def npm_packages() -> Path:
    """Install what package-lock.json names, unless it is there, and return the folder with the packages."""
    npm, lock = shutil.which("npm"), NPM / "package-lock.json"
    if npm is None:
        raise FileNotFoundError("the page to play with needs npm, for the package pyodide, and there is none here: install Node.js")
    wanted = (HERE / "package-lock.json").read_bytes()
    if not ((NPM / "node_modules" / ".package-lock.json").exists() and lock.exists() and lock.read_bytes() == wanted):
        NPM.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copyfile(HERE / name, NPM / name)
        subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=NPM, check=True, stdout=sys.stderr)
    return NPM / "node_modules"


def sources() -> bytes:
    """Return a zip of bpipe and of the page's own module, the same bytes for the same sources."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, path in sorted(_sources()):
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
    return written.getvalue()


def _sources() -> Iterator[tuple[str, Path]]:
    yield "answers.py", HERE / "answers.py"
    for path in (ROOT / "bpipe").rglob("*"):
        if path.suffix in (".py", ".html"):
            yield path.relative_to(ROOT).as_posix(), path


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "play"
    try:
        build(target)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"docs.play: {error}")
    print(f"wrote {target}: open index.html in a browser")
