"""Plans of chains stay as they are, action for action: users store them, and ranks compare them by fingerprint.

A change that is meant to alter plans changes these hashes, and says so in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import product

import pytest

from bpipe.errors import BPipeError
from bpipe.schedules import build

RULES = (
    *("gpipe", "1f1b", "balanced_1f1b", "interleaved_1f1b", "breadth_first", "zb_h1", "zb_h2", "zbv", "v_half", "v_min"),
    *("dualpipe_v", "seq_1f1b", "tera_pipe", "chimera", "bitpipe", "bitpipe_reordered", "bitpipe_zb"),
)
SOME = ([2, 4], [1, 2], [4, 8], [1, 3], [None, 3])  # ranks, stages of each, microbatches, slices, slots
ALL = ([2, 3, 4, 6, 8], [1, 2, 3, 4], [1, 2, 4, 5, 8, 12, 16], [1, 3], [None, 3, 5])


@pytest.mark.parametrize(
    ("matrix", "num_plans", "digest"),
    [
        (SOME, 85, "029bbfc85a34e06810eca6edd7bf2dd609b7dfb93341c3a605813931ee16c2d6"),
        (ALL, 1300, "e4918b894e536d223b08c839a442cc314456e3c105e4da6da1777915deb2a4ce"),
    ],
    ids=["some", "all"],
)
def test_plans_have_the_fingerprints_that_they_had(matrix: Sequence[Sequence[int | None]], num_plans: int, digest: str) -> None:
    found, built = hashlib.sha256(), 0
    for name, p, v, m, k, slots in product(RULES, *matrix):
        assert p is not None and v is not None and m is not None and k is not None
        try:
            fingerprint = build(name, p * v, m, num_ranks=p, slices=k, slots=slots).fingerprint()
            built += 1
        except BPipeError:
            fingerprint = "x"
        found.update(fingerprint.encode())
    assert (built, found.hexdigest()) == (num_plans, digest)
