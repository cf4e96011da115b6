"""Loss scaling over stages: all of them take the same step, or none does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from bpipe.comm.wire.dtensor import local, mesh_of
from bpipe.device import default_kind
from bpipe.errors import ConfigurationError
from bpipe.torch_private.scaler_parts import has_states, scale_of, state_of, take_state
from bpipe.training.pipeline_ranks import Ranks
from bpipe.training.replica_norms import INSTEAD, ranks_along

__all__ = ["GradScaler"]

REFUSED = 2.0  # sent in place of whether there is an overflow


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for the stages of a pipeline: an overflow on one of them skips the step on all.

    Only the last stage sees the loss: scale it in `loss_fn`, and unscale, step and update on every rank. What `losses` gets is
    scaled, too.

    `unscale_`, and `step` where it was not called before, communicate one all_reduce of 4 bytes over the pipeline's group, over
    `replicas`, and along each dimension of the meshes of the optimizer's DTensors. Collective over these, and blocks the host as
    torch's does: each rank calls them once for each of its optimizers, and all ranks have as many. A rank that has nothing to
    train, or fewer optimizers, gives None instead of each that it lacks. The scale then takes the same course on all ranks.

    Args:
        device: the type of the device; by default that of the accelerator here.
        init_scale: likewise, as are the following.
        growth_factor: the scale is multiplied by it after `growth_interval` steps without an overflow.
        backoff_factor: the scale is multiplied by it after an overflow.
        growth_interval: in steps.
        enabled: False to do nothing.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.
        replicas: the ranks that have the same stages in other pipelines with some other weights, such as `mesh["ep"]`: they take
            the same steps as this one. Ranks that share the mesh of a DTensor do so without it.

    Raises:
        ConfigurationError: this rank is not in the group, or it is a `Loopback`'s.

    Example:
        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> loss_fn = lambda y, target: scaler.scale(torch.nn.functional.mse_loss(y, target))
        >>> loss_fn(torch.ones(2), torch.zeros(2))
        tensor(8.)
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: Any = None,
        replicas: Any = None,
    ) -> None:
        super().__init__(device or default_kind(), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._num_unscaled = 0  # the calls of unscale_(None) for which step(None) was not called yet
        self._ranks = Ranks(group, "torch.amp.GradScaler with one optimizer over all stages does it")
        self._others = [] if replicas is None else [Ranks(replicas, INSTEAD)]

    def __repr__(self) -> str:
        return f"GradScaler(over a pipeline{'' if '_ranks' in vars(self) and self.is_enabled() else ', disabled'})"

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide the gradients by the scale, and learn whether any stage has an overflow. Collective over the pipeline.

        Raises:
            ConfigurationError: this is no optimizer, or another rank cannot unscale its gradients; there the error says why.
        """
        if not self.is_enabled():
            return
        scale = scale_of(self, torch.device(self._device))  # the loss may be on another rank
        state = state_of(self, optimizer)
        is_ready = state["stage"] is OptState.READY
        try:
            if optimizer is not None and not hasattr(optimizer, "param_groups"):
                raise ConfigurationError(f"{optimizer!r:.80} is no optimizer: unscale and step one after the other, or give None")
            if optimizer is not None:
                self._unscale_own(optimizer, state)
        except BaseException:
            if is_ready:  # the others are to hear of it; of a second call they make none
                self._greatest(torch.tensor(REFUSED), optimizer)
            raise
        self._num_unscaled += optimizer is None
        before = state["found_inf_per_device"]  # of None, what was agreed on for other optimizers, which decide the scale as well
        agreed = self._agreed({} if optimizer is None else before, scale.device, optimizer)
        state["found_inf_per_device"] = {device: flag.maximum(before.get(device, flag)) for device, flag in agreed.items()}

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Take the optimizer's step, or skip it on all ranks. Collective over the pipeline where `unscale_` was not called."""
        # torch's would leave a fused optimizer to look for overflows by itself.
        is_due = self.is_enabled() and (
            not self._num_unscaled if optimizer is None else state_of(self, optimizer)["stage"] is OptState.READY
        )
        if is_due:
            self.unscale_(optimizer)
        if optimizer is None:
            self._num_unscaled = max(0, self._num_unscaled - 1)
            return None
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale, the same on all ranks.

        Raises:
            ConfigurationError: this rank has neither unscaled nor stepped; the others hear of it where they wait for that.
        """
        if self.is_enabled() and new_scale is None and not has_states(self):
            self._greatest(torch.tensor(REFUSED), None)
            raise ConfigurationError(
                f"rank {self._ranks.rank} of the group updates the scale without a step, for which the other ranks wait: a rank "
                "that has no optimizer calls scaler.step(None), and scaler.unscale_(None) where the others unscale"
            )
        super().update(new_scale)
        self._num_unscaled = 0

    def _unscale_own(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Let torch unscale what this process has of each gradient.

        Of DTensors torch would do more: tell an overflow to the ranks of the first one's mesh alone, and refuse other tensors
        beside them.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if state["stage"] is not OptState.READY or all(mesh_of(parameter.grad) is None for parameter in parameters):
            super().unscale_(optimizer)
            return
        parts = SimpleNamespace(param_groups=[{"params": list(map(_own_part, parameters))}])
        super().unscale_(parts)  # type: ignore[arg-type]
        state.update(take_state(self, parts))

    def _agreed(
        self, found: dict[torch.device, torch.Tensor], of_scale: torch.device, optimizer: torch.optim.Optimizer | None
    ) -> dict[torch.device, torch.Tensor]:
        """Return whether any rank found an overflow, for each device that has gradients of this rank, or else for its scale's."""
        own = torch.stack([flag.to(self._ranks.device) for flag in found.values()]).amax(0) if found else torch.zeros(())
        agreed = self._greatest(own, optimizer)
        if agreed == REFUSED:
            raise ConfigurationError("another rank of the pipeline cannot unscale its gradients: it says why")
        return {device: agreed.to(device) for device in found or [of_scale]}

    def _greatest(self, own: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
        """Return the greatest number of all ranks: of those beside this one, then of the pipeline. Collective over these."""
        for ranks in (*_along_meshes(optimizer), *self._others, self._ranks):
            own = ranks.greatest(own)
        return own


def _own_part(parameter: Any) -> Any:
    """Return a tensor whose gradient is what this process has of a parameter's."""
    if mesh_of(parameter.grad) is None:
        return parameter
    part = local(parameter.grad)
    part.grad = local(parameter.grad)
    return part


def _along_meshes(optimizer: torch.optim.Optimizer | None) -> list[Ranks]:
    """Return the ranks along each dimension of the meshes of an optimizer's DTensors, whether these have a gradient or not."""
    groups = getattr(optimizer, "param_groups", ())  # None and what is refused have none
    meshes = dict.fromkeys(mesh_of(parameter) for group in groups for parameter in group["params"])
    return [ranks for mesh in meshes if mesh is not None for ranks in ranks_along(mesh)]
