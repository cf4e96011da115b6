"""Names of torch's stages and schedules that belong to its runtime, each with the way out: bpipe runs a verified plan instead."""

from __future__ import annotations

from typing import Any

from bpipe.errors import ConfigurationError

__all__: list[str] = []

_ORDER = "write a rule (bpipe.schedules.Rule, docs/schedules.md) or give FromPlan a plan"
_LOSS = "give the schedule a loss_fn; losses come back in the list that step(losses=[]) fills"
_RUN = "look at schedule.plan, schedule.stats and bpipe.trace(schedule)"
_REDUCE = "call schedule.step(finalize_gradients=...), which reduces gradients under FSDP2, or leaves that to a later step"
_GATHER = "fully_shard(reshard_after_forward=) says how long gathered weights stay, and ScheduleLoopedBFS gathers at most twice"
_CALL = "call schedule.step(...) or schedule.eval(...), which send, receive and compute as the plan says"

SCHEDULE = {
    name: way
    for names, way in (
        (
            "register_custom_function",
            "set schedule.overlap to run pairs of a forward and a backward in your own way (docs/overlap.md)",
        ),
        ("_calculate_single_rank_operations _get_pipeline_order _step_microbatches _prepare_schedule_with_comms", _ORDER),
        ("_dump_csv", "call dump_csv"),
        ("_compute_loss _maybe_compute_loss _maybe_get_loss _update_losses _internal_losses", _LOSS),
        ("_split_inputs", "give args_chunk_spec= or kwargs_chunk_spec=, or cut the batch yourself: step(arg_mbs=[...])"),
        ("_merge_outputs _output_merge_spec", "give output_merge_spec="),
        ("_initialize_stage _initialize_stages _num_stages _simulate backward_counter", _RUN),
        ("fwd_recv_ops bwd_recv_ops unshard_ops unsharded_stages", _RUN),
    )
    for name in names.split()
}

STAGE = {
    name: way
    for names, way in (
        ("forward_one_chunk backward_one_chunk backward_weight_one_chunk", _CALL),
        ("forward_maybe_with_nosync backward_maybe_with_nosync", _CALL),
        ("get_fwd_recv_ops get_fwd_send_ops get_bwd_recv_ops get_bwd_send_ops", _CALL),
        ("set_local_fwd_input set_local_bwd_input get_local_bwd_output", _CALL),
        ("start_gradient_reduction wait_for_gradient_reduction", _REDUCE),
        ("args_recv_info act_send_info grad_recv_info grad_send_info", _CALL),
        ("scale_grads perform_reduce_grad", "give the schedule scale_grads=, which scales the loss"),
        ("fwd_cache bwd_cache output_chunks dw_runner chunks release_fwd_send_outputs", _RUN),
        ("get_outputs_meta inputs_meta", "bpipe learns shapes from the first microbatch, and anew if they change"),
    )
    for name in names.split()
}

OPTIONS = {  # of schedules since torch 2.15, which act on its runtime: torch's default, and what does instead of another value
    "max_active_stages": (3, _GATHER),
    "unshard_lookahead": ("full", _GATHER),
    "defer_reduce_grad_wait": (False, "leave it out, because a rank waits for a reduction where its plan has it"),
    "max_outstanding_sends": (
        None,
        "Options(transfers_at_once=) limits the transfers of a device, and the plan says where each send ends",
    ),
}


def check_options(owner: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a schedule's options without those of torch's runtime alone, of which a ConfigurationError refuses other values."""
    for name, (default, way) in OPTIONS.items():
        if (value := options.get(name, default)) != default:
            raise ConfigurationError(f"{owner} takes no {name}={value!r}, which acts on torch's runtime: {way}")
    return {name: value for name, value in options.items() if name not in OPTIONS}


def check_missing(owner: str, name: str, names: dict[str, str]) -> None:
    """Raise an AttributeError if an attribute that a stage or a schedule does not have belongs to torch's runtime."""
    if name in names:
        raise AttributeError(f"{owner} has no {name}, which is part of torch's runtime: {names[name]}")


def check_overrides(kind: type, names: dict[str, str]) -> None:
    """Raise a ConfigurationError if a class overrides a method that torch calls and bpipe does not."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith("bpipe."))
    for name in {name for base in own for name in vars(base)} & names.keys():
        raise ConfigurationError(f"{kind.__name__} overrides {name}, which bpipe does not call: {names[name]}")
