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
from pathlib import Path
from typing import Any, get_args

from bpipe.api.policy import Way
from bpipe.chooser.choose_plan import choose_plan
from bpipe.chooser.compare_plans import EFFORT
from bpipe.chooser.plan_choice import Choice
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.estimate import Profile
from bpipe.estimate.advise_inputs import batches_of, stages_of
from bpipe.estimate.advisor import advise
from bpipe.estimate.models import model_named, model_names
from bpipe.estimate.transformer import Transformer
from bpipe.tools.arguments import nodes_of_pairs, single, whole
from bpipe.tools.quantities import bytes_of, bytes_per_second_of
from bpipe.tools.terminal import Result, sign_of_life

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

RUN = "To run it: --out plan.txt writes the plan, and FromPlan(stages, Plan.from_text(...)) runs it, with stages of these layers."
AS_OPTIONS = {  # what is said of Python, as the command line has it
    "or give efficiency={1: ..., 2: ...}": "or give both, such as --efficiency 1=0.33,2=0.47",
    "more in .candidates": "more with --json",
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
    sizes = parser.add_argument_group("dimensions, for a model without a name")
    for name in DIMENSIONS:
        sizes.add_argument(f"--{name.replace('_', '-')}", type=whole, metavar="N")
    sizes.add_argument("--gated", action="store_true", help="the MLP has a gate (SwiGLU); say its width with --ffn")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", help="a100-80gb, h100, ...: memory, speed and links")
    machine.add_argument("--memory", type=single(bytes_of), metavar="BYTES", help="of a device (default: that of --device)")
    machine.add_argument("--reserved", type=single(bytes_of), metavar="BYTES", help="memory to set aside of that (default: 5%%)")
    machine.add_argument("--link", type=link, metavar="RATE", help="link within a node: nvlink3, pcie4, 25GB/s or 200Mbit/s")
    machine.add_argument("--cross-link", type=link, metavar="RATE", help="link between nodes")
    machine.add_argument("--ranks-per-node", type=whole, metavar="N", help="stages on a node; stages x and p-1-x share one")
    machine.add_argument("--num-devices", type=whole, metavar="N", help="devices of all pipelines together")
    run = parser.add_argument_group("run")
    run.add_argument("--batch", type=whole, required=True, metavar="N", help="sequences per step")
    run.add_argument("--stages", type=several(whole), metavar="P", help="one or several to compare, such as 4,8")
    run.add_argument("--tensor-parallel", type=whole, default=1, metavar="T", help="devices of a stage (default: 1)")
    run.add_argument("--no-sequence-parallel", action="store_true", help="norms and dropout are not cut over these devices")
    run.add_argument("--sequence", type=whole, metavar="N", help="tokens of a sequence (default: the model's)")
    run.add_argument("--attention", default="flash", help="flash or materialised (default: flash)")
    run.add_argument("--precision", default="bf16", help="precision of activations (default: bf16)")
    run.add_argument("--recomputations", type=several(str), metavar="HOW", help="which to try: none,selective,full (default: all)")
    run.add_argument("--layers-by-stage", type=several(whole), metavar="N", help="of each stage, such as 9,10,10,9 (default: even)")
    run.add_argument("--slices", type=whole, default=1, metavar="K", help="rank seq_1f1b too, with K slices per microbatch")
    run.add_argument("--microbatch-sizes", type=several(whole), metavar="N", help="to try (default: all that divide the batch)")
    run.add_argument("--efficiency", type=efficiency, metavar="X", help="of one stage: 0.45, or by microbatch size: 1=0.33,2=0.47")
    choice = parser.add_argument_group("choice")
    choice.add_argument("--schedules", type=several(str), metavar="NAME", help="to choose from (default: all with one direction)")
    choice.add_argument("--stages-per-rank", type=several(whole), default=[1, 2], metavar="V", help="to choose from (default: 1,2)")
    choice.add_argument("--by", choices=get_args(Way), default="evict_or_recompute", help="how to keep the memory (default: both)")
    choice.add_argument("--host", action="store_true", help="activations may go to the host where no rank has room")
    choice.add_argument("--effort", type=at_least_0, default=EFFORT, metavar="N", help=f"of the search (default: {EFFORT:,})")
    choice.add_argument("--cache", type=Path, metavar="DIR", help="keep answers there, by what was asked")
    choice.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the chosen plan's text")
    run.add_argument("--bytes-per-parameter", type=float, metavar="N", help="of weights, gradients and optimizer (default: 18)")


def several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(part) for part in text.split(",")]


def at_least_0(text: str) -> int:
    return 0 if text == "0" else whole(text)


def link(text: str) -> str | float:
    return single(bytes_per_second_of)(text) if text[:1] in "0123456789." else text


def efficiency(text: str) -> float | dict[int, float]:
    """Read `0.45`, or `1=0.33,2=0.47`."""
    if "=" not in text:
        return float(text)
    pairs = (part.split("=") for part in text.split(","))
    return {whole(size): float(share) for size, share in pairs}


def run(args: argparse.Namespace) -> Result:
    model = _model(args)
    _check_what_is_needed(args, model)
    how = {
        "device": args.device,
        "memory_bytes": args.memory,
        "reserved_bytes": args.reserved,
        "tensor_parallel": args.tensor_parallel,
        "sequence_parallel": not args.no_sequence_parallel,
        "sequence": args.sequence,
        "attention": args.attention,
        "precision": args.precision,
        "microbatch_sizes": args.microbatch_sizes,
        "nodes": nodes_of_pairs(args, args.stages),
        "efficiency": args.efficiency,
        "bytes_per_parameter": args.bytes_per_parameter,
        "link": args.link,
        "cross_link": args.cross_link,
        **({} if args.recomputations is None else {"recomputations": args.recomputations}),
    }
    with sign_of_life("Simulating candidates") as progress:
        advice = advise(
            model,
            batch=args.batch,
            num_stages=args.stages,
            num_devices=args.num_devices,
            layers=args.layers_by_stage,
            slices=args.slices,
            progress=progress,
            **how,
        )
    choice, refusal = _choice(model, args, how)
    written = [] if choice is None or args.out is not None else [RUN]
    if choice is not None and args.out is not None:
        args.out.write_text(choice.plan.to_text(), encoding="utf-8")
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


def _choice(model: Transformer | list[Profile], args: argparse.Namespace, how: dict[str, Any]) -> tuple[Choice | None, str]:
    """Return the fastest plan of all numbers of stages, or why there is none."""
    if args.layers_by_stage is not None:
        return None, "No plan is chosen, because --layers-by-stage says where to cut: leave it out, and the cut is chosen, too."
    stages = stages_of(args.stages, len(model) if isinstance(model, list) else 0)
    found, refusal = [], ""
    for p, batch in batches_of(args.batch, stages, args.tensor_parallel, args.num_devices).items():
        with sign_of_life(f"Choosing for {p} ranks") as progress:
            wishes = {name: getattr(args, name) for name in ("schedules", "stages_per_rank", "by", "host", "effort", "cache")}
            slices = (1, args.slices) if args.slices > 1 else (1,)
            try:
                found.append(choose_plan(model, batch=batch, num_ranks=p, slices=slices, progress=progress, **wishes, **how))
            except BudgetError as error:
                refusal = f"No plan fits: {error}"
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
