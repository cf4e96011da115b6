"""The figures that may only fall: `ratchets.json`, beside this file, has what each one may be.

A ratchet falls when there is less to know: less code, fewer fields and parameters, fewer ties, a smaller core. Moving code without
untying it and documenting it change none. So these are not ratchets: files, and how many of them name a feature (the lines that
name it stay as many when files are joined); lines, those of docstrings, and those by room; a record's own fields (a record inside
it can hide them). Bodies and classes are ratchets, though documentation may make one too long: then it is too long to read.

An issue that states a growth, or one that mends a defect, raises a figure: by hand, in a commit that says by how much.
`python -m tests.house --lower` writes the figures that fell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tests.house.imports import arrows, circles, room_arrows
from tests.house.source import Source
from tests.house.walk import Walk
from tests.house.weight import fields, naming, parameters, weight

TABLE = "tests/house/ratchets.json"
WEIGHED = ("statements", "tokens", "bodies over 40 lines", "classes over 250 lines")
COMPARABLE = sys.version_info < (3, 12)  # the ratchets are of Python 3.11; later ones cut f-strings into tokens
PAPER = ("files", "lines", "lines of docstrings")
REMEDY = (
    "Take something else out, or, if the issue states this growth or mends a defect, raise the figure in "
    f"{TABLE}, in a commit that says by how much."
)


def figures(source: Source, package: ModuleType, walked: Walk) -> dict[str, int]:
    """All ratchets of a checkout, whose package is imported."""
    assert Path(package.__path__[0]).samefile(source.root / "bpipe"), f"{package} is not of {source.root}"
    return {
        **{f"{figure} in {place}": weights[figure] for place, weights in weights_by_place(source).items() for figure in WEIGHED},
        **{f"lines of the core that name {feature}": lines for feature, (_, lines) in naming(source.core).items()},
        **{f"fields of {record}, with those inside": inside for record, (_, inside) in fields(source.package).items()},
        "parameters of public callables": parameters(package),
        "rooms in circles": sum(map(len, circles(room_arrows(source.package)))),
        "modules in circles": sum(map(len, circles(arrows(source.package)))),
        "uses of private attributes of our other objects": len(source.reaches()),
        "dicts by microbatch": len(source.dicts_by_microbatch()),
        "docstrings whose first line is not imperative": source.docstrings()[1],
        "plans that a rank proves for a balanced schedule": walked.proofs,
        "switches of files in an evicted microbatch's step": walked.switches,
        "classes that a step meets": len(walked.classes_met),
        "files that a step meets": len(walked.files_met),
    }


def remarks(source: Source, walked: Walk) -> dict[str, object]:
    """The figures that are no ratchets."""
    documented, _ = source.docstrings()
    rooms = sorted({module.room for module in source.package} - {""})
    return {
        **{f"{figure} in {place}": weights[figure] for place, weights in weights_by_place(source).items() for figure in PAPER},
        **{f"files of the core that name {feature}": files for feature, (files, _) in naming(source.core).items()},
        **{f"fields of {record} itself": own for record, (own, _) in fields(source.package).items()},
        "functions with a docstring": documented,
        "files that an evicted microbatch goes through": len(set(walked.files)),
        **{f"lines in {room}/": weight([module for module in source.package if module.room == room])["lines"] for room in rooms},
    }


def weights_by_place(source: Source) -> dict[str, dict[str, int]]:
    places = {"bpipe": source.package, "bpipe and benchmarks": source.package + source.benchmarks, "core": source.core}
    return {place: weight(modules) for place, modules in places.items()}


def limits(root: Path) -> dict[str, int]:
    """What each ratchet may be."""
    return json.loads((root / TABLE).read_text())


def beyond(found: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """What is wrong: figures that grew, and those without a ratchet or of nothing that is there."""
    grown = [name for name in limits if found.get(name, 0) > limits[name]]
    return [
        *(f"{name}: {found[name]}, {found[name] - limits[name]} more than {limits[name]}" for name in grown),
        *(f"{name}: has no ratchet; today it is {found[name]}" for name in found if name not in limits),
        *(f"{name}: is measured no more; has it another name now?" for name in limits if name not in found),
    ]


def lower(root: Path, found: Mapping[str, int]) -> None:
    """Write the figures that fell; none is raised, and those that are measured no more stay for a person to look at."""
    lowered = {name: min(limit, found.get(name, limit)) for name, limit in limits(root).items()}
    (root / TABLE).write_text(json.dumps(lowered, indent=2) + "\n")
