"""Choose the fastest plan for a model on a machine, of everything that bpipe can run, and say whether balancing 1F1B would help.

First comes the plan to run, with the best of each other kind and why it loses: every schedule, microbatch size, recomputation, cut
and number of stages a rank, with activations offloaded or recomputed where they do not fit; --out writes it, and FromPlan runs it.
Then come 1F1B and GPipe by themselves, plain and balanced, which is what the published studies compare.

MODEL is a name, or the profiles that bpipe.profile measured and wrote (one for all stages, or one for each), or is left out
and described by --layers, --hidden and the other dimensions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, get_args

from bpipe.api.options import Options
from bpipe.api.policy import Way
from bpipe.chooser.choose_plan import choose_plan
from bpipe.chooser.plan_choice import Choice
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.estimate import Profile
from bpipe.estimate.advise_inputs import batches_of, stages_of
from bpipe.estimate.advisor import advise
from bpipe.estimate.execution import RECOMPUTATIONS
from bpipe.estimate.models import model_named, model_names
from bpipe.estimate.transformer import Transformer
from bpipe.tools.arguments import add_each, nodes_of_pairs, whole
from bpipe.tools.quantities import bytes_of, bytes_per_second_of
from bpipe.tools.terminal import Result, sign_of_life
from bpipe.whole_file import write_whole

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe advise llama2-70b --device a100-80gb --stages 8 --tensor-parallel 8 --batch 128
  bpipe advise gpt3-96b --device a100-80gb --stages 8 --tensor-parallel 4 --batch 128 --efficiency 1=0.33,2=0.47
  bpipe advise --layers 32 --hidden 4096 --heads 32 --sequence 4096 --vocabulary 50257 --device h100 --stages 4,8 --batch 64
  bpipe advise gpt3-13b --device v100-32gb --stages 8 --batch 64 --link 200Mbit/s
  bpipe advise stage0.json stage1.json --memory 40GiB --batch 64
  bpipe advise llama2-7b --device a100-80gb --stages 4 --batch 32 --schedules 1f1b,zb_h1 --out plan.txt
Exit code 1: nothing fits."""

ALONE = "Of 1F1B and GPipe alone, which the published studies compare, and whether balancing pays there:\n"

EFFORT = Options.effort
HOW_TO_RUN = (
    "To run it: --out plan.txt writes the plan, and FromPlan(stages, Plan.from_text(...)) runs it, with stages of these layers."
)
AS_OPTIONS = {  # what is said of Python, as the command line has it
    "or give efficiency={1: ..., 2: ...}": "or give both, such as --efficiency 1=0.33,2=0.47",
    "more in .candidates": "more with --json",
    "or options=Options(host=True)": "or --host",
}

DIMENSIONS = {
    "layers": "num_layers",
    "hidden": "hidden",
    "heads": "num_heads",
    "vocabulary": "vocabulary",
    "kv_heads": "num_kv_heads",
    "ffn": "ffn",
}
NEEDED = ("layers", "hidden", "heads", "sequence", "vocabulary")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="*", metavar="MODEL", help=f"{', '.join(model_names())}; or files of profiles")
    sizes, machine, run, choice = (parser.add_argument_group(title) for title in GROUPS)
    add_each(sizes, ((f"--{name.replace('_', '-')}", whole, None, "N") for name in DIMENSIONS))
    add_each(sizes, [("--gated", None, "the MLP has a gate (SwiGLU); say its width with --ffn")])
    add_each(machine, MACHINE)
    run.add_argument("--batch", type=whole, required=True, metavar="N", help="sequences per step")
    add_each(run, STAGES)
    also = "norms and dropout are not cut over these devices"
    run.add_argument("--no-sequence-parallel", dest="sequence_parallel", action="store_false", help=also)
    add_each(run, RUN)
    add_each(choice, CHOICE)
    add_each(run, [("--bytes-per-parameter", float, "of weights, gradients and optimizer (default: 18)", "N")])
    parser.set_defaults(gated=False, host=False, tensor_parallel=1, attention="flash", precision="bf16", slices=1)
    parser.set_defaults(recomputations=RECOMPUTATIONS, stages_per_rank=[1, 2], by="evict_or_recompute", effort=EFFORT)


def several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(part) for part in text.split(",")]


def at_least_0(text: str) -> int:
    return 0 if text == "0" else whole(text)


def link(text: str) -> str | float:
    return bytes_per_second_of(text) if text[:1] in "0123456789." else text


def efficiency(text: str) -> float | dict[int, float]:
    """Read `0.45`, or `1=0.33,2=0.47`."""
    if "=" not in text:
        return float(text)
    pairs = (part.split("=") for part in text.split(","))
    return {whole(size): float(share) for size, share in pairs}


GROUPS = ("dimensions, for a model without a name", "machine", "run", "choice")
MACHINE = (
    ("--device", str, "a100-80gb, h100, ...: memory, speed and links"),
    ("--memory", bytes_of, "of a device (default: that of --device)", "BYTES"),
    ("--reserved", bytes_of, "memory to set aside of that (default: 5%%)", "BYTES"),
    ("--link", link, "link within a node: nvlink3, pcie4, 25GB/s or 200Mbit/s", "RATE"),
    ("--cross-link", link, "link between nodes", "RATE"),
    ("--ranks-per-node", whole, "stages on a node; stages x and p-1-x share one", "N"),
    ("--num-devices", whole, "devices of all pipelines together", "N"),
)
STAGES = (
    ("--stages", several(whole), "one or several to compare, such as 4,8", "P"),
    ("--tensor-parallel", whole, "devices of a stage (default: 1)", "T"),
)
RUN = (
    ("--sequence", whole, "tokens of a sequence (default: the model's)", "N"),
    ("--attention", str, "flash or materialised (default: flash)"),
    ("--precision", str, "precision of activations (default: bf16)"),
    ("--recomputations", several(str), f"which to try: {','.join(RECOMPUTATIONS)} (default: all)", "HOW"),
    ("--layers-by-stage", several(whole), "of each stage, such as 9,10,10,9 (default: even)", "N"),
    ("--slices", whole, "rank seq_1f1b too, with K slices per microbatch", "K"),
    ("--microbatch-sizes", several(whole), "to try (default: all that divide the batch)", "N"),
    ("--efficiency", efficiency, "of one stage: 0.45, or by microbatch size: 1=0.33,2=0.47", "X"),
)
CHOICE = (
    ("--schedules", several(str), "to choose from (default: all with one direction)", "NAME"),
    ("--stages-per-rank", several(whole), "to choose from (default: 1,2)", "V"),
    ("--by", get_args(Way), "how to keep the memory (default: both)"),
    ("--host", None, "activations may go to the host where no rank has room"),
    ("--effort", at_least_0, f"of the search (default: {EFFORT:,})", "N"),
    ("--cache", Path, "keep answers there, by what was asked", "DIR"),
    ("-o --out", Path, "write the chosen plan's text", "FILE"),
)


def run(args: argparse.Namespace) -> Result:
    model = _model(args)
    _check_what_is_needed(args, model)
    same = {"model": model, "nodes": nodes_of_pairs(args, args.stages), "memory_bytes": args.memory}
    aside = {"reserve_bytes": args.reserved, "bytes_per_parameter": args.bytes_per_parameter}
    with sign_of_life("Simulating candidates") as progress:
        own = {"num_stages": args.stages, "layers": args.layers_by_stage, "options": Options(**aside, progress=progress)}
        advice = advise(**_given(advise, args) | same | own)
    choice, refusal = _choice(args, same, aside)
    written = [] if choice is None or args.out is not None else [HOW_TO_RUN]
    if choice is not None and args.out is not None:
        write_whole(args.out, choice.plan.to_text())
        written = [f"wrote {args.out}: FromPlan(stages, Plan.from_text(...)) runs it, with stages of the layers above"]
    said = replace(advice, verdict=_as_options(advice.verdict))  # before its lines are broken
    return Result(
        data=advice.to_dict() | {"choice": None if choice is None else choice.to_dict()},
        shown=lambda: [refusal if choice is None else str(choice), *written, "", ALONE, _as_options(str(said))],
        exit_code=0 if advice.best is not None or choice is not None else 1,
    )


def _as_options(text: str) -> str:
    """Let a text speak of the command line's options instead of Python's arguments."""
    for said, option in AS_OPTIONS.items():
        text = text.replace(said, option)
    return text


def _given(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a function that options of the same names give."""
    return {name: value for name, value in vars(args).items() if name in signature(function).parameters}


def _choice(args: argparse.Namespace, same: dict[str, Any], aside: dict[str, Any]) -> tuple[Choice | None, str]:
    """Return the fastest plan of all numbers of stages, or why there is none; advice has the same arguments and options, too."""
    if args.layers_by_stage is not None:
        return None, "No plan is chosen, because --layers-by-stage says where to cut: leave it out, and the cut is chosen, too."
    stages = stages_of(args.stages, len(same["model"]) if isinstance(same["model"], list) else 0)
    found, refusal = [], ""
    for p, batch in batches_of(args.batch, stages, args.tensor_parallel, args.num_devices).items():
        with sign_of_life(f"Choosing for {p} ranks") as progress:
            options = Options(**aside, host=args.host, effort=args.effort, progress=progress)
            own = {"batch": batch, "num_ranks": p, "slices": sorted({1, args.slices}), "options": options}
            try:
                found.append(choose_plan(**_given(choose_plan, args) | same | own))
            except BudgetError as error:
                refusal = _as_options(f"No plan fits: {error}")
    return min(found, key=lambda one: one.step_s, default=None), refusal


def _check_what_is_needed(args: argparse.Namespace, model: Transformer | list[Profile]) -> None:
    if args.stages is None and not (isinstance(model, list) and len(model) > 1):
        raise ConfigurationError("into how many stages? --stages 8, or several to compare: --stages 4,8")
    if args.device is None and (args.memory is None or isinstance(model, Transformer)):
        raise ConfigurationError("on which device? --device a100-80gb; for a profiled model --memory 80GiB is enough")


def _profile(path: Path) -> Profile:
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ConfigurationError) as error:
        raise ConfigurationError(f"{path} is not a profile: {error}") from error


def _model(args: argparse.Namespace) -> Transformer | list[Profile]:
    files = [Path(name) for name in args.model if name.endswith(".json")]
    given = {field: getattr(args, name) for name, field in DIMENSIONS.items() if getattr(args, name) is not None}
    if files and len(files) == len(args.model) and not given:
        return list(map(_profile, files))
    if len(args.model) == 1 and not given and not args.gated:
        return model_named(args.model[0])
    if args.model:
        raise ConfigurationError("give one name, or files of profiles, or dimensions without a name")
    missing = [f"--{name}" for name in NEEDED if getattr(args, name) is None]
    if missing:
        raise ConfigurationError(f"a model is missing: give its name, or all its dimensions, also {' '.join(missing)}")
    return Transformer(sequence=args.sequence, is_gated=args.gated, name="this model", **given)
