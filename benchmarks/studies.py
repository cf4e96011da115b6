"""All studies, in the order of RESULTS.md."""

from __future__ import annotations

from benchmarks import against_torch, balanced_plain, growth, overheads, same_cap

STUDIES = (against_torch.STUDY, balanced_plain.STUDY, same_cap.STUDY, overheads.STUDY, growth.STUDY)
