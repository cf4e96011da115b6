"""The reference: every public name, once, on the page of its topic. mkdocstrings shows its signature and its docstring."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import bpipe

__all__ = ["Public", "pages", "public", "topic_of"]

ROOMS = ("bpipe", "bpipe.schedules", "bpipe.slices", "bpipe.fill", "bpipe.overlap", "bpipe.estimate", "bpipe.partition",
         "bpipe.relaxed", "bpipe.torchtitan", "bpipe.errors")  # fmt: skip


class Topic(NamedTuple):
    """A page: its title, what it begins with, and the modules whose public names it has. The first topic that fits has the name."""

    title: str
    text: str
    modules: tuple[str, ...]


TOPICS = {
    "schedules": Topic(
        "Schedules to train with",
        "A schedule takes this rank's stage, or a list of its stages, and runs training steps. All of them take the arguments of "
        "`Schedule`, and run on every rank in the same way. [The gallery](../gallery/index.md) draws them.",
        (
            *("bpipe.api.catalogue", "bpipe.api.balanced", "bpipe.api.schedule", "bpipe.relaxed.local_learning"),
            *("bpipe.as_torch", "bpipe.torchtitan"),
        ),
    ),
    "stages": Topic(
        "Stages, places, and all ranks in one process",
        "A stage is this rank's part of the model. `Loopback` runs all ranks in one process, for notebooks and tests.",
        ("bpipe.model", "bpipe.api", "bpipe.parallel"),
    ),
    "splitting": Topic(
        "Cut a model into stages",
        "From one model to stages: by names, by measured cost, or by tracing it.",
        ("bpipe.partition",),
    ),
    "choosing": Topic(
        "Choose, predict and measure",
        "What a plan will cost before it runs, and which plan is the fastest within the memory. "
        "[How bpipe chooses](../choosing.md) explains the answers.",
        ("bpipe.chooser", "bpipe.estimate"),
    ),
    "training": Topic(
        "Around a step",
        "What a training loop does besides the step, over all stages: clipping, loss scaling, shared weights, checkpoints.",
        ("bpipe.training", "bpipe.backward.loss_scale"),
    ),
    "seeing": Topic(
        "See what runs",
        "Record what really ran, read it back, and draw it.",
        ("bpipe.tools",),
    ),
    "slices": Topic(
        "Sequences in slices",
        "What the stages of a schedule with slices use. [The guide](../slices.md) says what a stage has to do.",
        ("bpipe.slices",),
    ),
    "fill": Topic(
        "Work while a rank waits",
        "Jobs that run in the bubbles. [The guide](../fill.md) has an example.",
        ("bpipe.fill",),
    ),
    "overlap": Topic(
        "A forward beside a backward",
        "What hides a stage's own communication. [The guide](../overlap.md) says how.",
        ("bpipe.overlap",),
    ),
    "relaxed": Topic(
        "Pipelines that do without something",
        "Local learning, streams, and replicas that come and go. [The guide](../relaxed.md) says what each gives up.",
        ("bpipe.relaxed",),
    ),
    "errors": Topic(
        "Errors",
        "Every error that bpipe raises is a `BPipeError`, and also the built-in error that a caller would expect. "
        "[When it hangs](../when-it-hangs.md) says what to do about each.",
        ("bpipe.errors",),
    ),
    "plans": Topic(
        "Plans, rules and the simulator",
        "All of `bpipe.schedules`: plain Python that needs no torch. It builds plans, proves them, and predicts what they cost.",
        ("bpipe.schedules", "bpipe.plan", "bpipe.passes", "bpipe.simulator", "bpipe.verifier", "bpipe.skips"),
    ),
}


class Public(NamedTuple):
    """A public name: where users import it from, and where it is defined."""

    room: str
    name: str
    home: str

    @property
    def value(self) -> Any:
        """The object that it names."""
        return getattr(import_module(self.room), self.name)

    @property
    def called(self) -> str:
        """The name that its definition has: another one, if this is a second name for it."""
        return str(getattr(self.value, "__name__", self.name))


def public() -> list[Public]:
    """Return every public name once, from the room where users find it first."""
    found: dict[tuple[str, str], Public] = {}
    for room in ROOMS:
        for name in import_module(room).__all__:
            if not name.startswith("__"):
                home = _home(room, name)
                found.setdefault((home, name), Public(room, name, home))
    return list(found.values())


def _home(room: str, name: str) -> str:
    value = getattr(import_module(room), name)
    return str(getattr(value, "__module__", None) or f"bpipe.{bpipe._HOMES[name]}")


def topic_of(one: Public) -> str:
    """Return the page that a name is on.

    Raises:
        LookupError: no topic has the module that defines it.
    """
    for module in (one.home, one.room):
        for page, topic in TOPICS.items():
            if any(f"{module}.".startswith(f"{known}.") for known in topic.modules):
                return page
    if one.home.split(".")[0] != "bpipe":
        return "stages"  # torch's own, which bpipe hands on
    raise LookupError(f"no page of the reference has {one.home}.{one.name}: add its module to TOPICS in docs/making/reference.py")


def pages() -> dict[str, str]:
    """Return the text of the reference's pages, by their place in the site."""
    names: dict[str, list[Public]] = {page: [] for page in TOPICS}
    for one in sorted(public(), key=lambda one: (one.room, one.name.casefold())):
        names[topic_of(one)].append(one)
    return {"reference/index.md": _index(names), **{f"reference/{page}.md": _page(page, found) for page, found in names.items()}}


def _index(names: dict[str, list[Public]]) -> str:
    lines = ["# Reference", "", "Every public name. Each has an example that runs, and runs in the tests.", ""]
    for page, found in names.items():
        links = ", ".join(f"[`{one.name}`]({page}.md#{one.room}.{one.name})" for one in found)
        lines += [f"## [{TOPICS[page].title}]({page}.md)", "", TOPICS[page].text.partition(" [")[0], "", links, ""]
    return "\n".join(lines)


def _page(page: str, found: list[Public]) -> str:
    topic = TOPICS[page]
    return "\n\n".join([f"# {topic.title}", topic.text, *map(_entry, found)]) + "\n"


def _entry(one: Public) -> str:
    anchor, imported = f'<a id="{one.room}.{one.name}"></a>', f"`from {one.room} import {one.name}`"
    if not one.home.startswith("bpipe"):
        return f"{anchor}\n\n## {one.name}\n\n{imported} is PyTorch's own `{one.home}.{one.name}`."
    if one.called != one.name:
        return f"{anchor}\n\n## {one.name}\n\n{imported} is another name of [`{one.called}`](#{one.room}.{one.called})."
    return f"{anchor}\n\n::: {one.home}.{one.name}\n\n{imported}"
