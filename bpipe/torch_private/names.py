"""The list of torch's private names that bpipe uses, and how it asks for one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bpipe.errors import UnsupportedTorchError

__all__: list[str] = []

NEWEST = "2.15"  # the newest release that the list was compared with
_MISSING = object()


class PrivateName(NamedTuple):
    """A private name of torch."""

    owner: str  # where torch has it: a module or a class, or the object that has it as an attribute
    use: str  # what bpipe does with it
    without: str  # what users lose without it
    since: str = "2.11"
    until: str = NEWEST  # the last release that has it


_FSDP_STATE, _FSDP_GROUP, _DDP = "FSDP2's state", "FSDP2's parameter group", "DistributedDataParallel"
_NO_EVICTION = "Nothing can be evicted, and measured bytes are too low: use OneFOneB"
_NO_THREADS = "Neither fill jobs nor forwards beside backwards can run: leave them out"
_SPLIT = "Split backwards, such as those of zero-bubble schedules, cannot run: take a schedule with whole ones, such as OneFOneB"
_NO_FSDP = "Stages under fully_shard cannot run"
_NO_DRY_RUN = "The first step measures what stages take"
_NO_DDP = "Stages under DistributedDataParallel cannot run: use fully_shard"
_NO_PACKAGE = "Process groups of a package's own backend cannot carry tensors of a device: take one of torch's"

NAMES: dict[str, PrivateName] = {  # the fields of those that have the same ones
    name: PrivateName(*entry)
    for names, *entry in (
        # Tensors and storages
        ("_version", "torch.Tensor", "notice in-place changes of tensors that others still need",
         f"They are not noticed. {_NO_EVICTION}"),
        ("_base", "torch.Tensor", "find the tensor that a gradient is a view of", "Such gradients are copied"),
        ("_storage_Use_Count", "torch._C", "find out whether a storage has other owners than autograd", _NO_EVICTION),
        ("_cdata", "torch.UntypedStorage", "count its owners", _NO_EVICTION),
        ("_construct_storage_from_data_pointer", "torch._C", "map memory of another rank's device",
         "Evictions between devices of a host go through torch.distributed"),
        ("_indices _values", "torch.Tensor", "compare sparse tensors", "Sparse state cannot be recomputed or compared"),
        ("_ragged_idx", "a jagged NestedTensor", "find its ragged dimension", "Jagged tensors cannot be cut: pad them"),
        # Autograd
        ("_raw_saved_tensors", "torch.autograd.function.BackwardCFunction", "see what custom Functions have saved", _NO_EVICTION),
        ("_raw_saved_self", "a node of autograd's graph", "count saved bytes without hooks",
         "More microbatches are followed by hooks"),
        ("_forward_cls", "a node of a custom Function", "name it in messages", "Messages name the node instead"),
        ("_saved_training", "a node of BatchNorm", "tell whether it takes statistics of what it is given",
         "F.batch_norm(training=False) is refused where its training is"),
        ("_get_sequence_nr", "torch.autograd", "notice that a microbatch has another graph than the last one",
         "Microbatches of a kind count as equal"),
        ("_top_saved_tensors_default_hooks", "torch._C._autograd", "call saved-tensor hooks around a step", _NO_EVICTION),
        ("_checkpoint_internal _user_hooks", "hooks of torch.utils.checkpoint",
         "keep them from taking bpipe's hooks for the user's", "Regions with a policy warn of hooks that are not the user's",
         "2.15"),
        ("_execution_engine", "torch.autograd.Variable", "run parts of a backward", _SPLIT),
        ("_ImperativeEngine", "torch._C", "defer callbacks to the end of a split backward", _SPLIT),
        ("_MultiHandle", "torch.autograd.graph", "notice hooks on several tensors", _SPLIT),
        ("_current_graph_task_id", "torch._C", "tell whether a backward runs", _SPLIT),
        ("_current_autograd_node", "torch._C", "tell which backward calls a hook", _SPLIT),
        ("_will_engine_execute_node", "torch._C", "tell whether a backward leads to a parameter", _SPLIT),
        ("_post_accumulate_grad_hooks", "torch.Tensor", "run such backwards as a whole", _SPLIT),
        ("_backward_hooks", "torch.Tensor and torch.nn.Module", "see hooks", _SPLIT),
        ("_is_profiler_enabled", "torch.autograd.profiler", "name actions in a profile", "Profiles do not show actions"),
        # Modules
        ("_forward_hooks _forward_pre_hooks _backward_pre_hooks", "torch.nn.Module", "see hooks",
         "A change of hooks between steps is not noticed, and modules are neither traced, recomputed nor proven"),
        ("_compiled_call_impl", "torch.nn.Module", "see that it is compiled", "`module.compile()` between steps is not noticed"),
        ("_orig_mod", "torch.compile's modules", "find the module inside", "Compiled modules count as unknown ones"),
        ("_cache_enabled", "torch.nn.utils.parametrize", "see that weights are kept",
         "Sizes before the first step need `parametrize.cached` to be off"),
        ("_checkpoint_wrapped_module", "checkpoint_wrapper's modules", "leave it out of names", "Names of weights have it"),
        ("_c _concrete_type _actual_script_module", "torch.jit.ScriptModule", "restore its attributes",
         "Modules of torch.jit cannot be recomputed, or measured: keep them out of stages"),
        # Modes
        ("_get_current_function_mode_stack", "torch.overrides", "see function modes", _NO_THREADS),
        ("_get_current_dispatch_mode_stack", "torch.utils._python_dispatch", "see dispatch modes", _NO_THREADS),
        ("_current_level", "torch.autograd.forward_ad", "see levels of forward derivatives", "One that is left on is not noticed"),
        ("TorchDispatchMode", "torch.utils._python_dispatch", "see operations", "Fill jobs and slices cannot run: leave them out"),
        # Fake tensors
        ("FakeTensor FakeTensorMode disable_fake_tensor_cache", "torch._subclasses.fake_tensor", "run stages without data",
         _NO_DRY_RUN),
        ("_disable_current_modes", "torch.utils._python_dispatch", "compute what masks and positions decide", _NO_DRY_RUN),
        ("_grouped_mm _embedding_bag", "torch.ops.aten", "know what their fake kernels do not",
         "Stages with them are measured by the first step"),
        # Operators
        ("_foreach_norm", "torch", "clip many gradients at once", "Clipping takes them one by one"),
        ("_schema", "an operator of torch.ops", "see whether it drops out, or writes into its arguments",
         "Operators that draw count as dropout, and the first step measures what stages take"),
        ("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
         "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward",
         "torch.ops.aten", "attend to slices", "Attention over slices of a sequence does not work"),
        # Pytrees
        ("tree_is_leaf tree_flatten tree_unflatten", "torch.utils._pytree", "take registered types apart",
         "Registered types and named tuples count as one"),
        # torch.distributed
        ("_get_backend", "a process group", "read its timeout", "bpipe waits 30 minutes, whatever the group says"),
        ("_plugins", "torch.distributed.Backend", "make communicators of other backends", _NO_PACKAGE),
        ("_DistributedBackendOptions", "torch.distributed.distributed_c10d", "make communicators of other backends", _NO_PACKAGE),
        ("_start_coalescing _end_coalescing", "a backend of a process group", "post transfers of a device",
         "Pipelines on devices use gloo, through the host"),
        ("_Action", "torch.distributed.pipelining.schedules", "give plans in torch's words",
         "`pipeline_order` does not work: read schedule.plan"),
        ("_Replicate", "torch.distributed.pipelining.microbatch", "take it as a chunk spec", "None means the same"),
        ("_mesh_cache _get_mesh_cb", "a stage of torch's", "take its mesh",
         "DTensors between stages of torch's own fail: use bpipe's"),
        ("_forward_contexts", "a stage of torch's", "enter its forward context",
         "Schedules take no stages of torch's own: use bpipe's", "2.15"),
        ("_user_meta", "a stage of torch's", "check its examples", "Examples of torch's own stages are not checked"),
        # DistributedDataParallel
        ("_check_sync_bufs_pre_fwd _sync_buffers", _DDP, "keep buffers equal when a forward runs twice", _NO_DDP),
        ("_delay_all_reduce_all_params", _DDP, "refuse that option", _NO_DDP),
        ("_check_reducer_finalized", "its reducer", "see that all gradients are averaged", _NO_DDP),
        ("_reset_state", "its reducer", "go on after an error", "After an error in a backward, make the module anew"),
        # Fully sharded data parallelism
        ("_get_fsdp_state", "torch.distributed.fsdp.FSDPModule", "reach the following", _NO_FSDP),
        ("_module_state_mapping", "torch.distributed._composable_state",
         "find the sharded parameter that a gathered one stands for", _NO_FSDP),
        ("_lazy_init", _FSDP_STATE, "prepare it before a step", _NO_FSDP),
        ("_is_root _state_ctx _root_post_backward_final_callback", _FSDP_STATE, "end its backwards", _NO_FSDP),
        ("_comm_ctx", _FSDP_STATE, "order what it gathers", _NO_FSDP),
        ("_fsdp_param_groups", _FSDP_STATE, "find its parameters", _NO_FSDP, "2.12"),
        ("_fsdp_param_group", _FSDP_STATE, "find its parameters", _NO_FSDP, "2.11", "2.12"),
        ("_training_state", _FSDP_GROUP, "pass over what was never gathered", _NO_FSDP),
        ("_to_sharded", _FSDP_GROUP, "free what it gathered", _NO_FSDP),
        ("_all_gather_result", _FSDP_GROUP, "go on after an error", "After an error, make the module anew"),
        ("_partial_reduce_output", _FSDP_GROUP, "see unreduced gradients", _NO_FSDP),
        ("_unsharded_param", "FSDP2's parameter", "read unsharded gradients", _NO_FSDP),
        ("_sharded_post_forward_param", "FSDP2's parameter", "know parameters after a forward", _NO_FSDP),
        # GradScaler
        ("_scale _lazy_init_scale_growth_tracker _per_optimizer_states", "torch.amp.GradScaler", "scale over stages",
         "bpipe.GradScaler does not work: train in bfloat16, which needs none"),
    )
    for name in names.split()
}  # fmt: skip


def ask(owner: object, name: str, default: Any = _MISSING) -> Any:
    """Return what torch has under a private name of the list.

    Without a default the name is needed: an UnsupportedTorchError says so if this torch does not have it.
    """
    found = getattr(owner, name, default)
    if found is _MISSING:
        raise missing(name)
    return found


def has(owner: object, name: str) -> bool:
    """Return whether torch has a name of the list."""
    return getattr(owner, name, _MISSING) is not _MISSING


def missing(name: str) -> UnsupportedTorchError:
    """Return the error that says what cannot be done without a name of the list, and which torch has it."""
    entry = NAMES[name]
    return UnsupportedTorchError(
        f"bpipe needs {name} of {entry.owner} to {entry.use}; torch {torch.__version__} does not have it, torch {entry.since} to "
        f"{entry.until} do. {entry.without}"
    )
