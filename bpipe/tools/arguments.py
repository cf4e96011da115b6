"""Arguments that several commands share: a schedule by name or from a file, and what its actions cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from bpipe.api.options import MOST_PARTS
from bpipe.errors import ConfigurationError, PlanError
from bpipe.estimate.calibrate import calibrated
from bpipe.estimate.even_slices import even_shares
from bpipe.estimate.long_contexts import attention_share, halves
from bpipe.estimate.models import model_named
from bpipe.parallel.placement import pair_adjacent
from bpipe.schedules import Costs, Link, Plan, Rule, Timeline, build, names, simulate, verify
from bpipe.schedules.registry import rule_named
from bpipe.schedules.rule import Placement
from bpipe.schedules.torch_csv import from_csv
from bpipe.simulator.costs import OF_STAGE
from bpipe.simulator.measured import typical
from bpipe.tools.balancing import LOWEST, Budget, balanced
from bpipe.tools.quantities import bytes_of, bytes_per_second_of, one_or_each, seconds_of
from bpipe.tools.terminal import note, sign_of_life

__all__: list[str] = []


def add_plan(parser: argparse.ArgumentParser, *, num: str | None = None) -> None:
    """Add the arguments for a schedule or several, for the sizes of the pipeline, and for its costs and budget."""
    parser.add_argument(
        "schedule", nargs=num, help=f"{', '.join(names())}, or a file: a plan's text, its CSV, or a trace", metavar="SCHEDULE"
    )
    add_each(parser, PIPELINE)
    costs = parser.add_argument_group("costs", "of a stage and a microbatch: one for all stages, or one for each, with commas")
    add_each(costs, COSTS)
    budget = parser.add_argument_group("budget", "in bytes, static memory included: the rest is evicted to ranks with free memory")
    add_each(budget, BUDGET)


def add_each(parser: argparse._ActionsContainer, options: Iterable[tuple[Any, ...]]) -> None:
    """Add options, which are None where they are not given.

    Args:
        parser: or a group of it.
        options: of each its names, what reads its text, the help and, if it is not the name, what the value is called. In place of
            a reader stand the values to choose from, or None for an option without a value.
    """
    for flags, read, text, *metavar in options:
        how: dict[str, Any] = {"action": "store_true", "default": None}
        if callable(read):
            how = {"type": single(read), "metavar": metavar[0] if metavar else None}
        elif read is not None:
            how = {"choices": read}
        parser.add_argument(*flags.split(), help=text, **how)


def each(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of one or several values of a quantity."""
    return lambda text: one_or_each(text, read)


def single(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type for a quantity: the same reader, with the kind of error that argparse expects."""

    def read_quantity(text: str) -> Any:
        try:
            return read(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    read_quantity.__name__ = read.__name__  # which argparse names where a number is none
    return read_quantity


def budget(text: str) -> Budget:
    budgets = text if text == LOWEST else one_or_each(text, or_none(bytes_of))
    if budgets is None:
        raise argparse.ArgumentTypeError("'-' for all ranks is not a budget: leave it out")
    return budgets


def parts(text: str) -> int:
    if whole(text) > MOST_PARTS:
        raise argparse.ArgumentTypeError(f"{text} parts: more than {MOST_PARTS} gain nothing more")
    return whole(text)


def share(text: str) -> float:
    """Read `0.4`, or `40%`."""
    try:
        found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, such as 0.4 or 40%")
    return found


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def slots(text: str) -> int | tuple[int | None, ...] | None:
    return one_or_each(text, or_none(whole))


def skips(text: str) -> tuple[tuple[int, ...], ...]:
    """Read `0:3,1:2:3`."""
    try:
        return tuple(tuple(map(int, skip.split(":"))) for skip in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no skips: give stages, the one that makes a value first, such as 0:3,1:2:3"
        ) from None


def or_none(read: Callable[[str], int]) -> Callable[[str], int | None]:
    """Return a reader that also takes '-', for None."""
    return lambda part: None if part == "-" else read(part)


PIPELINE = (
    ("-p --ranks", whole, "ranks of the pipeline"),
    ("-m --microbatches", whole, "microbatches of a step"),
    ("-v --stages-per-rank", whole, "stages of each rank (default: 1, or 2 where a schedule takes several)"),
    ("--stages", whole, "instead of one of these two, the stages of all ranks together"),
    ("--slices", whole, "slices of each microbatch, for schedules such as seq_1f1b (default: 1)", "K"),
    ("--overlapped", None, "let forwards run side by side with backwards: dualpipe_v and interleaved_1f1b"),
    (
        "--skips",
        skips,
        "what stages hand on to later ones than the next: the stage that makes a value and those that use it, 0:3,1:2:3",
        "S:U,...",
    ),
    (
        "--slots",
        slots,
        "most microbatches (or slices) of a stage on a rank: one number, or one per rank, with commas ('-': no limit)",
    ),
)
BY_STAGE: dict[str, tuple[str, Callable[[str], float], str, str]] = {
    "forward": ("forward_s", seconds_of, "a forward, such as 20ms (default: 1)", "TIME"),
    "backward": ("backward_s", seconds_of, "a backward (default: two forwards)", "TIME"),
    "input": ("input_s", seconds_of, "of a backward in halves, the input's gradient (default: half a backward)", "TIME"),
    "saved": ("saved_bytes", bytes_of, "what a microbatch saves, such as 1.5GiB", "BYTES"),
    "movable": ("movable_bytes", bytes_of, "of these, what an eviction moves (default: all)", "BYTES"),
    "output": ("output_bytes", bytes_of, "what goes from one stage to the next", "BYTES"),
    "static": ("static_bytes", bytes_of, "what stays throughout: parameters, optimizer", "BYTES"),
}
COSTS = (
    *((f"--{name}", each(read), *told) for name, (_, read, *told) in BY_STAGE.items()),
    ("--bandwidth", bytes_per_second_of, "of a link in one direction, such as 25GB/s (default: no limit)", "RATE"),
    ("--cross-bandwidth", bytes_per_second_of, "of a link between nodes (default: the same)", "RATE"),
    ("--host-bandwidth", bytes_per_second_of, "between a rank and its host (default: the same)", "RATE"),
    ("--latency", seconds_of, "of a link, such as 5us", "TIME"),
    ("--attention-share", share, "of a forward, such as 40%%; its backward has no weights", "X"),
    ("--model", str, "take attention's share from a model of this name, such as llama2-70b"),
    ("--sequence", whole, "tokens of its sequences (default: the model's)", "N"),
    ("--per-rank", None, "costs are of a whole rank: each of its V stages has 1/V of them"),
    ("--ranks-per-node", whole, "ranks on a node; stages x and p-1-x share one", "N"),
    ("--slowdown", float, "a running transfer slows computations down by this factor", "X"),
    ("--overlapped-share", share, "what a pair of --overlapped gains, such as 30%%", "X"),
    ("--measured", Path, "take times and bytes from a trace instead", "TRACE"),
    ("--step", int, "the trace's step to use (default: the step of median length)", "N"),
)
BUDGET = (
    ("--budget", budget, "one number, one per rank, with commas ('-': no limit), or 'lowest'", "BYTES"),
    ("--parts", parts, "parts of a microbatch that can move separately (default: 1)", "N"),
    ("--host", ("no", "last", "only"), "whether a rank may offload to its own host's memory"),
)


def is_file(schedule: str) -> bool:
    """Return whether a schedule is given by a path: a name never looks like one."""
    return schedule not in names() and ("." in schedule or "/" in schedule or Path(schedule).exists())


def plan_of(schedule: str, args: argparse.Namespace) -> Plan:
    """Return the plan that the arguments name, verified."""
    if is_file(schedule):
        given = given_of(args, PIPELINE)
        if isinstance(args.schedule, str) and given:
            raise ConfigurationError(f"{schedule} is a file and says its own sizes: leave {', '.join(given)} out")
        return verified(Path(schedule))
    rule = rule_named(schedule)
    num_stages, num_ranks = stages_and_ranks(rule, args)
    if num_stages is None or args.microbatches is None:
        raise ConfigurationError(f"{schedule}: say how large, such as --ranks 4 --microbatches 8")
    with sign_of_life(f"Planning {schedule} for {num_stages} stages and {args.microbatches} microbatches"):
        slices = slices_of(rule, args)
        counts = num_stages, args.microbatches
        sizes: dict[str, Any] = {"num_ranks": num_ranks, "slots": args.slots, "slices": slices, "skips": args.skips or ()}
        return build(schedule, *counts, **sizes, overlapped=pairs_of(rule, args))


def pairs_of(rule: Rule, args: argparse.Namespace) -> bool:
    """Return whether a schedule runs pairs of a forward and a backward; among several, --overlapped is for those that have them."""
    if args.overlapped and isinstance(args.schedule, str):
        rule.with_pairs()
    return bool(args.overlapped) and rule.overlapped is not None


def slices_of(rule: Rule, args: argparse.Namespace) -> int:
    """Return the slices of a microbatch; among several schedules, --slices is for those that take them."""
    is_for_rule = isinstance(args.schedule, str) or rule.sliced is not None
    if args.slices is not None and not (is_for_rule or any(takes_slices(schedule) for schedule in args.schedule)):
        raise ConfigurationError(f"--slices: none of {', '.join(args.schedule)} takes slices; seq_1f1b does")
    return args.slices or 1 if is_for_rule else 1


def takes_slices(schedule: str) -> bool:
    """Return whether a schedule that is given by its name takes slices."""
    return not is_file(schedule) and rule_named(schedule).sliced is not None


def stages_and_ranks(rule: Rule, args: argparse.Namespace) -> tuple[int | None, int | None]:
    """Return how many stages a schedule gets, and on how many ranks; both are None if the arguments do not say.

    Among several schedules, --stages-per-rank is for those that can have more stages or fewer.
    """
    is_for_rule = rule.placement is Placement.LOOPED or isinstance(args.schedule, str)
    per_rank = (is_for_rule and args.stages_per_rank) or rule.default_stages_per_rank
    if args.stages is None:
        return (None, None) if args.ranks is None else (args.ranks * per_rank, args.ranks)
    if args.ranks is not None and args.stages_per_rank is not None:
        raise ConfigurationError("--ranks, --stages-per-rank and --stages: two of them say the third, leave one out")
    return args.stages, args.ranks or max(1, args.stages // per_rank)


def verified(path: Path) -> Plan:
    """Read a plan from a file, and verify it."""
    plan = read_plan(path)
    verify(plan)
    return plan


def read_plan(path: Path) -> Plan:
    """Read a plan from its text, its CSV, or a trace, without verifying it."""
    if is_trace(path):
        return typical(read_trace(path)).plan
    try:
        text = path.read_text(encoding="utf-8")
        return Plan.from_text(text) if text.startswith("bpipe-plan") else from_csv(text, "_".join(path.stem.split()))
    except (UnicodeDecodeError, PlanError) as error:
        raise ConfigurationError(f"{path} is not a plan: {error}") from error


def is_trace(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".json"


def read_trace(path: Path) -> list[Timeline]:
    """Read the steps of a trace."""
    from bpipe.tools.trace_record import load_trace

    with sign_of_life(f"Reading {path}"):
        return load_trace(path)


def timeline_of(schedule: str, args: argparse.Namespace) -> Timeline:
    """Return a measured step if a trace is given, else the plan's simulated one."""
    if is_file(schedule) and is_trace(Path(schedule)):
        if args.budget is not None and isinstance(args.schedule, str):
            raise ConfigurationError(f"{schedule} was measured as it is: leave --budget out, or compare it with a schedule")
        return chosen_step(read_trace(Path(schedule)), args.step)
    plan = plan_of(schedule, args)
    if args.step is not None and args.measured is None:
        raise ConfigurationError("--step selects a step of a trace, and no trace was given")
    costs = costs_of(args, plan)
    plan = within_budget(plan, costs, args)
    with sign_of_life(f"Simulating {sum(map(len, plan.actions))} actions"):
        return simulate(plan, costs)


def within_budget(plan: Plan, costs: Costs, args: argparse.Namespace) -> Plan:
    """Balance a plan as --budget says; without it, return the plan itself."""
    given = [f"--{name}" for name in ("parts", "host") if getattr(args, name)]
    if args.budget is None:
        if given:
            raise ConfigurationError(f"{', '.join(given)}: say the --budget too, in bytes or 'lowest'")
        return plan
    if args.slots is not None:
        raise ConfigurationError("--slots and --budget: one counts microbatches and the other bytes, leave one out")
    with sign_of_life(f"Balancing {plan.name}"):
        return balanced(plan, costs, args.budget, num_parts=args.parts or 1, host=args.host or "no")


def chosen_step(timelines: list[Timeline], step: int | None) -> Timeline:
    """Return the step with a number, or the typical one if no number is given."""
    if step is None:
        return typical(timelines)
    for timeline in timelines:
        if timeline.step == step:
            return timeline
    raise ConfigurationError(f"the trace has no step {step}; it has {', '.join(str(t.step) for t in timelines)}")


def given_of(args: argparse.Namespace, options: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return which options of a table were given."""
    flags = [option[0].split()[-1] for option in options]
    return [flag for flag in flags if getattr(args, flag[2:].replace("-", "_")) is not None]


def costs_of(args: argparse.Namespace, plan: Plan) -> Costs:
    """Return the costs that the arguments give, in place of those that a trace tells; slices share a microbatch's evenly."""
    latency = args.latency or 0.0
    bandwidths = {"cross_link": args.cross_bandwidth, "host_link": args.host_bandwidth}
    links: dict[str, Any] = {
        kind: Link(latency_s=latency, bytes_per_s=bandwidth) for kind, bandwidth in bandwidths.items() if bandwidth is not None
    }
    if args.bandwidth is not None or args.latency is not None:
        links["link"] = Link(latency_s=latency, bytes_per_s=inf if args.bandwidth is None else args.bandwidth)
    links |= {name: given for name in ("slowdown", "overlapped_share") if (given := getattr(args, name)) is not None}
    nodes = nodes_of(args, plan)
    given = {field: getattr(args, name) for name, (field, *_) in BY_STAGE.items() if getattr(args, name) is not None}
    attention = attention_of(args)
    if args.measured is None:
        lengths = None if attention is None else even_shares(attention, plan.slices)
        given = with_attention(given, attention)
        return Costs(**(shared_out(given, plan) if args.per_rank else given), **links, nodes=nodes).of_slices(plan, lengths=lengths)
    if given or args.per_rank or attention is not None:
        found = ", ".join([*given, *["--per-rank"] * bool(args.per_rank), *["attention's share"] * (attention is not None)])
        raise ConfigurationError(f"--measured gives the times and bytes of stages: leave {found} out")
    steps = read_trace(args.measured)
    costs = calibrated(steps if args.step is None else [chosen_step(steps, args.step)], plan, nodes=nodes)
    if costs.gradient_bytes is None and plan.num_stages > 1:
        note(f"{plan.name}: the traced plan counts slots and says nothing of messages between stages, so they are not counted")
    return replace(costs, **links)


def attention_of(args: argparse.Namespace) -> float | None:
    """Return the share of a forward that attention takes, as given or as a model has it at a context length; None if not given."""
    if args.model is None:
        if args.sequence is not None:
            raise ConfigurationError("--sequence needs --model, to say how much of a forward attention takes at this length")
        return args.attention_share  # type: ignore[no-any-return]
    if args.attention_share is not None:
        raise ConfigurationError("--model and --attention-share both say how much of a forward attention takes: leave one out")
    model = model_named(args.model)
    return attention_share(model if args.sequence is None else replace(model, sequence=args.sequence))


def with_attention(given: dict[str, Any], attention: float | None) -> dict[str, Any]:
    """Add the seconds of a backward and of its half for inputs, if it is known how much of a forward attention takes."""
    if attention is None:
        return given
    if "input_s" in given:
        raise ConfigurationError("--input: attention's share of a forward says how a backward is halved, leave one out")
    i, w = halves(attention)
    backward = given.get("backward_s", _times(given.get("forward_s", 1.0), i + w))
    return {**given, "backward_s": backward, "input_s": _times(backward, i / (i + w))}


def _times(seconds: float | Sequence[float], factor: float) -> float | tuple[float, ...]:
    return tuple(one * factor for one in seconds) if isinstance(seconds, Sequence) else seconds * factor


def shared_out(given: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return each stage's costs from those of a rank; what one stage sends to the next does not depend on how many there are.

    Of two directions a microbatch passes the stages of one, but static bytes are those of all.
    """
    costs = {"forward_s": 1.0, **given}
    for field, value in costs.items():
        if isinstance(value, (list, tuple)):
            raise ConfigurationError(f"{field}: --per-rank takes one number for all ranks; give one for each stage without it")
        if field != "output_bytes":
            per_rank = (plan.num_stages if field in OF_STAGE else plan.depth) // plan.num_ranks
            costs[field] = value // per_rank if field.endswith("_bytes") else value / per_rank
    return costs


def nodes_of(args: argparse.Namespace, plan: Plan) -> list[int] | None:
    """Return the node of each rank, with the stages of a pair on the same one, or None without --ranks-per-node."""
    if args.ranks_per_node is None:
        if args.cross_bandwidth is not None:
            raise ConfigurationError("--cross-bandwidth needs --ranks-per-node, to say which ranks are on different nodes")
        return None
    return nodes_of_pairs(args, [plan.num_ranks])


def nodes_of_pairs(args: argparse.Namespace, num_stages: Sequence[int] | None) -> list[int] | None:
    """Return the node of each stage, for the largest number of stages and pair-adjacent, or None without --ranks-per-node."""
    if args.ranks_per_node is None or not num_stages:
        return None
    stages = pair_adjacent(max(num_stages), args.ranks_per_node)
    return [stages.index(stage) // args.ranks_per_node for stage in range(len(stages))]
