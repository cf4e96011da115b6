"""Names of torch's stages and schedules that belong to its runtime, each with the way out: bpipe runs a verified plan instead."""

from __future__ import annotations

from bpipe.errors import ConfigurationError

__all__: list[str] = []

_ORDER = "write a rule (bpipe.schedules.Rule, docs/schedules.md) or give FromPlan a plan"
_LOSS = "give the schedule a loss_fn; losses come back in the list that step(losses=[]) fills"
_RUN = "look at schedule.plan, schedule.stats and bpipe.trace(schedule)"
_CALL = "call schedule.step(...) or schedule.eval(...), which send, receive and compute as the plan says"

SCHEDULE = {
    "register_custom_function": "set schedule.overlap to run pairs of a forward and a backward in your own way (docs/overlap.md)",
    **dict.fromkeys(("_calculate_single_rank_operations", "_get_pipeline_order", "_step_microbatches"), _ORDER),
    **dict.fromkeys(("_compute_loss", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses", "_internal_losses"), _LOSS),
    "_split_inputs": "give args_chunk_spec= or kwargs_chunk_spec=, or cut the batch yourself: step(arg_mbs=[...])",
    "_merge_outputs": "give output_merge_spec=",
    **dict.fromkeys(("_initialize_stage", "_initialize_stages", "_simulate", "backward_counter"), _RUN),
    **dict.fromkeys(("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages"), _RUN),
}

STAGE = {
    **dict.fromkeys(("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"), _CALL),
    **dict.fromkeys(("forward_maybe_with_nosync", "backward_maybe_with_nosync"), _CALL),
    **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), _CALL),
    **dict.fromkeys(("set_local_fwd_input", "set_local_bwd_input", "get_local_bwd_output"), _CALL),
    **dict.fromkeys(("args_recv_info", "act_send_info", "grad_recv_info", "grad_send_info"), _CALL),
    **dict.fromkeys(("scale_grads", "perform_reduce_grad"), "give the schedule scale_grads=, which scales the loss"),
    **dict.fromkeys(("fwd_cache", "bwd_cache", "output_chunks", "dw_runner", "chunks"), _RUN),
    **dict.fromkeys(("get_outputs_meta", "inputs_meta"), "bpipe learns shapes from the first microbatch, and anew if they change"),
}


def check_missing(owner: str, name: str, names: dict[str, str]) -> None:
    """Raise if an attribute that a stage or a schedule does not have belongs to torch's runtime.

    Raises:
        AttributeError: it does; the message names the way out.
    """
    if name in names:
        raise AttributeError(f"{owner} has no {name}, which is part of torch's runtime: {names[name]}")


def check_overrides(kind: type, names: dict[str, str]) -> None:
    """Raise if a class overrides a method that torch calls and bpipe does not.

    Raises:
        ConfigurationError: it does.
    """
    own = (base for base in kind.__mro__ if not base.__module__.startswith("bpipe."))
    for name in {name for base in own for name in vars(base)} & names.keys():
        raise ConfigurationError(f"{kind.__name__} overrides {name}, which bpipe does not call: {names[name]}")
