"""The choice as data: the plan to run, the next best of each kind with the reason why it loses, and what all of it rests on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bpipe.errors import ConfigurationError, printable
from bpipe.estimate.columns import columns
from bpipe.estimate.workload import Load
from bpipe.plan.amounts import show_bytes
from bpipe.plan.plan import Plan

__all__: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A way to run the step.

    Args:
        name: the schedule, what keeps it within the budget, and its load.
        kind: what the comparison is about: the schedule's name, and how it keeps the budget.
        step_s: simulated seconds of a step; None if it does not fit, or was not simulated because it cannot be the fastest.
        least_s: the step of its order if memory were no matter; `step_s` if that is known.
        reason: why it was chosen, or why not.
    """

    name: str
    kind: str
    step_s: float | None
    least_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The result of `bpipe.choose_plan`. `str` formats it for people; `plan` runs by `bpipe.FromPlan`.

    Args:
        plan: the finished and verified plan.
        stages: for each stage the names of its layers' modules, as `split_model` and `split_traced` take them.
        microbatch_size: rows of a microbatch; 0 if microbatches were cut already.
        recomputation: inside each layer, such as "selective"; empty if layers run as they were measured.
        name: the plan in words.
        step_s: its simulated step, in seconds.
        bound_s: seconds below which no step of the same computations on these stages can be, in any order and with any memory.
        device_peak_bytes: predicted for each rank: everything that its device holds.
        budgets: the bytes that each rank may hold; None: no limit.
        others: the best of each other kind, the fastest first.
        assumptions: what this rests on.
        to_measure: what would make it surer.
        num_considered: ways that were compared.
    """

    plan: Plan
    stages: tuple[tuple[str, ...], ...]
    microbatch_size: int
    recomputation: str
    name: str
    step_s: float
    bound_s: float
    device_peak_bytes: tuple[int, ...]
    budgets: tuple[int | None, ...]
    others: tuple[Alternative, ...]
    assumptions: tuple[str, ...]
    to_measure: tuple[str, ...]
    num_considered: int

    @property
    def load(self) -> Load:
        """What a microbatch is."""
        return Load(self.microbatch_size, self.recomputation)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain numbers, strings, lists and dicts; the plan is its text."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        others = [{name: getattr(one, name) for name in one.__slots__} for one in self.others]
        return fields | {"plan": self.plan.to_text(), "others": others}

    def to_json(self) -> str:
        """Return all of it as JSON that `Choice.from_json` reads back unchanged."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Choice:
        """Read what `to_json` wrote; `verify` the plan before it runs, as `FromPlan` does.

        Raises:
            ConfigurationError: the text is not such a choice.
        """
        try:
            fields = json.loads(text)
            read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
            read["plan"] = Plan.from_text(fields["plan"])
            read["stages"] = tuple(map(tuple, fields["stages"]))
            read["others"] = tuple(Alternative(**one) for one in fields["others"])
            return cls(**read)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(f"this is not a choice that to_json() wrote: {printable(str(error))[:200]}") from error

    def __repr__(self) -> str:
        return f"Choice({self.name}: a step of {show_s(self.step_s)}, simulated; {self.num_considered} ways compared)"

    def __str__(self) -> str:
        peak = max(self.device_peak_bytes)
        rank = self.device_peak_bytes.index(peak)
        budget = self.budgets[rank]
        of = "" if budget is None else f" of {show_bytes(budget)}"
        gap = self.step_s / self.bound_s - 1 if self.bound_s > 0 else 0.0
        lines = [
            f"Run {self.name}: a step of {show_s(self.step_s)}, simulated.",
            f"Fullest: rank {rank}, {show_bytes(peak)}{of}.",
            f"Another order of the same computations could gain {100 * gap:.1f}% at most.",
            *([f"Layers of each stage: {' '.join(str(len(names)) for names in self.stages)}."] if self.microbatch_size else []),
            "",
            "The best of the other kinds, their steps over this one, and why they lose:",
            *(f"  {line}" for line in columns([(one.name, self._times(one), one.reason) for one in self.others]) or ["none"]),
            f"Compared: {self.num_considered} ways.",
        ]
        for head, texts in (("Assumed", self.assumptions), ("To be surer", self.to_measure)):
            lines += ["", f"{head}:", *(f"- {text}" for text in texts)] if texts else []
        return "\n".join(lines)

    def _times(self, one: Alternative) -> str:
        if one.step_s is not None:
            return f"{one.step_s / self.step_s:.3f}"
        return f">= {one.least_s / self.step_s:.3f}" if one.least_s >= self.step_s else "-"


def show_s(seconds: float) -> str:
    """Format seconds."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"
