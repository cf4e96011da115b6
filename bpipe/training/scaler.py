"""Loss scaling over stages: all of them take the same step, or none does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from bpipe.device import default_kind
from bpipe.errors import ConfigurationError
from bpipe.training.pipeline_ranks import Ranks

__all__ = ["GradScaler"]

REFUSED = 2.0  # sent in place of whether there is an overflow


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for the stages of a pipeline: an overflow on one of them skips the step on all.

    Only the last stage sees the loss: scale it in `loss_fn`, and unscale, step and update on every rank. What `losses` gets is
    scaled, too.

    `unscale_`, and `step` where it was not called before, communicate one all_reduce of 4 bytes over the pipeline's group.
    Collective, and blocks the host as torch's does: each rank calls them once for each of its optimizers, and all ranks have
    as many. A rank that has nothing to train, and so no optimizer, gives None instead. The scale then takes the same course on
    all ranks.

    Args:
        device: the type of the device; by default that of the accelerator here.
        init_scale: likewise, as are the following.
        growth_factor: the scale is multiplied by it after `growth_interval` steps without an overflow.
        backoff_factor: the scale is multiplied by it after an overflow.
        growth_interval: in steps.
        enabled: False to do nothing.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.

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
    ) -> None:
        super().__init__(device or default_kind(), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._ranks = Ranks(group, "torch.amp.GradScaler with one optimizer over all stages does it")

    def __repr__(self) -> str:
        return f"GradScaler(over a pipeline{'' if vars(self).get('_enabled') else ', disabled'})"

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide the gradients by the scale, and learn whether any stage has an overflow. Collective over the pipeline.

        Raises:
            ConfigurationError: another rank cannot unscale its gradients; there the error is torch's.
        """
        if not self.is_enabled():
            return
        if self._scale is None:  # the loss is on another rank
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        state = self._per_optimizer_states[id(optimizer)]
        is_ready = state["stage"] is OptState.READY
        try:
            if optimizer is None:
                state["stage"] = OptState.UNSCALED
            else:
                super().unscale_(optimizer)
        except BaseException:
            if is_ready:  # the others are to hear of it; of a second call they make none
                self._greatest(torch.tensor(REFUSED))
            raise
        state["found_inf_per_device"] = self._agreed(state["found_inf_per_device"])

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Take the optimizer's step, or skip it on all ranks. Collective over the pipeline where `unscale_` was not called."""
        # torch's would leave a fused optimizer to look for overflows by itself.
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return None if optimizer is None else super().step(optimizer, *args, **kwargs)

    def _agreed(self, found: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """Return whether any rank found an overflow, for each device that has gradients of this rank, or else for its scale's."""
        own = torch.stack([flag.to(self._ranks.device) for flag in found.values()]).amax(0) if found else torch.zeros(())
        agreed = self._greatest(own)
        if agreed == REFUSED:
            raise ConfigurationError("another rank of the pipeline cannot unscale its gradients: it says why")
        assert self._scale is not None
        return {device: agreed.to(device) for device in found or [self._scale.device]}

    def _greatest(self, own: torch.Tensor) -> torch.Tensor:
        """Return the greatest number of all ranks. Collective over the pipeline."""
        greatest = own.to(self._ranks.device)
        if self._ranks.group is not None:
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self._ranks.group)
        return greatest
