"""README stays short, says first what people decide by, and its code runs: a newcomer reads nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bpipe.schedules import rules
from bpipe.torch_private.release import release
from tests.ranks import run_ranks
from tests.release.readme_loop import changed, trained

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
LINES = TEXT.splitlines()


def test_it_is_short() -> None:
    assert len(LINES) <= 120


def test_its_first_lines_say_what_ran_on_which_hardware() -> None:
    first = "\n".join(LINES[:10])
    assert all(word in first for word in ("CPU over gloo", "simulated device", "not yet on a GPU", ".png)"))


@pytest.mark.parametrize("words", ["activation memory", "offload", "peer-to-peer (p2p)", "Pipeline parallelism for PyTorch"])
def test_it_has_the_words_that_people_search_for(words: str) -> None:
    assert words in TEXT


def test_bytes_come_before_counts() -> None:
    assert 0 < TEXT.index("Balanced(OneFOneB(") < TEXT.index("BalancedOneFOneB")


def test_its_table_says_of_each_schedule_what_its_rule_says() -> None:
    """A row has the formulas of the rule, without the conditions that docs/table-of-schedules.md has."""
    formulas = {rule.runs_as: (rule.peak_text, rule.bubble_text) for rule in rules()}
    said = {name: tuple(re.split(r" where |, transfers", text)[0] for text in texts) for name, texts in formulas.items()}
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in LINES if line.startswith("| `")]
    assert len(rows) > 5 and {row[0]: (row[2], row[3]) for row in rows}.items() <= said.items()
    assert f"All {len(said)} schedules" in TEXT


def test_its_loop_runs_before_and_after_the_change() -> None:
    after = run_ranks(weights, 4, "+")
    # torch 2.11 itself refuses a loop that gives every rank the batch.
    before = run_ranks(weights, 4, "-") if release() > (2, 11) else after
    assert all(torch.equal(torch.tensor(a), torch.tensor(b)) for a, b in zip(before, after))


def weights(rank: int, sign: str) -> list[float]:
    """This rank's weights after README's loop."""
    names = trained(rank, changed(TEXT, sign))
    if sign == "+":
        names["schedule"].close()
    found: list[float] = names["part"].weight.flatten().tolist()
    return found


def test_it_links_to_what_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", TEXT)
    pages = {path: (ROOT / path).read_text() for path, _ in links if path.endswith(".md") and (ROOT / path).exists()}
    assert len(links) > 15 and not [path for path, _ in links if not (ROOT / path).exists()]
    found = [(path, heading) for path, text in pages.items() for heading in re.findall(r"(?m)^#+ (.+)$", text)]
    headings = {(path, heading.lower().replace(" ", "-")) for path, heading in found}
    assert not [link for link in links if link[1] and link not in headings]


def test_its_commands_name_what_is_there() -> None:
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    assert {*re.findall(r"(?m)^make (\w+)", TEXT)} <= {*targets}
    assert all((ROOT / path).exists() for path in re.findall(r"torchrun .* (\S+\.py)", TEXT))
