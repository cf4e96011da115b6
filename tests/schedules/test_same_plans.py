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
        (SOME, 85, "71da2a96147f7cfe890c52328f7e80fcd12bbca259d42ee07b60b93c3e64054a"),
        (ALL, 1300, "ab9fa7e371bfe7ef1e940158eef2a6e0c5527e864ecbd468b908bb2d047bc64d"),
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
