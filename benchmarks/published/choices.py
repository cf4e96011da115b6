"""The choices that follow from the published: what `bpipe.choose_plan` chooses, of 1F1B and GPipe alone and of everything."""

from __future__ import annotations

from functools import cache

from benchmarks.published.claim import Claim, Shown
from benchmarks.published.scenarios import BYTES_PER_PARAMETER, SCENARIOS, Scenario
from bpipe.api.options import Options
from bpipe.chooser.choose_plan import choose_plan
from bpipe.chooser.plan_choice import Choice
from bpipe.estimate.advise_inputs import RESERVED_SHARE
from bpipe.estimate.workload import DEFAULT_EFFICIENCY

CLASSIC = ("1f1b", "gpipe")


@cache
def chosen(scenario: Scenario, *, of_all: bool) -> Choice:
    """Return the choice among 1F1B and GPipe with one stage a rank, or among everything; orders are not made to measure."""
    slices = (1, 4) if of_all and scenario.attention == "flash" else (1,)
    return choose_plan(
        scenario.model,
        num_ranks=scenario.num_ranks,
        schedules=None if of_all else CLASSIC,
        stages_per_rank=(1, 2, 4) if of_all else (1,),
        slices=slices,
        options=Options(effort=0),
        **scenario.described,
    )


def gains(choice: Choice, most: int) -> str:
    """Return what a choice gains over the next best of other kinds, that were simulated within the memory or not at all."""
    shown = [one for one in choice.others if one.step_s is not None or one.least_s >= choice.step_s][:most]
    return "; ".join(f"{one.least_s / choice.step_s:.2f}x over {one.name}" for one in shown) or "no other plan that fits is as fast"


def cells(scenario: Scenario) -> list[str]:
    """Return a scenario's row."""
    classic, best = (chosen(scenario, of_all=of_all) for of_all in (False, True))
    over = f"{classic.step_s / best.step_s:.2f}x over the choice beside; {gains(best, 2)}"
    return [scenario.name, scenario.source, classic.name, gains(classic, 2), best.name, over]


def show_choices() -> Shown:
    return Shown(
        brief="see the table: what is chosen of 1F1B and GPipe and of everything, and what that gains",
        columns=(
            "scenario",
            "source and outcome there",
            "chosen of 1F1B and GPipe",
            "gains",
            "chosen of everything",
            "gains",
        ),
        rows=[cells(scenario) for scenario in SCENARIOS],
        text=(
            "Of 1F1B and GPipe, which the sources compare, activations are offloaded where balance paid, and not where it did "
            "not: neither for LLaMA 65B, nor over the slow link where 1F1B fits. Where it does not fit there, so few "
            "microbatches are offloaded that they hide; balanced 1F1B offloads more, and loses. A cut that gives the first "
            "ranks fewer layers is the next best where balance gained 1.35x over the smaller microbatch: it loses 5%. Of "
            "everything, other schedules are faster than either, because their bubbles are shorter, and they need less "
            "memory, or none that has to move. V-Half and V-Min are chosen for neither of the long contexts. The head of the "
            "large vocabulary gets a stage of its own. At small batches several stages a rank pay; breadth-first takes as "
            "long as interleaved 1F1B while weights are whole, and what sets them apart is in its own section. The ratio of a "
            "plan that does not fit, or cannot be the fastest, is that of its order if memory were no matter. Slices are "
            "taken to be as efficient as whole sequences, and are tried where attention is fused. Orders made to measure are "
            "left out here; `bpipe advise` makes them. Each scenario is data in `benchmarks/published/scenarios.py`."
        ),
    )


CHOICES = Claim(
    name="choices",
    title="The choices that follow",
    published=(
        "balance where it paid and not where it did not, no V-Half for long contexts, no evictions over slow links, breadth-first "
        "at small batches"
    ),
    source="each scenario has its own",
    reach="simulated",
    assumed=(
        f"{DEFAULT_EFFICIENCY:.0%} of the peak, {BYTES_PER_PARAMETER:g} bytes per parameter and {RESERVED_SHARE:.0%} of the memory "
        "set aside, where nothing else is said."
    ),
    show=show_choices,
)
