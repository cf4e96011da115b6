"""The choices that follow from the published: which plan is the fastest that fits, and what `bpipe.advise` says today."""

from __future__ import annotations

from functools import cache

from benchmarks.published.claim import Claim, Shown
from benchmarks.published.scenarios import BALANCED, BYTES_PER_PARAMETER, SCENARIOS, Scenario, Way
from bpipe.estimate import Advice
from bpipe.estimate.advise_inputs import RESERVED_SHARE
from bpipe.estimate.workload import DEFAULT_EFFICIENCY

Key = tuple[Way, int, str]


def ranked(scenario: Scenario) -> tuple[list[Key], list[Key]]:
    """Return the plans that fit, the fastest first (of equals, the one that moves less), and those that do not."""
    outcomes = scenario.outcomes()
    order = sorted(outcomes, key=lambda key: (float(f"{outcomes[key].step_s:.4g}"), key[0] == BALANCED))
    return [key for key in order if outcomes[key].fits], [key for key in order if not outcomes[key].fits]


@cache
def advice_on(scenario: Scenario) -> Advice:
    """Return what `bpipe.advise` says."""
    return scenario.advice()


def told(scenario: Scenario, key: Key) -> str:
    """Return a plan in words, without what all plans of a scenario share."""
    way, size, how = key
    return f"{way}" + f", microbatch {size}" * (len(scenario.efficiency) > 1) + f", {how}" * (len(scenario.recomputations) > 1)


def cells(scenario: Scenario) -> list[str]:
    """Return a scenario's row."""
    outcomes, (fitting, others) = scenario.outcomes(), ranked(scenario)
    best = outcomes[fitting[0]].step_s
    slower = [f"{outcomes[key].step_s / best:.2f}x over {told(scenario, key)}" for key in fitting[1:]]
    missing = "; ".join(told(scenario, key) for key in others)
    advised = advice_on(scenario).verdict.partition("\n")[0]
    return [scenario.name, scenario.source, told(scenario, fitting[0]), "; ".join(slower), missing, advised]


@cache
def show_choices() -> Shown:
    return Shown(
        brief="see the table: the fastest plan that fits, what it gains over the others, and today's advice",
        columns=(
            "scenario",
            "source and outcome there",
            "fastest that fits",
            "what it gains over the others that fit",
            "do not fit",
            "`bpipe advise` today",
        ),
        rows=[cells(scenario) for scenario in SCENARIOS],
        text=(
            "Balance is the fastest where it paid, and not where it did not. V-Half and V-Min are behind ZB-V and slices in both "
            "long contexts, and in the longer one only slices fit. The large vocabulary takes a cut that leaves the last stage "
            "without layers. Evictions over the slow link lose to the plain plan, and where that does not fit, to recomputation. "
            "Breadth-first takes as long as interleaved 1F1B as long as the weights are whole; what sets them apart is in its own "
            "section. `bpipe advise` ranks 1F1B and GPipe, plain and balanced, and with `slices=` Seq1F1B. So it does not know "
            "plans with several stages per rank or ones that recompute only some microbatches, and it takes a cut of layers "
            "without choosing one, which `bpipe.choose_stages` does. Each scenario is data in `benchmarks/published/scenarios.py`: "
            "costs, bytes and budget for every microbatch size and recomputation. A backward takes two forwards, divided into "
            "halves by attention's share of a layer. Of two plans that take the same time, the one that moves nothing comes first."
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
