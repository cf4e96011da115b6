"""The gallery: a page for each schedule that bpipe has, made of its rule, its plan and its simulation."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

import bpipe
from bpipe.schedules import Costs, Link, Op, Placement, Plan, Rule, Timeline, build, rules, simulate
from bpipe.schedules.registry import OWN_RULES
from bpipe.tools.commands.schedules import _row, markdown
from docs.making.bars import bars

__all__ = ["page", "pages", "pictures"]

DRAWN = 4, 8  # ranks and microbatches of grids and pictures
COUNTED = 8, 32  # and of the figures
FORWARD_S, SAVED_BYTES = 0.02, 2**30  # of a microbatch, in all stages of a rank
LINK = Link(bytes_per_s=100e9)
REFERENCE = "1f1b"

INDEX = """# Schedules, drawn

A schedule says in which order the ranks of a pipeline run forwards and backwards. It decides how long ranks wait (the
bubble), and how many microbatches' activations a rank holds at a time (the peak). Each schedule below has a page with its
grid, a timeline, its memory on every rank, and what it costs beside 1F1B.

In the formulas p is the number of ranks, m of microbatches, v of stages per rank (virtual stages), and x is a rank. F and B
are the times that a rank's stages take for a microbatch's forward and backward, I and W those of the backward's two halves
(for the inputs and for the weights). k is the number of slices of a microbatch. `bpipe schedules` prints the same table.

{table}

The same figures for {p} ranks and {m} microbatches, relative to 1F1B, where I and W take as long as F and transfers take no
time:

{figures}

"A rank holds" counts microbatches through all stages of a rank. [bpipe chooses](../choosing.md) among all of these for your
model, your machines and your memory; `bpipe compare` shows any two of them on one time axis. [Write your
own](../schedules.md) in about 15 lines. """

PAGE = """# {cls}

{what}

| class | [`bpipe.{cls}`](../reference/schedules.md#bpipe.{cls}) |
|---|---|
| name | `{name}`, for `build`, `bpipe show` and the other commands |
| source | {title} |
| stages | {placement} |
| microbatches | {microbatches} |
| peak on rank x, in microbatches | {peak} |
| bubble of a step | {bubble} |

## When to use it

{use}

These figures are simulated for {p} ranks and {m} microbatches, where I and W take as long as F and transfers take no time.

## The order

{legend}

```text
{grid}
```

A number is a microbatch, and a column the time of a stage's forward. F is a forward, B a backward, which takes two columns
(`B0 b0`). I and W are a backward's two halves, for the inputs and for the weights. {cells}

```bash
{show}
```

## The step, and the memory in it

![Timeline of {name}: when each rank computes and sends, and how much it holds](../gallery/{name}.svg)

Every row is a rank; time goes to the right. The strip below a rank is what it holds at that moment. Here a microbatch takes
{forward_ms} ms for its forward in a rank's stages and saves 1 GiB there, and links carry 100 GB/s.

```bash
{simulate}
```

The most that each rank holds, in microbatches through all of its stages, beside 1F1B:

{bars}

## In Python

```python
from bpipe.schedules import Costs, build, simulate

plan = {build}
print(plan.peak_slots)                                  # of each rank, in microbatches of one stage
print(simulate(plan, Costs(forward_s=0.1)).makespan_s)  # seconds of a step
```

`bpipe.{cls}` runs it: [its arguments and an example](../reference/schedules.md#bpipe.{cls}).
"""


class Figures(NamedTuple):
    """What a schedule takes, at the sizes of `COUNTED`."""

    step: float  # in forwards of a microbatch through a rank's stages
    peaks: tuple[float, ...]  # of each rank, in microbatches
    messages: float  # between ranks, of a microbatch


def pages() -> dict[str, str]:
    """Return the text of the gallery's pages, by their place in the site."""
    return {"gallery/index.md": _index(), **{f"gallery/{rule.name}.md": page(rule) for rule in OWN_RULES}}


def pictures() -> dict[str, bytes]:
    """Return the timelines that the pages show, by their place in the site."""
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for rule in OWN_RULES:
            path = Path(folder) / f"{rule.name}.svg"
            bpipe.draw(_timeline(_plan(rule, *DRAWN)), path)
            made[f"gallery/{path.name}"] = path.read_bytes()
    return made


def _index() -> str:
    figures = ["| schedule | a step takes | the fullest rank holds | messages between ranks |", "|---|---|---|---|"]
    one = _figures(_rule(REFERENCE))
    for rule in OWN_RULES:
        found = _figures(rule)
        relative = f"{found.step / one.step:.2f} | {_number(max(found.peaks))} | {found.messages / one.messages:.2f}"
        figures.append(f"| [{rule.name}]({rule.name}.md) | {relative} |")
    p, m = COUNTED
    table = re.sub(r"(?m)^(\| `\w+` \| )`(\w+)`", r"\1[`\2`](\2.md)", markdown([_row(rule) for rule in OWN_RULES]))
    return INDEX.format(table=table, figures="\n".join(figures), p=p, m=m)


def page(rule: Rule) -> str:
    """Return the text of a schedule's page."""
    plan, (p, m) = _plan(rule, *DRAWN), COUNTED
    sizes = f"{rule.name} -p {DRAWN[0]} -m {DRAWN[1]}" + f" --slices {plan.slices}" * (plan.slices > 1)
    drawn = str(plan).splitlines()
    return PAGE.format(
        title=rule.title,
        what=_docstring(rule),
        cls=rule.runs_as,
        name=rule.name,
        placement=rule.placement.value,
        microbatches=rule.allows_text,
        peak=rule.peak_text,
        bubble=rule.bubble_text,
        use="\n".join(f"- {line}" for line in _advice(rule)),
        p=p,
        m=m,
        legend=drawn[0].removeprefix(f"{rule.name}: ") + ".",
        grid="\n".join(drawn[1:]),
        cells=_cells(plan),
        show=f"bpipe show {sizes}",
        simulate=f"bpipe simulate {sizes} --forward {FORWARD_S * 1000 * _share(plan) ** -1:g}ms --saved "
        f"{SAVED_BYTES // 2**20 // _share(plan)}MiB --bandwidth 100GB/s",
        forward_ms=f"{FORWARD_S * 1000:g}",
        bars=bars(_figures(rule).peaks, _figures(_rule(REFERENCE)).peaks, rule.name, REFERENCE),
        build=f'build("{rule.name}", num_stages={plan.num_stages}, num_microbatches={plan.num_microbatches}'
        + f", num_ranks={plan.num_ranks}" * (plan.num_stages != plan.num_ranks)
        + f", slices={plan.slices}" * (plan.slices > 1)
        + ")",
    )


def _docstring(rule: Rule) -> str:
    """Return what the class's docstring says, without its sections."""
    text = cleandoc(getattr(bpipe, rule.runs_as).__doc__)
    return re.split(r"\n\n(?:Args|Example|Raises|Arguments, methods)\b", text)[0]


def _cells(plan: Plan) -> str:
    said = []
    if plan.num_stages > plan.num_ranks:
        said.append("The number before the letter is the stage.")
    if plan.slices > 1:
        said.append("`F0/1` is the forward of slice 1 of microbatch 0.")
    if any(plan.served):
        said.append("`>1` is the moment from which microbatch 1 leaves for another rank, `<1` that from which it comes back.")
    return " ".join(said)


def _advice(rule: Rule) -> list[str]:
    """Return what speaks for a schedule and against it, from its figures and its properties."""
    own, one = _figures(rule), _figures(_rule(REFERENCE))
    step, peak, most = own.step / one.step, max(own.peaks), max(one.peaks)
    lines = []
    if rule.name != REFERENCE:
        longer = "as long as" if abs(step - 1) < 0.005 else f"{step:.2f} times as long as"
        lines.append(f"A step takes {longer} one of 1F1B. The fullest rank holds up to {_held(peak)}; in 1F1B, {_held(most)}.")
    lines.append(_summary(rule, step, peak, most))
    if max(own.peaks) - min(own.peaks) > 1:
        lines.append("Ranks hold different amounts: `Balanced` moves what is too much on one to others.")
    else:
        lines.append("All ranks hold about the same, so there is nothing to balance among equal stages.")
    if own.messages > 1.1 * one.messages:
        lines.append(f"Ranks send {own.messages / one.messages:.1f} times as many messages as in 1F1B, so it takes a faster link.")
    plan = _plan(rule, *COUNTED)
    if any(plan.served):
        lines.append("It needs a link that carries a microbatch's activations within a forward. A slower one lengthens the step.")
    if any(action.op is Op.W for action in plan.compute(0)):
        lines.append("Backwards run in two halves. What cannot be split, such as a compiled region, runs in the first.")
    if rule.placement.directions > 1:
        lines.append(
            "Each stage exists twice, and with it weights, gradients and optimizer states: [two directions](../two-directions.md)."
        )
    if rule.sliced is not None:
        lines.append("It takes long sequences in [slices](../slices.md); the stages have to take slices, too.")
    if rule.overlapped is not None:
        lines.append("It can run a forward [beside a backward](../overlap.md), which hides a stage's own communication.")
    if rule.local:
        lines.append("It changes what is learned: [no gradient leaves a stage](../relaxed.md).")
    if rule.allows_text != "any":
        lines.append(f"The number of microbatches has to be {rule.allows_text}.")
    return lines


def _summary(rule: Rule, step: float, peak: float, most: float) -> str:
    """Return the sentence that decides."""
    if rule.name == REFERENCE:
        return "Use it to begin with: few messages, one stage per rank, any number of microbatches. Others are compared with it."
    if rule.local:
        return "Use it where a stage may be trained without those behind it. No rank waits for a gradient."
    if peak >= COUNTED[1] and step > 0.995:
        return "Use it with few microbatches: every rank holds all of them at once."
    shorter, less = step < 0.995, peak < most - 0.25
    if shorter and not peak > most + 0.25:
        return "Use it for shorter steps" + (" in less memory." if less else ", which take no more memory.")
    if shorter:
        return "Use it for shorter steps where there is memory left."
    if less:
        longer = "" if step < 1.005 else ", and a longer step pays: with larger microbatches or less recomputation"
        return f"Use it where memory is the limit{longer}."
    return "It takes as long as 1F1B, and no less memory."


@cache
def _figures(rule: Rule) -> Figures:
    plan = _plan(rule, *COUNTED)
    share = _share(plan)
    timeline = simulate(plan, Costs(forward_s=1 / share))
    sends = sum(action.op in (Op.SEND_F, Op.SEND_B) for rank in range(plan.num_ranks) for action in plan.actions[rank])
    peaks = tuple(slots / share for slots in plan.peak_slots)
    return Figures(timeline.makespan_s, peaks, sends / plan.slices / plan.num_microbatches)


def _timeline(plan: Plan) -> Timeline:
    return simulate(plan, Costs(forward_s=FORWARD_S / _share(plan), saved_bytes=SAVED_BYTES // _share(plan), link=LINK))


def _plan(rule: Rule, num_ranks: int, num_microbatches: int) -> Plan:
    slices = 2 if rule.sliced is not None and rule.placement is Placement.ONE else 1  # in whole microbatches it is another one
    num_stages = num_ranks * rule.default_stages_per_rank
    return build(rule.name, num_stages, num_microbatches, num_ranks=num_ranks, slices=slices)


def _share(plan: Plan) -> int:
    """Return in how many computations a microbatch passes a rank."""
    return plan.depth // plan.num_ranks * plan.slices


def _rule(name: str) -> Rule:
    return next(rule for rule in rules() if rule.name == name)


def _held(peak: float) -> str:
    return f"{_number(peak)} microbatch{'es' * (peak != 1)}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
