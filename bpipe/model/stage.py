"""One partition of a model and its place in a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from bpipe.checks import check_count
from bpipe.comm.health.agreement import MOST_STAGES
from bpipe.comm.transport.process_group import group_of, rank_and_size
from bpipe.comm.wire.dtensor import mesh_among
from bpipe.device import with_index
from bpipe.errors import ConfigurationError, StageError
from bpipe.flow.shape_arguments import named_skips
from bpipe.memory.makeup import Makeups
from bpipe.model.cut import cut_of
from bpipe.model.examples import NAMES, Example, examples_of, inputs_of, is_example
from bpipe.model.of_torch_alone import STAGE, check_missing, check_overrides
from bpipe.model.torch_graph import TracedCalls, mark_copies
from bpipe.not_copied import NotCopied
from bpipe.torch_private.distributed import contexts_of_stage, mesh_of_stage

if TYPE_CHECKING:
    from bpipe.model.stage_info import PipelineStageInfo

__all__ = ["PipelineStage"]

ContextFactory = Callable[["PipelineStageInfo"], AbstractContextManager[Any]]


class ModuleSnapshot(NamedTuple):
    """The modules and parameters of a module at some moment, each once. Keep it for a step only: it keeps replaced ones alive."""

    modules: list[torch.nn.Module]
    parameters: list[torch.nn.Parameter]
    makeup: int  # the number of its makeup

    @classmethod
    def of(cls, module: torch.nn.Module, makeups: Makeups) -> ModuleSnapshot:
        """Collect the present modules and parameters of a module."""
        modules = list(module.modules())
        found = [one for module in modules if module._parameters for one in module._parameters.values() if one is not None]
        parameters = list(dict(zip(map(id, found), found)).values())
        return cls(modules, parameters, makeups.number(modules, parameters))

    def mode(self) -> str:
        """Describe the makeup of the module, which of its modules train, and which parameters are trainable."""
        training = "".join(["t" if module.training else "e" for module in self.modules])
        trainable = "".join(["1" if parameter.requires_grad else "0" for parameter in self.parameters])
        return f"{self.makeup} {training} {trainable}"


class PipelineStage(NotCopied):
    """A stage: any `nn.Module`, its index, and the group of ranks that its pipeline runs on.

    The arguments are torch.distributed.pipelining's. Nothing is run, moved or wrapped here: parameters on the meta device
    may be initialised later, and `stage.submod` may be changed or replaced between steps.

    The module gets the positional arguments of the schedule's `step` on the first stage, the previous stage's output on
    the others (a tuple or list as several arguments), and the keyword arguments that `step` is given on its own rank. It may return
    tensors, DTensors, None, numbers, strings, and tuples, lists and dicts of these.

    Args:
        submodule: the partition; `stage.submod` afterwards.
        stage_index: its place, 0 to num_stages - 1.
        num_stages: stages in the pipeline.
        device: where it computes and receives; default: the device of its parameters.
        input_args: an example of what the module gets in one microbatch, a tensor or a tuple of tensors, on any device. Shapes are
            learned from the first real microbatch; an example is compared with it, once, on the rank that gave it
            (not where stages take slices).
        output_args: likewise of what the module returns.
        output_grads: accepted and not used: gradients are those of the outputs.
        input_grads: likewise of the inputs.
        group: the process group of the pipeline's ranks (None: the default group), a `DeviceMesh` of one dimension such as
            `mesh["pp"]`, or a rank of a `Loopback`. It may also be given in fifth place, instead of `input_args`.
        dw_builder: for a module that defers the gradients of some of its weights itself, as torch's: the stage's backwards
            then run as a whole, `dw_builder()` is called behind each, and its result is called in that microbatch's W action,
            or at once if the schedule has none.
        get_mesh: `get_mesh(mesh_dim_names, mesh_layout)` gives the mesh of this rank for DTensors that the neighbouring stages
            send, as torch's does (the layout is None here); default: that of the stage's own parameters.
        directions: 2 for a schedule of two directions, such as `BitPipe`: then stages 0 to S-1 are the model, of num_stages = 2S,
            and stages S to 2S-1 are their twins, which start with the same weights.
        skips: what stages of the model hand on to later ones than the next, the same for all stages: by name, the stage that makes
            a value and those that use it, such as `{"encoded": (1, 3, 4)}`. The module of the first returns
            `(output, {"encoded": value})`, those of the others get the value as a keyword argument (docs/skips.md).

    Raises:
        ConfigurationError: an index outside the pipeline, an argument that is not a module, a module that `split_model` made for
            another stage, a skip to a stage that is not a later one, an example that is no tensor, or a mesh of several dimensions.

    Example:
        >>> from torch import nn
        >>> stage = PipelineStage(nn.Linear(8, 8), stage_index=0, num_stages=4, device="cpu")
        >>> stage.is_first, stage.is_last
        (True, False)
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | None = None,
        input_args: Any = None,
        output_args: Example = None,
        output_grads: Any = None,
        input_grads: Example = None,
        group: Any = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable[[tuple[str, ...], Any], Any] | None = None,
        *,
        directions: int = 1,
        skips: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        if not isinstance(submodule, torch.nn.Module):
            raise ConfigurationError(f"a stage needs an nn.Module, got {type(submodule).__qualname__}")
        check_count("num_stages", num_stages)
        if not isinstance(stage_index, int) or not 0 <= stage_index < num_stages:
            raise ConfigurationError(f"stage_index={stage_index!r}: with {num_stages} stages it is 0 to {num_stages - 1}")
        if directions not in (1, 2) or num_stages % directions:
            raise ConfigurationError(
                f"directions={directions!r} of {num_stages} stages: give 1, or 2 for a schedule such as BitPipe, with half of "
                "them each"
            )
        depth = num_stages // directions
        cut = cut_of(submodule)
        if cut is not None and (cut.stage, cut.num_stages) != (stage_index % depth, depth):
            raise ConfigurationError(
                f"the module is stage {cut.stage} of {cut.num_stages} of the model that it was cut from, "
                f"but it was given as stage {stage_index % depth} of {depth}"
            )
        given: dict[str, Any] = dict(zip(NAMES, (input_args, output_args, output_grads, input_grads)))
        for name, value in given.items():
            if not is_example(name, value):  # but the group, which stood there in an earlier order of the arguments
                if group is not None:
                    raise ConfigurationError(f"{name} is a {type(value).__qualname__}, and group= was given too: give one group")
                given[name], group = None, value
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.directions = directions
        self.device = with_index(torch.device(device) if device is not None else _device_of(submodule))
        self.group = group_of(group)
        self.has_backward = False  # whether the latest schedule made of it trains
        self.examples = examples_of(given)  # until they are compared with the first microbatch
        self.input_forms = self.examples.get("input_args")  # stays: a fake group has no other source
        self._get_mesh = get_mesh
        self.dw_builder = dw_builder
        self.skips = named_skips({} if skips is None else skips, depth)
        self.adapter: Callable[..., Any] | None = None  # calls the module, if that does not take and return skips itself
        self.forward_contexts: OrderedDict[int, ContextFactory] = OrderedDict()  # at most one, by the number of its handle
        self._depth = depth  # the number of stages that a microbatch passes
        self._makeups = Makeups()

    @classmethod
    def adopt(cls, stage: Any) -> PipelineStage:
        """Return a stage of ours unchanged, or wrap torch.distributed.pipelining's in one that shares its module.

        Raises:
            ConfigurationError: the stage is neither.
        """
        if isinstance(stage, cls):
            return stage
        try:
            return _AdoptedStage(stage)
        except AttributeError as error:
            raise ConfigurationError(f"a schedule needs a PipelineStage, got {type(stage).__qualname__}") from error

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_overrides(cls, STAGE)

    def __getattr__(self, name: str) -> Any:
        check_missing(type(self).__name__, name, STAGE)
        return object.__getattribute__(self, name)  # raises again what a property raised

    def clear_runtime_states(self) -> None:
        """Do nothing: a stage keeps nothing between steps, whatever their shapes are."""

    def register_forward_context(self, context_factory: ContextFactory) -> RemovableHandle:
        """Run the module inside a context manager in each of its forwards, until the handle that this returns is removed.

        The context surrounds the module, without the loss. Each slice, and each forward that runs again to recompute what was not
        saved, has a context of its own.

        Args:
            context_factory: `context_factory(info)` makes the context manager of one forward, which lets the module's errors pass;
                `info` is a `PipelineStageInfo`, with the stage's index and the microbatch's.

        Raises:
            ConfigurationError: a context is registered already.

        Example:
            >>> from contextlib import nullcontext
            >>> from torch import nn
            >>> stage = PipelineStage(nn.Linear(8, 8), stage_index=0, num_stages=4, device="cpu")
            >>> handle = stage.register_forward_context(lambda info: nullcontext())
            >>> handle.remove()
        """
        if self.forward_contexts:
            raise ConfigurationError(f"stage {self.stage_index} has a forward context already: call remove() of its handle first")
        handle = RemovableHandle(self.forward_contexts)
        self.forward_contexts[handle.id] = context_factory
        return handle

    @property
    def original(self) -> Any:
        """The stage that the user made: this one, unless another library's was adopted."""
        return self

    @property
    def group_rank(self) -> int:
        """This process's number in the group; 0 without one."""
        return rank_and_size(self.group)[0]

    @property
    def group_size(self) -> int:
        """The number of processes in the group; 1 without one."""
        return rank_and_size(self.group)[1]

    @property
    def is_first(self) -> bool:
        """Whether this stage gets the pipeline's inputs."""
        return self.stage_index % self._depth == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage returns the pipeline's outputs."""
        return (self.stage_index + 1) % self._depth == 0

    def parts(self) -> ModuleSnapshot:
        """Collect the present modules and parameters of the stage's module."""
        return ModuleSnapshot.of(self.submod, self._makeups)

    def __repr__(self) -> str:
        known = vars(self)
        if "_depth" not in known:
            return f"{type(self).__name__}(not constructed)"
        skips = f", skips {', '.join(known['skips'])}" if known["skips"] else ""
        place = f"stage {self.stage_index} of {self.num_stages}{' of two directions' * (self.directions > 1)}"
        return f"PipelineStage({type(self.submod).__name__}, {place} on {self.device}{skips})"


class _AdoptedStage(PipelineStage):
    """Another library's stage as one of ours, whose module, `dw_builder` and forward context are those of the original."""

    def __init__(self, stage: Any) -> None:
        get_mesh = mesh_of_stage(stage)
        super().__init__(stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group, get_mesh=get_mesh)
        if (graph := getattr(getattr(stage, "pipe_info", None), "graph", None)) is not None:  # of torch's tracer
            calls = TracedCalls(graph)
            if calls.skips:  # otherwise each stage takes what the one before returns
                self.skips, self.adapter = named_skips(calls.skips, self._depth), partial(calls.run, stage)
            mark_copies(graph, stage.submod)
        self.input_forms = inputs_of(stage)
        self._stage = stage

    @property
    def original(self) -> Any:
        return self._stage

    def __getattribute__(self, name: str) -> Any:
        if name in ("submod", "dw_builder", "forward_contexts") and "_stage" in self.__dict__:
            return contexts_of_stage(self._stage) if name == "forward_contexts" else getattr(self._stage, name, None)
        return super().__getattribute__(name)


def in_context(stage: PipelineStage, microbatch: int) -> Callable[..., Any]:
    """Return the module as it runs for a microbatch inside the context that is registered, which must not hide its errors."""
    from bpipe.model.stage_info import PipelineStageInfo

    (context_factory,) = stage.forward_contexts.values()
    index = stage.stage_index % (stage._depth * stage.directions)  # of a plan with paths, the same in each replica

    def run(*args: Any, **kwargs: Any) -> Any:
        with context_factory(PipelineStageInfo(stage_index=index, microbatch_index=microbatch)):
            return (stage.adapter or stage.submod)(*args, **kwargs)
        raise StageError(
            f"stage {index}, microbatch {microbatch}: the forward context hides an error of the module, so that there is no "
            "output: let the error pass"
        )

    return run


def find_mesh(stage: PipelineStage, names: tuple[str, ...] | None, shape: tuple[int, ...]) -> Any:
    """Return the mesh for this stage's shards of DTensors that come from a device mesh with these names and this shape."""
    mesh = mesh_among([*stage.submod.parameters(), *stage.submod.buffers()], names, shape)
    if mesh is None and stage._get_mesh is not None and names is not None:
        mesh = stage._get_mesh(names, None)
    if mesh is None or tuple(mesh.shape) != shape:
        raise StageError(
            f"stage {stage.stage_index} gets a DTensor on a mesh {names} of shape {shape}, but it knows "
            f"{'no such mesh' if mesh is None else f'only {mesh}'}: none of its parameters lies on one. Give PipelineStage "
            "get_mesh=lambda names, layout: your_mesh[names]"
        )
    return mesh


def mode_of(stage: PipelineStage, parts: ModuleSnapshot) -> str:
    """Describe what affects results and saved bytes besides inputs: makeup, trainable parameters, mode, autocast, context."""
    kind = stage.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return f"{parts.mode()} {autocast} {list(stage.forward_contexts)}"


def as_replica(stage: PipelineStage, replica: int, num_replicas: int) -> PipelineStage:
    """Return a stage as the one of a plan with paths, which counts the stages of all replicas; both have the same module."""
    made = object.__new__(type(stage))
    vars(made).update(vars(stage))
    made.stage_index, made.num_stages = replica * stage.num_stages + stage.stage_index, num_replicas * stage.num_stages
    return made


def stages_of(given: Any, *, may_be_uneven: bool = False) -> dict[int, PipelineStage]:
    """Return a rank's stages by index; uneven if other ranks may hold more or fewer of them, as a plan says."""
    stages = [PipelineStage.adopt(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    if not stages or len(stages) > MOST_STAGES:
        raise ConfigurationError(f"a rank holds 1 to {MOST_STAGES} stages, got {len(stages)}")
    for name in ("num_stages", "directions", "device", "group", "skips"):
        values = [getattr(one, name) for one in stages]
        if any(value != values[0] for value in values):
            raise ConfigurationError(f"the stages of a rank must have the same {name}, got {', '.join(map(str, values))}")
    if len({cut.digest for one in stages if (cut := cut_of(one.submod)) is not None}) > 1:
        raise ConfigurationError("the stages of a rank were cut by different lists of names: cut the model once")
    by_index = {one.stage_index: one for one in stages}
    if len(by_index) < len(stages) or (stages[0].num_stages % len(stages) and not may_be_uneven):
        raise ConfigurationError(
            f"a rank got stages {[one.stage_index for one in stages]} of {stages[0].num_stages}: "
            "put each stage on one rank, and equally many on every rank (only FromPlan and FromCSV run uneven placements)"
        )
    return by_index


def _device_of(module: torch.nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type == "meta":
        raise ConfigurationError("the module's parameters are on the meta device: give device=, where the stage will run")
    return torch.device("cpu") if parameter is None else parameter.device
