"""The public names and signatures: a change here is a change for every user."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch
from torch.distributed import pipelining

import bpipe
from bpipe import schedules
from bpipe.model.of_torch_alone import OPTIONS

SCHEDULE = (
    "(stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads, options)"
)
STAGES = SCHEDULE.replace("(stage,", "(stages,")
ADVISE = (
    "(model, batch, num_stages, device, memory_bytes, num_devices, tensor_parallel, sequence_parallel, sequence, "
    "attention, precision, recomputations, microbatch_sizes, efficiency, layers, slices, link, cross_link, "
    "nodes, options)"
)
OF_SLICES = SCHEDULE.replace("options", "slices, options")
SIGNATURES = {
    "Balanced": "(schedule, budget, to, costs, sizes, optimizer, replicas, by, options)",
    "BalancedOneFOneB": SCHEDULE,
    "BitPipe": STAGES,
    "BitPipeReordered": STAGES,
    "BitPipeZB": STAGES,
    "BreadthFirst": STAGES,
    "Chimera": STAGES,
    "DualPipeV": STAGES.replace("options", "overlapped, options"),
    "FromPlan": SCHEDULE.replace("n_microbatches", "plan"),
    "GPipe": SCHEDULE,
    "GradScaler": "(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled, group, replicas)",
    "Interleaved1F1B": OF_SLICES.replace("(stage,", "(stages,").replace("options", "overlapped, options"),
    "LocalBlock": "(block, head, name)",
    "LocalLearning": SCHEDULE,
    "Loopback": "(num_ranks, own_random_state)",
    "OneFOneB": SCHEDULE,
    "Options": (
        "(slots, target_chunk_spec, slice_lengths, args_slice_spec, kwargs_slice_spec, target_slice_spec, output_slice_spec, "
        "loss_of_slices, timeout_s, slow_s, transfers_at_once, parts, measure, margin, reserve_bytes, host, host_link, "
        "bytes_per_parameter, effort, seed, progress)"
    ),
    "InterleavedZeroBubble": STAGES,
    "PipelineStage": (
        "(submodule, stage_index, num_stages, device, input_args, output_args, output_grads, input_grads, group, dw_builder, "
        "get_mesh, directions, skips)"
    ),
    "Routes": ("(stage, n_microbatches, loss_fn, replica, num_replicas, store, state, in_flight, compress, options)"),
    "Schedule": SCHEDULE,
    "Seq1F1B": OF_SLICES,
    "Stream": "(stage, loss_fn, optimizer, options)",
    "TeraPipe": OF_SLICES,
    "TiedWeights": "(weights, group)",
    "VHalf": STAGES,
    "VMin": STAGES,
    "ZBH1": SCHEDULE,
    "ZBH2": SCHEDULE,
    "ZBV": STAGES,
    "advise": ADVISE,
    "check_split": "(model, parts, args, kwargs)",
    "auto": (
        "(stages, batch, loss_fn, start, slices, target, layers, microbatch_sizes, stages_per_rank, device, group, memory_bytes, "
        "by, schedules, link, cross_link, nodes, optimizer, replicas, args_chunk_spec, kwargs_chunk_spec, "
        "output_merge_spec, scale_grads, options)"
    ),
    "choose_plan": (
        "(model, batch, num_ranks, device, memory_bytes, link, cross_link, nodes, by, "
        "schedules, stages_per_rank, slices, microbatch_sizes, tensor_parallel, sequence_parallel, sequence, attention, precision, "
        "recomputations, efficiency, cache, options)"
    ),
    "choose_stages": (
        "(layers, num_stages, num_microbatches, schedule, num_ranks, slots, objective, memory_bytes, link, slices, slice_lengths)"
    ),
    "clip_grad_norm_": "(parameters, max_norm, norm_type, error_if_nonfinite, foreach, copies, own, group, replicas)",
    "draw": "(timeline, path, other, title, window)",
    "load_trace": "(path)",
    "local_heads": "(shapes, num_classes, residual, per_token)",
    "loss_scale": "()",
    "measure_layers": "(model, example, kwargs, layers, loss_fn, target, bytes_per_parameter, repeats, flops_per_s)",
    "pair_adjacent": "(num_stages, ranks_per_node)",
    "place": "(mesh, rule, stages_per_rank, ranks_per_node)",
    "profile": "(stage_module, example, microbatch_sizes, loss_fn, target, is_first, backward, repeats)",
    "profile_slices": (
        "(stage_module, example, lengths, contexts, loss_fn, target, is_first, args_slice_spec, target_slice_spec, repeats)"
    ),
    "save_trace": "(timelines, path)",
    "share_loss": "(losses, reduction, group)",
    "split_model": "(model, stages, missing, keep_positions)",
    "split_traced": "(model, stages, args, kwargs, prove)",
    "split_transformer": "(model, stages, prove)",
    "trace": "(schedule, path)",
    "training_state": "(modules, optimizer, tied, group)",
    "transformer_layers": "(model)",
    "yield_here": "(tensors)",
}

IN_TORCHS_ORDER = (
    "(stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads, "
    "backward_requires_autograd, defer_pp_recv, options, of_torch)"
)
UNDER_TORCHS_NAMES = {
    "FromCSV": IN_TORCHS_ORDER.replace("scale_grads", "use_full_backward, scale_grads"),
    "Schedule1F1B": SCHEDULE,
    "ScheduleGPipe": SCHEDULE,
    "ScheduleInterleaved1F1B": IN_TORCHS_ORDER,
    "ScheduleInterleavedZeroBubble": IN_TORCHS_ORDER,
    "ScheduleZBVZeroBubble": IN_TORCHS_ORDER,
    "ScheduleDualPipeV": IN_TORCHS_ORDER,
    "ScheduleLoopedBFS": IN_TORCHS_ORDER.replace("args_chunk_spec, kwargs_chunk_spec, ", ""),
    "get_schedule_class": "(schedule_name)",
    "PipelineStageInfo": "(stage_index, microbatch_index, is_metadata_inference)",
}
UNDER_TORCHS_NAMES["_PipelineScheduleRuntime"] = UNDER_TORCHS_NAMES["FromCSV"]
UNDER_TORCHS_NAMES["_PipelineSchedule"] = SIGNATURES["Schedule"]
WITHOUT_SIGNATURE = {"PipelineScheduleMulti", "PipelineScheduleSingle"}  # bases, which are not called
OF_TORCH_ITSELF = {"Pipe", "SplitPoint", "TensorChunkSpec", "build_stage", "pipe_split", "pipeline"} | {
    *("merge_chunks", "split_args_kwargs_into_chunks"),
}

OF_TORCH_ALONE = {"backward_requires_autograd", "defer_pp_recv", *OPTIONS}
PURE_CLASSES = [
    *("Action", "Amount", "Channel", "Costs", "Destinations", "Filling", "Gap", "Holding", "Lane", "Link", "Op", "Placement"),
    "Plan",
    *("Purpose", "Rule", "Sizes", "Span", "StageSizes", "Timeline"),
]

PURE_FUNCTIONS = [
    *("build", "check_rule", "fill_gaps", "finish", "from_csv", "gaps_of", "names", "overlap", "register", "rules", "simulate"),
    *("unregister", "verify", "with_encoder"),
]


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_names_and_signatures():
    signatures = SIGNATURES | UNDER_TORCHS_NAMES
    assert sorted(bpipe.__all__) == sorted([*signatures, *WITHOUT_SIGNATURE, *OF_TORCH_ITSELF, "__version__"])
    assert {name: f"({', '.join(parameters(getattr(bpipe, name)))})" for name in signatures} == signatures
    assert all(getattr(bpipe, name).__module__.startswith("torch.distributed.pipelining") for name in OF_TORCH_ITSELF)
    assert schedules.__all__ == [*PURE_CLASSES, *PURE_FUNCTIONS]
    assert dir(bpipe) == sorted(bpipe.__all__)


def test_a_changed_import_is_enough():
    """Everything that torch's classes and methods take has the same name and place here."""
    pairs = [(bpipe.OneFOneB, pipelining.Schedule1F1B), (bpipe.Interleaved1F1B, pipelining.ScheduleInterleaved1F1B)]
    for ours, theirs in ((parameters(ours), parameters(theirs)) for ours, theirs in pairs):
        shared = [name for name in theirs if name not in OF_TORCH_ALONE]
        assert ours[: len(shared)] == shared
    for method in ("step", "eval"):
        ours, theirs = (set(parameters(getattr(owner, method))) for owner in (bpipe.OneFOneB, pipelining.Schedule1F1B))
        assert theirs <= ours


def test_unknown_names_and_old_torch(monkeypatch):
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        bpipe.Nothing  # noqa: B018
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    with pytest.raises(ImportError, match=r"bpipe needs torch 2\.11 or newer, and this is torch 2\.10\.0\+cpu"):
        bpipe.OneFOneB  # noqa: B018


def test_importing_bpipe_loads_no_torch():
    pure = "bpipe.pair_adjacent(4, 2), bpipe.advise, bpipe.choose_plan, bpipe.draw, bpipe.load_trace, bpipe.save_trace"
    code = f"import sys, bpipe; bpipe.errors.BPipeError, bpipe.schedules.build, {pure}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rooms_are_there_after_importing_bpipe_alone():
    rooms = "bpipe.fill.Job, bpipe.overlap.TwoThreads, bpipe.estimate.Device, bpipe.torchtitan.pipelining_fn, bpipe.partition"
    subprocess.run([sys.executable, "-c", f"import bpipe; {rooms}; bpipe.slices.UpTo"], check=True)


def modules():
    return [importlib.import_module(info.name) for info in pkgutil.walk_packages(bpipe.__path__, "bpipe.")]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    assert hasattr(module, "__all__") or module.__name__ == "bpipe._version"
    assert doctest.testmod(module).failed == 0
