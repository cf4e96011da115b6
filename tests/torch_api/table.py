"""Which test of ours says what each of PyTorch's tests of pipelining says, and where bpipe differs.

The names are those of PyTorch's main branch in autumn 2026, under test/distributed/pipelining. `python -m tests.torch_api.table`
prints docs/torch-tests.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import bpipe
from tests.torch_api.models import Block, batch, sum_of_squares

OURS, RANKS = "tests/torch_api/test_one_process.py", "tests/torch_api/test_ranks.py"
COMPOSED = "test/distributed/_composable/test_composability/test_pp_composability.py"

SAYS: dict[str, dict[str, tuple[str, ...]]] = {  # by file of PyTorch: its tests, and ours that say the same
    "test_schedule.py": {
        "test_get_schedule_class": (f"{OURS}::test_a_class_by_its_name",),
        "test_schedule_with_single_stage": (f"{OURS}::test_one_stage",),
        "test_schedule_with_pre_split_inputs": (f"{OURS}::test_batches_that_are_cut_already",),
        "test_schedule_pre_split_validation": (f"{OURS}::test_pieces_that_do_not_fit_are_refused",),
        "test_schedule_eval_then_train": (f"{OURS}::test_an_evaluation_and_then_training",),
        "test_fake_pg_cross_rank_uses_static_metadata": (
            "tests/dry_run/test_fake_group.py::test_the_first_the_middle_and_the_last_of_eight_ranks",
            "tests/dry_run/test_fake_group.py::test_a_stage_without_an_example_is_refused_and_says_what_to_give",
        ),
        "test_pipeline_order": (f"{OURS}::test_looped_orders",),
        "test_pipeline_order_flex_and_zero_bubble": (f"{OURS}::test_looped_orders",),
        "test_pipeline_order_for_v_schedules": (
            f"{OURS}::test_orders_in_a_v",
            f"{OURS}::test_a_v_takes_two_stages_per_rank",
            f"{OURS}::test_few_microbatches_for_dual_pipe",
        ),
        "test_csv": (f"{OURS}::test_an_order_goes_through_a_file",),
        "test_csv_compare": ("tests/schedules/test_rules.py::test_forwards_and_input_halves_are_in_torch_s_order",),
        "test_defer_recv_ops_no_deadlock": ("tests/schedules/test_verify.py::test_generated_plans_verify_and_run",),
        "test_grad_with_v_schedule": (f"{OURS}::test_orders_in_torchs_text",),
        "test_grad_with_split_b_w": (f"{OURS}::test_orders_in_torchs_text",),
        "test_valid_schedule": (f"{OURS}::test_orders_in_torchs_text",),
        "test_invalid_schedule_missing_rank": (f"{OURS}::test_orders_that_lack_something_are_refused",),
        "test_invalid_schedule_missing_action": (f"{OURS}::test_orders_that_lack_something_are_refused",),
    },
    "test_schedule_multiproc.py": {
        "test_forward_only": (f"{RANKS}::only_forward",),
        "test_eval_inference_mode": (f"{RANKS}::evaluates",),
        "test_return_output": (f"{RANKS}::returns_nothing_if_asked",),
        "test_multi_iter": (f"{RANKS}::trains_as_one_process",),
        "test_kwargs_with_tracer": (f"{RANKS}::cut_by_torchs_tracer",),
        "test_grad_with_tracer": (f"{RANKS}::cut_by_torchs_tracer",),
        "test_grad_with_manual": (f"{RANKS}::trains_as_one_process", f"{RANKS}::takes_examples"),
        "test_grad_with_manual_interleaved": (f"{RANKS}::trains_as_one_process", f"{RANKS}::equals_torchs_own"),
        "test_schedule_with_weight_update_mlp_e2e": (
            f"{RANKS}::builders_of_weight_gradients",
            "tests/edge_cases/test_dw_builder.py::test_runners_run_where_the_weight_half_is",
        ),
        "test_v_shape_schedules": (f"{RANKS}::trains_as_one_process",),
        "test_pipeline_schedule_runtime_custom_sched": (f"{OURS}::test_orders_in_torchs_text",),
        "test_schedule_with_native_zero_bubble": (f"{OURS}::test_orders_in_torchs_text",),
    },
    "test_stage.py": {
        "test_tracer": (f"{RANKS}::cut_by_torchs_tracer", "tests/skips/test_torchs_tracer.py::test_stages_train_as_the_model"),
        "test_tracer_kwargs": (f"{RANKS}::cut_by_torchs_tracer",),
        "test_manual": (f"{RANKS}::trains_as_one_process",),
        "test_custom_dw_with_fb_schedule": (f"{RANKS}::builders_of_weight_gradients",),
    },
    "test_backward.py": {
        "test_stage_backward_input_with_view_output": (f"{OURS}::test_backwards_in_halves",),
        "test_stage_backward_weight_custom_autograd_function": (f"{OURS}::test_backwards_in_halves",),
        "test_stage_backward_multi_output_intermediate": (f"{OURS}::test_backwards_in_halves",),
        "test_stage_backward_weight_shared_weights": (f"{OURS}::test_backwards_in_halves",),
        "test_stage_backward_weight_multiple_iters": (f"{OURS}::test_backwards_in_halves",),
    },
    "test_microbatch.py": {
        "test_split_and_merge": (f"{OURS}::test_batches_are_cut_as_torch_says",),
        "test_chunk_spec": (f"{OURS}::test_batches_are_cut_as_torch_says",),
        "test_split_block_mask": (f"{OURS}::test_block_masks_are_cut_with_their_batch",),
    },
    "test_pipe.py": {"test_model_split": (f"{OURS}::test_what_cuts_models_is_torchs_own",)},
    "test_transformer.py": {"test_ir": (f"{OURS}::test_what_cuts_models_is_torchs_own",)},
    "test_unflatten.py": {"test_unflatten": (f"{OURS}::test_what_cuts_models_is_torchs_own",)},
    "test_dtensor_pp_integration.py": {
        "its tests": (
            "tests/test_tensor_parallel.py::test_data_pipeline_and_tensor_ranks_of_one_mesh",
            "tests/test_tensor_parallel.py::test_what_cannot_cross_is_refused_with_the_way_out",
        )
    },
    COMPOSED: {
        "test_manual_with_data_parallel": (
            "tests/test_sharding.py::test_gathers_reductions_and_gradients",
            "tests/test_ddp.py::test_gradients_are_reduced_once_a_step",
        ),
    },
}

INNER = {  # tests of functions and attributes inside torch's runtime, which bpipe does not have; by file
    "test_schedule.py": "its connections between ranks, its buffers for messages, its passes that place transfers, and its texts",
    "test_stage.py": "the caches of a stage, and its methods for one microbatch",
    "test_backward.py": "`stage_backward`, `stage_backward_input` and `stage_backward_weight` with arguments of their own",
    "test_dtensor_pp_unit_tests.py": "its descriptions of DTensors in messages",
}


class Difference(NamedTuple):
    """Something that torch's tests say and bpipe refuses, or does in another way.

    Args:
        tests: of PyTorch.
        what: is different.
        why: it is.
        instead: what to do.
        message: a part of bpipe's refusal; empty if nothing is refused.
        show: raises it; None: then `shown_by` shows what happens.
        shown_by: our test.
    """

    tests: str
    what: str
    why: str
    instead: str
    message: str = ""
    show: Callable[[], Any] | None = None
    shown_by: str = ""


def one(group: Any, index: int = 0, num_stages: int = 1) -> bpipe.PipelineStage:
    return bpipe.PipelineStage(Block(), index, num_stages, "cpu", group=group)


def rank(num_ranks: int = 1) -> Any:
    return bpipe.Loopback(num_ranks).rank(0)


def other_rows() -> None:
    schedule = bpipe.ScheduleGPipe(one(rank()), 8, sum_of_squares)
    x, target = batch()
    schedule.step(x, unused=torch.ones(8, 1), target=target)


DIFFERENCES = (
    Difference(
        "test_schedule_with_single_stage, test_schedule_with_pre_split_inputs, test_schedule_eval_then_train",
        "looped schedules take two or more stages per rank, where torch's take one",
        "with one stage per rank they are other schedules, which have names of their own",
        "make a `Schedule1F1B`, a `ScheduleGPipe` or a `ZBH1`",
        "takes two or more stages per rank",
        lambda: bpipe.ScheduleInterleaved1F1B([one(rank())], 2),
    ),
    Difference(
        "test_zero_bubble_schedule_errors_with_compile",
        "a compiled stage runs in schedules with weight halves, which torch refuses",
        "its compiled regions run whole in the input half",
        "nothing to do",
        shown_by=f"{OURS}::test_compiled_stages_in_halves",
    ),
    Difference(
        "test_shape_prop_mismatch",
        "a later batch, or a stage's output, may have another shape than the first one; torch raises PipeliningShapeError",
        "shapes are learned again when they change",
        "nothing to do",
        shown_by=f"{OURS}::test_batches_of_another_size_are_learned",
    ),
    Difference(
        "test_adjacency_guard_rejects_nonadjacent_send, test_adjacency_guard_rejects_nonadjacent_recv",
        "a traced model whose stages need values of stages before the last one runs in every schedule; torch refuses it in those "
        "of several stages per rank",
        "such values are skips",
        "nothing to do",
        shown_by="tests/skips/test_torchs_tracer.py::test_stages_train_as_the_model",
    ),
    Difference(
        "test_zero_bubble_with_model_kwargs",
        "a keyword argument with another number of rows than the batch needs a chunk spec",
        "nobody knows which of its rows belong to which microbatch",
        "give `kwargs_chunk_spec=`, or pieces: `step(kwarg_mbs=...)`",
        "Give kwargs_chunk_spec=",
        other_rows,
    ),
    Difference(
        "test_non_symmetric_stage_ids (ScheduleUnbalanced)",
        "a schedule by name takes equally many stages on every rank; a plan or CSV may place them unevenly",
        "the named rules place stages evenly",
        "give `FromPlan` a plan, or `FromCSV` torch's text",
        "only FromPlan and FromCSV",
        lambda: bpipe.BreadthFirst([one(group := rank(2), 0, 5), one(group, 1, 5), one(group, 4, 5)], 1),
    ),
    Difference(
        "test_non_symmetric_stage_ids (ScheduleVShaped), test_pipeline_activation_liveness_*",
        "a class of one's own does not derive from PipelineScheduleMulti and set `pipeline_order`",
        "a plan is proven before it runs, so it is given as a whole",
        "give `FromPlan` a plan, or `FromCSV` torch's text, or write a rule",
        "give FromPlan a plan",
        lambda: type("Own", (bpipe.PipelineScheduleMulti,), {}),
    ),
    Difference(
        "test_custom_function_callback",
        "no function takes the place of an action",
        "actions are steps of bpipe's engine, which follows what they save and send",
        "set `schedule.overlap` to run pairs in your own way",
        "set schedule.overlap",
        lambda: bpipe.ScheduleGPipe(one(rank()), 2).register_custom_function,
    ),
    Difference(
        "test_manual_with_data_parallel",
        "there is no `_step_microbatches`",
        "it is private, and `step` takes pieces",
        "`step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)`",
        "has no _step_microbatches",
        lambda: bpipe.ScheduleGPipe(one(rank()), 2)._step_microbatches,
    ),
    Difference(
        "test_schedule_passes_stage_and_microbatch_indices, test_stage_and_microbatch_indices_require_manual_stages",
        "modules do not get the numbers of their stage and microbatch",
        "torch 2.15 has `register_forward_context` instead of this argument",
        "`stage.register_forward_context(...)` is told both, or give each microbatch its number: `step(kwarg_mbs=...)`",
        "pass_stage_and_microbatch_indices",
        lambda: bpipe.ScheduleGPipe(one(rank()), 2, pass_stage_and_microbatch_indices=True),
    ),
    Difference(
        "test_max_active_stages_is_used_for_lowering",
        "how long gathered weights stay is not an argument",
        "a plan of bpipe says it, and FSDP2's reshard_after_forward",
        "choose `BreadthFirst`, which gathers each stage's weights at most twice",
        "takes no max_active_stages=4",
        lambda: bpipe.ScheduleInterleaved1F1B([one(group := rank(), 0, 2), one(group, 1, 2)], 2, max_active_stages=4),
    ),
    Difference(
        "test_eager_executor_forward_backward, test_set_executor_at_runtime, test_graph_executor_basic",
        "a stage has no executor",
        "torch 2.15 does not have this argument; a stage's module may be any callable module, also a compiled one",
        "give the compiled or traced module itself",
        "executor",
        lambda: bpipe.PipelineStage(nn.Identity(), 0, 1, "cpu", executor=None),
    ),
)


def page() -> str:
    """The table, as docs/torch-tests.md shows it."""
    rows = [
        f"| {one.what} | {one.why} | {one.instead} | {', '.join(f'`{name}`' for name in one.tests.split(', '))} |"
        for one in DIFFERENCES
    ]
    counted = sum(map(len, SAYS.values()))
    differing = len({name.partition(" ")[0] for one in DIFFERENCES for name in one.tests.split(", ")})
    return "\n".join(
        [
            "# PyTorch's tests of pipelining, said of bpipe",
            "",
            "`tests/torch_api` has tests of bpipe's own. Each states what a test of PyTorch states of torch.distributed.pipelining",
            "(main branch, autumn 2026); PyTorch's test files themselves are not run. "
            f"{counted} of PyTorch's tests have such a counterpart,",
            f"and {differing} (a family counted once) show a difference that is on purpose: the {len(DIFFERENCES)} rows below.",
            "`tests/torch_api/table.py` has them by name; `python -m tests.torch_api.table` prints this page.",
            "",
            "| what is different | because | what to do | tests of PyTorch |",
            "|---|---|---|---|",
            *rows,
            "",
            "Not compared, because bpipe has no such functions inside:",
            "",
            *[f"- `{file}`: {what}" for file, what in INNER.items()],
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
