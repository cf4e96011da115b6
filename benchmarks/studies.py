"""All studies, in the order of RESULTS.md."""

from __future__ import annotations

from benchmarks import (
    against_torch,
    balanced_plain,
    growth,
    many_ranks,
    one_gpu,
    real_choices,
    same_cap,
    search_study,
    sliced_plain,
)

STUDIES = (
    against_torch.STUDY,
    balanced_plain.STUDY,
    sliced_plain.STUDY,
    same_cap.STUDY,
    real_choices.STUDY,
    one_gpu.STUDY,
    growth.STUDY,
    many_ranks.STUDY,
    search_study.STUDY,
)
