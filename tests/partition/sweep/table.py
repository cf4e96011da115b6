"""The page that says which classes of Transformers `split_transformer` cuts: written from a run of the sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.partition.sweep.outcome import NOT_BUILT, REFUSED, RIGHT, Outcome

PATH = Path(__file__).resolve().parents[3] / "docs" / "transformers.md"

HEAD = """# Hugging Face Transformers, class by class

This page lists how `bpipe.split_transformer` handles every class of transformers {version} that an `AutoModel` knows. A sweep
wrote it: it builds a small random model of each class, cuts it into 2 stages and into as many as it has layers, and compares the
stages with the whole model, in train mode, with and without padding. *Right* means that outputs and the gradients of all parameters
are equal to the bit; *refused*, that the split raises ConfigurationError and makes no stage; *not built*, that the sweep cannot
build a small model of the class. The sweep gives text only, no images or sound, because these models are cut as language models.
Sizes are small, factors are not 1, and the other switches are those of a default configuration; each split is proven with your
switches, so that DeBERTa-v2 with `relative_attention` is refused.

{num_right} classes are right, {num_refused} are refused, and {num_not_built} could not be built by the sweep. {num_others} more
take no `inputs_embeds`, so a stage could not begin with hidden states; they are refused for that reason.

The sweep writes this page:

    make test-all ARGS="-n 0 tests/partition/test_all_transformers.py --write-transformers"
"""

IN_SLICES = "## In slices"
SLICES = """{title}

Another sweep hands stages to `bpipe.slices.sliced_transformer`: those of the classes above that predict words, without dropout. It
compares the gradients of a step in three slices with those of whole sequences, in double precision where a class computes in it.
{num_right} classes are right, and {num_refused} are refused by name, which happens before anything is trained, because
`sliced_transformer` proves each kind of model on a small one of your own configuration.

    make test-all ARGS="-n 0 tests/slices/test_transformers_by_class.py --write-transformers"

"""


def slices_section(found: Sequence[Outcome]) -> str:
    """Return the end of the page: which of the classes that are cut take slices."""
    kinds = {kind: [one for one in sorted(found, key=lambda one: one.name) if one.kind == kind] for kind in (RIGHT, REFUSED)}
    head = SLICES.format(title=IN_SLICES, num_right=len(kinds[RIGHT]), num_refused=len(kinds[REFUSED]))
    names = ", ".join(f"`{one.name}`" for one in kinds[RIGHT])
    return head + "\n".join([f"### Take slices\n\n{names}\n", *_table("Take no slices", kinds[REFUSED], level="###")])


def page(found: Sequence[Outcome], num_others: int, version: str) -> str:
    """The page, with the classes that are cut, those that are refused by reason, and the rest."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for one in sorted(found, key=lambda one: one.name):
        by_kind[one.kind].append(one)
    counts = {f"num_{kind.replace(' ', '_')}": len(by_kind[kind]) for kind in (RIGHT, REFUSED, NOT_BUILT)}
    parts = [
        HEAD.format(version=version, num_others=num_others, **counts),
        "## Right\n",
        ", ".join(f"`{one.name}`" for one in by_kind[RIGHT]) + "\n",
        *_table("Refused", by_kind[REFUSED]),
        *_table("Not built", by_kind[NOT_BUILT]),
    ]
    return "\n".join(parts)


def _table(title: str, found: Sequence[Outcome], level: str = "##") -> list[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in found:
        by_reason[one.why].append(f"`{one.name}`")
    rows = sorted(by_reason.items(), key=lambda row: (-len(row[1]), row[0]))
    return [f"{level} {title}\n", "| why | classes |", "|---|---|", *(f"| {why} | {', '.join(names)} |" for why, names in rows), ""]
