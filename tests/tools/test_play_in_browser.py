"""The page to play with in headless Chromium, opened from disk and over HTTP: it shows what bpipe answers here."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from docs.play import answers
from docs.play.__main__ import NPM, build

pytestmark = pytest.mark.timeout(200)
HERE = Path(__file__).parent
LIMIT_S = 2.0


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the page, where there is what runs it."""
    if CHROMIUM is None or not (NPM / "node_modules" / "playwright-core").exists():
        pytest.skip("no Chromium or no npm packages here: `make test-page` says how to get them")
    folder = tmp_path_factory.mktemp("play")
    build(folder)
    return folder


CHROMIUM = shutil.which("chromium")


@pytest.fixture
def server(page: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=page)) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}/index.html"
        serving.shutdown()


def seen_in_browser(url: str, tmp_path: Path) -> dict[str, Any]:
    command = ["node", str(HERE / "play_test.cjs"), str(NPM / "node_modules"), str(CHROMIUM), str(tmp_path / "profile"), url]
    ran = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, Any] = json.loads(ran.stdout)
    assert seen["wrong"] == []
    return seen


def check_first(seen: dict[str, Any]) -> None:
    """The first thing that is seen is what bpipe answers outside of a browser."""
    assert [words[0] for words in seen["first"]["words"]] == ["1f1b", "balanced_1f1b"]
    expected = answers.answer(seen["first"]["words"])
    assert seen["first"]["grids"] == [plan["grid"] for plan in expected["plans"]]
    assert seen["first"]["numbers"] == [["", "1f1b", "balanced_1f1b", "difference"], *expected["numbers"]]
    assert seen["texts"] == [expected["plans"][0][name] for name in ("grid", "python", "command")]
    assert seen["drawn"] == [["1f1b", 8, 16], ["balanced_1f1b", 8, 16]]


def test_the_page_answers_as_bpipe_does_and_in_time(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = seen_in_browser((page / "index.html").as_uri(), tmp_path)
    check_first(seen)
    assert set(seen["requests"]) <= {"file", "data", "blob", "about"}
    assert seen["slid"] == [["1f1b", 9, 16], ["balanced_1f1b", 9, 16]]
    assert seen["tip"].startswith("rank 0: 0F")
    assert seen["other"] == [["1f1b", 9, 16], ["balanced_1f1b", 9, 16]] and parse_qs(seen["link"][1:])["2.microbatches"] == ["12"]
    assert seen["refused"]["text"].startswith("Second plan: 2 slots are too few for balanced_1f1b with 9 stages and 12 microb")
    assert seen["refused"]["drawn"] == [["1f1b", 9, 16]]
    assert seen["linked"] == seen["other"] and seen["alone"] == [["1f1b", 9, 16]]
    assert parse_qs(seen["again"][1:])["ranks"] == ["8"] and "compare" not in seen["again"]
    assert seen["large"] == [["1f1b", 16, 64], ["balanced_1f1b", 16, 64]]
    assert seen["narrow"][0] <= seen["narrow"][1]

    shares = {name: min(timed["seconds"] for timed in times) / LIMIT_S for name, times in seen["times"].items()}
    with capsys.disabled():
        for name, share in shares.items():
            print(f"\n1f1b, and {name}, p = 16, m = 64, in the browser: {share:.2f} of the limit of {LIMIT_S:g} s", end="")
    assert all(timed["ticks"] > 5 for times in seen["times"].values() for timed in times)  # the page does not freeze meanwhile
    assert max(shares.values()) < 1


def test_the_page_answers_over_http(server: str, tmp_path: Path) -> None:
    seen = seen_in_browser(server, tmp_path)
    check_first(seen)
    assert set(seen["requests"]) <= {"http", "data", "blob", "about"}
