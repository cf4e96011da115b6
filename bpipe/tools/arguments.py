"""Arguments that several commands share: a schedule by name or from a file, and what its actions cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from bpipe.comm.placement import pair_adjacent
from bpipe.errors import ConfigurationError, PlanError
from bpipe.estimate.calibrate import calibrated
from bpipe.schedules import Costs, Link, Plan, Timeline, build, names, simulate, verify
from bpipe.tools.measured import typical
from bpipe.tools.quantities import bytes_of, bytes_per_second_of, one_or_each, seconds_of
from bpipe.tools.terminal import sign_of_life

__all__: list[str] = []


def add_plan(parser: argparse.ArgumentParser, *, num: str | None = None) -> None:
    """A schedule or several, and the sizes of its pipeline."""
    parser.add_argument(
        "schedule", nargs=num, help=f"{', '.join(names())}, or a file: a plan's text, its CSV, or a trace", metavar="SCHEDULE"
    )
    parser.add_argument("-p", "--stages", type=whole, help="stages of the pipeline, one a rank")
    parser.add_argument("-m", "--microbatches", type=whole, help="microbatches of a step")
    parser.add_argument(
        "--slots", type=slots, help="most microbatches a rank may hold, one number or one a rank with commas ('-': no limit)"
    )


def add_costs(parser: argparse.ArgumentParser) -> None:
    """The numbers of a `Costs`: one, or one a stage with commas between them."""
    group = parser.add_argument_group("costs", "one for all stages, or one for each with commas between them")
    for name, (_, read, metavar, text) in BY_STAGE.items():
        group.add_argument(f"--{name}", type=quantity(read), metavar=metavar, help=text)
    for name, read, metavar, text in (
        ("bandwidth", bytes_per_second_of, "RATE", "of a link in one direction, such as 25GB/s (default: no limit)"),
        ("cross-bandwidth", bytes_per_second_of, "RATE", "of a link between nodes (default: the same)"),
        ("latency", seconds_of, "TIME", "of a link, such as 5us"),
    ):
        group.add_argument(f"--{name}", type=single(read), metavar=metavar, help=text)
    group.add_argument("--ranks-per-node", type=whole, metavar="N", help="ranks on a node; stages x and p-1-x share one")
    group.add_argument("--slowdown", type=float, default=1.0, metavar="X", help="of computations while a transfer runs")
    group.add_argument("--measured", type=Path, metavar="TRACE", help="take times and bytes from a trace instead")
    group.add_argument("--step", type=int, metavar="N", help="of a trace: its number (default: the step of median length)")


BY_STAGE: dict[str, tuple[str, Callable[[str], float], str, str]] = {
    "forward": ("forward_s", seconds_of, "TIME", "a forward, such as 20ms (default: 1)"),
    "backward": ("backward_s", seconds_of, "TIME", "a backward (default: two forwards)"),
    "saved": ("saved_bytes", bytes_of, "BYTES", "what a microbatch saves, such as 1.5GiB"),
    "movable": ("movable_bytes", bytes_of, "BYTES", "of these, what an eviction moves (default: all)"),
    "output": ("output_bytes", bytes_of, "BYTES", "what goes from one stage to the next"),
    "static": ("static_bytes", bytes_of, "BYTES", "what stays throughout: parameters, optimizer"),
}


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def slots(text: str) -> int | tuple[int | None, ...] | None:
    def read(part: str) -> int | None:
        return None if part == "-" else whole(part)

    return one_or_each(text, read)


def quantity(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """One or several of a quantity."""
    return single(lambda text: one_or_each(text, read))


def single(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A quantity as argparse wants its types: with its kind of error."""

    def read_quantity(text: str) -> Any:
        try:
            return read(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_quantity


def is_file(schedule: str) -> bool:
    """Whether a schedule is given by a path: a name never looks like one."""
    return schedule not in names() and ("." in schedule or "/" in schedule or Path(schedule).exists())


def plan_of(schedule: str, args: argparse.Namespace) -> Plan:
    """The plan that the arguments name, verified.

    Raises:
        ConfigurationError, PlanError, OSError: there is none.
    """
    sizes = (args.stages, args.microbatches, args.slots)
    if is_file(schedule):
        if isinstance(args.schedule, str) and sizes != (None, None, None):
            raise ConfigurationError(f"{schedule} is a file and says its own sizes: leave --stages, --microbatches and --slots out")
        return verified(Path(schedule))
    if args.stages is None or args.microbatches is None:
        build(schedule, 1, 1)  # an unknown name first
        raise ConfigurationError(f"{schedule}: say how large, such as --stages 4 --microbatches 8")
    with sign_of_life(f"Planning {schedule} for {args.stages} stages and {args.microbatches} microbatches"):
        return build(schedule, args.stages, args.microbatches, slots=args.slots)


def verified(path: Path) -> Plan:
    """A plan from a file, proven."""
    plan = read_plan(path)
    verify(plan)
    return plan


def read_plan(path: Path) -> Plan:
    """A plan from its text, its CSV, or a trace; not verified.

    Raises:
        ConfigurationError, OSError: there is none.
    """
    if is_trace(path):
        return typical(read_trace(path)).plan
    try:
        text = path.read_text(encoding="utf-8")
        return Plan.from_text(text) if text.startswith("bpipe-plan") else Plan.from_csv(text, path.stem.replace(" ", "_"))
    except (UnicodeDecodeError, PlanError) as error:
        raise ConfigurationError(f"{path} is no plan: {error}") from error


def is_trace(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".json"


def read_trace(path: Path) -> list[Timeline]:
    """The steps of a trace."""
    from bpipe.tools.chrome_read import load_trace

    with sign_of_life(f"Reading {path}"):
        return load_trace(path)


def timeline_of(schedule: str, args: argparse.Namespace) -> Timeline:
    """A measured step if a trace is given, else the plan's simulated one."""
    if is_file(schedule) and is_trace(Path(schedule)):
        return chosen_step(read_trace(Path(schedule)), args.step)
    plan = plan_of(schedule, args)
    if args.step is not None and args.measured is None:
        raise ConfigurationError("--step is of a trace, and there is none")
    costs = costs_of(args, plan)
    with sign_of_life(f"Simulating {sum(map(len, plan.actions))} actions"):
        return simulate(plan, costs)


def chosen_step(timelines: list[Timeline], step: int | None) -> Timeline:
    """The step with a number; without one, the typical one."""
    if step is None:
        return typical(timelines)
    for timeline in timelines:
        if timeline.step == step:
            return timeline
    raise ConfigurationError(f"the trace has no step {step}; it has {', '.join(str(t.step) for t in timelines)}")


def costs_of(args: argparse.Namespace, plan: Plan) -> Costs:
    """The costs that the arguments give."""
    latency = args.latency or 0.0
    links = {
        "link": Link(latency_s=latency, bytes_per_s=inf if args.bandwidth is None else args.bandwidth),
        "cross_link": None if args.cross_bandwidth is None else Link(latency_s=latency, bytes_per_s=args.cross_bandwidth),
        "nodes": nodes_of(args, plan),
        "slowdown": args.slowdown,
    }
    given = {field: getattr(args, name) for name, (field, *_) in BY_STAGE.items() if getattr(args, name) is not None}
    if args.measured is None:
        return Costs(**given, **links)
    if given:
        raise ConfigurationError(f"--measured gives the times and bytes of stages: leave {', '.join(given)} out")
    steps = read_trace(args.measured)
    return replace(calibrated(steps if args.step is None else [chosen_step(steps, args.step)], plan), **links)


def nodes_of(args: argparse.Namespace, plan: Plan) -> list[int] | None:
    """The node of each rank when the stages of a pair share one."""
    if args.ranks_per_node is None:
        if args.cross_bandwidth is not None:
            raise ConfigurationError("--cross-bandwidth needs --ranks-per-node, to say which ranks are on different nodes")
        return None
    return nodes_of_pairs(args, [plan.num_ranks])


def nodes_of_pairs(args: argparse.Namespace, num_stages: Sequence[int] | None) -> list[int] | None:
    """The node of each of the most stages, pair-adjacent, if the ranks of a node were given."""
    if args.ranks_per_node is None or not num_stages:
        return None
    stages = pair_adjacent(max(num_stages), args.ranks_per_node)
    return [stages.index(stage) // args.ranks_per_node for stage in range(len(stages))]
