"""Arguments that several commands share: a schedule by name or from a file, and what its actions cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bpipe.comm.placement import pair_adjacent
from bpipe.errors import ConfigurationError, PlanError
from bpipe.schedules import Costs, Link, Plan, Timeline, build, names, simulate, verify
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
    for name, read, default, metavar, text in (
        ("forward", seconds_of, 1.0, "TIME", "a forward, such as 20ms (default: 1)"),
        ("backward", seconds_of, None, "TIME", "a backward (default: two forwards)"),
        ("saved", bytes_of, 0, "BYTES", "what a microbatch saves, such as 1.5GiB"),
        ("movable", bytes_of, None, "BYTES", "of these, what an eviction moves (default: all)"),
        ("output", bytes_of, 0, "BYTES", "what goes from one stage to the next"),
        ("static", bytes_of, 0, "BYTES", "what stays throughout: parameters, optimizer"),
        ("bandwidth", bytes_per_second_of, None, "RATE", "of a link in one direction, such as 25GB/s (default: no limit)"),
        ("cross-bandwidth", bytes_per_second_of, None, "RATE", "of a link between nodes (default: the same)"),
        ("latency", seconds_of, 0.0, "TIME", "of a link, such as 5us"),
    ):
        group.add_argument(f"--{name}", type=quantity(read), default=default, metavar=metavar, help=text)
    group.add_argument("--ranks-per-node", type=whole, metavar="N", help="ranks on a node; stages x and p-1-x share one")
    group.add_argument("--slowdown", type=float, default=1.0, metavar="X", help="of computations while a transfer runs")
    group.add_argument("--measured", type=Path, metavar="TRACE", help="take the times from a trace instead")
    group.add_argument("--step", type=int, metavar="N", help="of a trace: its number (default: the step of median length)")


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def slots(text: str) -> int | tuple[int | None, ...] | None:
    def read(part: str) -> int | None:
        return None if part == "-" else whole(part)

    return one_or_each(text, read)


def quantity(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """One or several of a quantity, as argparse wants its types: with its kind of error."""

    def read_quantity(text: str) -> Any:
        try:
            return one_or_each(text, read)
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
    if is_file(schedule):
        return verified(Path(schedule))
    if args.stages is None or args.microbatches is None:
        build(schedule, 1, 1)  # an unknown name first
        raise ConfigurationError(f"{schedule}: say how large, such as --stages 4 --microbatches 8")
    with sign_of_life(f"Planning {schedule} for {args.stages} stages and {args.microbatches} microbatches ..."):
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
        return read_trace(path)[-1].plan
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

    with sign_of_life(f"Reading {path} ..."):
        return load_trace(path)


def timeline_of(schedule: str, args: argparse.Namespace) -> Timeline:
    """A measured step if a trace is given, else the plan's simulated one."""
    if is_file(schedule) and is_trace(Path(schedule)):
        return chosen_step(read_trace(Path(schedule)), args.step)
    plan = plan_of(schedule, args)
    costs = costs_of(args, plan)
    with sign_of_life(f"Simulating {sum(map(len, plan.actions))} actions ..."):
        return simulate(plan, costs)


def chosen_step(timelines: list[Timeline], step: int | None) -> Timeline:
    """The step with a number; without one, the training step of median length."""
    if not timelines:
        raise ConfigurationError("the trace has no steps: run some while it is entered")
    if step is None:
        trained = [timeline for timeline in timelines if timeline.plan.has_backward] or timelines
        return sorted(trained, key=lambda timeline: timeline.makespan_s)[(len(trained) - 1) // 2]
    for timeline in timelines:
        if timeline.step == step:
            return timeline
    raise ConfigurationError(f"the trace has no step {step}; it has {', '.join(str(t.step) for t in timelines)}")


def costs_of(args: argparse.Namespace, plan: Plan) -> Costs:
    """The costs that the arguments give."""
    link = Link(latency_s=args.latency, **({} if args.bandwidth is None else {"bytes_per_s": args.bandwidth}))
    cross = None if args.cross_bandwidth is None else Link(latency_s=args.latency, bytes_per_s=args.cross_bandwidth)
    links = {"link": link, "cross_link": cross, "nodes": nodes_of(args, plan), "slowdown": args.slowdown}
    if args.measured is not None:
        from bpipe.estimate.calibrate import calibrated

        return calibrated(read_trace(args.measured), plan, **links)
    return Costs(
        forward_s=args.forward,
        backward_s=args.backward,
        saved_bytes=args.saved,
        movable_bytes=args.movable,
        output_bytes=args.output,
        static_bytes=args.static,
        **links,
    )


def nodes_of(args: argparse.Namespace, plan: Plan) -> list[int] | None:
    """The node of each rank when the stages of a pair share one."""
    if args.ranks_per_node is None:
        return None
    stages = pair_adjacent(plan.num_ranks, args.ranks_per_node)
    return [stages.index(rank) // args.ranks_per_node for rank in range(plan.num_ranks)]
