"""A Transformers model's class with the forward of a stage."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from bpipe.errors import ConfigurationError
from bpipe.partition.router_loss import ASKS, behind, can_add, is_configured, plain, router_logits_of

__all__: list[str] = []

OUTPUT = "the last stage returns logits alone, as a tensor. For what is inside, register a forward hook on a module of the stage"
NOT_OF_A_STAGE = {
    "labels": "give them to the schedule as target=, and the loss as loss_fn=",
    "cache": "a pipeline trains without one",
    "past_key_values": "a pipeline trains without a cache",
    "use_cache": "a pipeline trains without a cache",
    "inputs_embeds": "the first stage takes input_ids, and the others hidden states",
    "return_dict": OUTPUT,
}
OF_PICTURES_AND_SOUND = (
    *("pixel_", "image_", "video_", "audio_", "vision_", "speech_"),
    *("input_features", "input_values", "input_image", "input_audio"),
)
CUT_FROM = "_bpipe_cut_from"  # the attribute of a stage's class with the model's


@cache
def stage_class(cls: Any, is_first: bool, is_last: bool) -> type[nn.Module]:
    """Return a subclass of the model's class, under the same name, with the forward of a stage."""

    def forward(
        self: nn.Module, hidden_states: Tensor | None = None, router_logits: tuple[Tensor, ...] | None = None, **kwargs: Any
    ) -> Any:
        base = cast(nn.Module, self.base_model)
        words, has_router_loss = kwargs.pop("input_ids", None), can_add(cls) and base is not self
        for name, value in kwargs.items():
            if why := _refusal(name, value, has_router_loss):
                raise ConfigurationError(f"a stage of {cls.__name__} does not take {name}: {why}")
        if is_first and ((words is None) is (hidden_states is None) or router_logits is not None):
            raise ConfigurationError(
                f"the first stage of {cls.__name__} takes input_ids once, as its only positional argument or by name, and all else "
                "by name"
            )
        asks = has_router_loss and (is_configured(self.config) if kwargs.get(ASKS) is None else bool(kwargs[ASKS]))
        if asks is (router_logits is None) and not is_first:
            raise ConfigurationError(f"{ASKS} reaches some stages of {cls.__name__} only: give it to step on all ranks, or on none")
        kwargs |= {"use_cache": False, "return_dict": True, **({ASKS: True} if asks else {})}
        kwargs["input_ids" if is_first else "inputs_embeds"] = words if is_first and words is not None else hidden_states
        earlier = router_logits or ()
        if not is_last:
            output = cls.forward(self, **kwargs) if base is self else base(**kwargs)
            return (output[0], (*earlier, *router_logits_of(output))) if asks else output[0]
        with behind(base, earlier) if asks else nullcontext():
            output = cls.forward(self, **kwargs)
        if base is not self and "logits" not in output:
            raise ConfigurationError(
                f"{cls.__name__} returns {' and '.join(output)}, and a last stage returns logits: use split_model"
            )
        return plain(self, output)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return _blank, (cls, is_first, is_last), vars(self)  # pickle finds the model's class under this one's name

    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    names |= {"forward": forward, "__reduce_ex__": reduced, CUT_FROM: cls}
    return type(cls.__name__, (cls,), names)


def _blank(cls: Any, is_first: bool, is_last: bool) -> nn.Module:
    """Make a stage without its attributes, for a copy or a pickle of one."""
    return nn.Module.__new__(stage_class(cls, is_first, is_last))


def _refusal(name: str, value: Any, has_router_loss: bool) -> str:
    """Return why a stage does not take a keyword argument; empty if it does, such as a cache of `sliced_transformer`."""
    if value is None or value is (name == "return_dict") or getattr(value, "is_of_slices", False):
        return ""  # what a stage does anyway
    if name.startswith(OF_PICTURES_AND_SOUND):
        return "split_transformer cuts models for words"
    if name == ASKS:
        return "" if has_router_loss else "the model computes no loss of its router's logits"
    if name.startswith("output_"):
        return OUTPUT
    return NOT_OF_A_STAGE.get("labels" if name.endswith(("labels", "label")) else name, "")
