"""A Transformers model's class with the forward of a stage."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from bpipe.errors import ConfigurationError

__all__: list[str] = []

NOT_OF_A_STAGE = {
    "labels": "give them to the schedule as target=, and the loss as loss_fn=",
    "cache": "a pipeline trains without one",
    "past_key_values": "a pipeline trains without a cache",
    "inputs_embeds": "the first stage takes input_ids, and the others hidden states",
}
OF_PICTURES_AND_SOUND = (
    *("pixel_", "image_", "video_", "audio_", "vision_", "speech_"),
    *("input_features", "input_values", "input_image", "input_audio"),
)
CUT_FROM = "_bpipe_cut_from"  # the attribute of a stage's class with the model's


@cache
def stage_class(cls: Any, is_first: bool, is_last: bool) -> type[nn.Module]:
    """Return a subclass of the model's class, under the same name, with the forward of a stage."""

    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        unusable = next((name for name in NOT_OF_A_STAGE if not _is_usable(kwargs.get(name))), None)
        if unusable is not None:
            raise ConfigurationError(f"a stage of {cls.__name__} does not take {unusable}: {NOT_OF_A_STAGE[unusable]}")
        for name in kwargs:
            if name.startswith(OF_PICTURES_AND_SOUND) and kwargs[name] is not None:
                raise ConfigurationError(f"a stage of {cls.__name__} does not take {name}: split_transformer cuts models for words")
        inputs = {"input_ids" if is_first else "inputs_embeds": hidden_states, "use_cache": False, "return_dict": True}
        if is_last or self.base_model is self:
            output = cls.forward(self, **{**kwargs, **inputs})
        else:
            output = cast(nn.Module, self.base_model)(**{**kwargs, **inputs})
        if is_last and self.base_model is not self and "logits" not in output:
            raise ConfigurationError(
                f"{cls.__name__} returns {' and '.join(output)}, and a last stage returns logits: use split_model"
            )
        return cast(Tensor, output["logits"] if "logits" in output else output[0])

    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    names["forward"], names[CUT_FROM] = forward, cls
    return type(cls.__name__, (cls,), names)


def _is_usable(value: Any) -> bool:
    """Return whether a stage takes what it cannot use: nothing, or a cache of `sliced_transformer`."""
    return value is None or getattr(value, "is_of_slices", False)
