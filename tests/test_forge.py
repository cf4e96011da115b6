"""What a public forge reads of this repository: the workflow, the forms of issues, and how to cite."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import bpipe
from tests.test_repository import ROOT

FORGE = ROOT / ".github"
FORMS = ("bug.yml", "feature.yml")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CLASSIFIED = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text()))


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs() -> dict[str, dict[str, Any]]:
    return read(FORGE / "workflows" / "test.yml")["jobs"]


def commands() -> dict[str, list[str]]:
    """What each job runs, one line after another."""
    return {
        name: [line for step in job["steps"] for line in step.get("run", "").splitlines()] for name, job in jobs().items()
    }


def test_the_workflow_runs_the_tests_on_every_python_that_setup_names() -> None:
    job = jobs()["test"]
    assert set(job["strategy"]["matrix"]["python"]) == CLASSIFIED
    assert commands()["test"] == ["make test"] and commands()["lint"] == ["make lint"] and "if" not in job
    assert commands()["test-all"] == ["make test-all"] and "main" in jobs()["test-all"]["if"]


def test_the_workflow_runs_only_targets_that_exist() -> None:
    lines = [line for each in commands().values() for line in each]
    assert all(re.fullmatch(r"make [a-z-]+", line) for line in lines)
    assert {line.split()[1] for line in lines} <= TARGETS


def test_the_workflow_starts_on_main_and_on_pull_requests_and_every_job_ends() -> None:
    started_by = read(FORGE / "workflows" / "test.yml")[True]  # YAML 1.1 reads the key `on` as true
    assert started_by["push"] == {"branches": ["main"]} and "pull_request" in started_by
    assert all(job["timeout-minutes"] <= 120 for job in jobs().values())
    assert all(step.keys() & {"uses", "run"} for job in jobs().values() for step in job["steps"])


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_issues_ask_for_the_environment(name: str) -> None:
    form = read(FORGE / "ISSUE_TEMPLATE" / name)
    assert form["name"] and form["description"]
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"]) and {field["type"] for field in form["body"]} <= {"textarea", "input"}
    assert all(field["attributes"]["label"] for field in form["body"])
    assert "`bpipe env`" in fields["environment"]["attributes"]["description"]
    assert fields["environment"].get("validations", {}).get("required", False) == (name == "bug.yml")


def test_how_to_cite() -> None:
    """The version is the package's; no person is named but the authors of the paper."""
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"].startswith("bpipe: ")
    assert citation["version"] == bpipe.__version__ and citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The bpipe authors"}]
    (paper,) = [one for one in citation["references"] if "BPipe: Memory-Balanced" in one["title"]]
    names = " and ".join(f"{one['family-names']}, {one['given-names']}" for one in paper["authors"])
    entry = (ROOT / "docs" / "cite.md").read_text(encoding="utf-8")
    assert f"author = {{{names}}}" in re.sub(" +", " ", entry)
    assert all(re.search(rf"{field} += {{?{paper[field]}}}?", entry) for field in ("year", "volume"))


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+\.\d+\.\d+)$", text, re.MULTILINE)[0] == bpipe.__version__
    newest = text.split("\n## ")[1]
    assert re.findall(r"^### (.+)$", newest, re.MULTILINE) == ["Breaking changes, and what to do", "Added", "Changed", "Fixed"]
