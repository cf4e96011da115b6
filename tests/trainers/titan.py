"""A rank of torchtitan's own trainer on CPU: its debug model with a pipeline of torch's or of bpipe's."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

import bpipe
from bpipe.torchtitan import pipelining_fn
from tests.trainers import cpu
from tests.trainers.changed_import import load_changed

cpu.answer_for_the_device()

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

SEQUENCE, BATCH = 64, 8


def train(
    rank: int,
    folder: Path,
    steps: int,
    *,
    degree: int,
    schedule: str = "1F1B",
    way: str = "torch",
    options: dict[str, Any] | None = None,
    checkpoints: bool = False,
    model: str = "llama3",
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train as `torchtitan.train.main` does.

    Args:
        rank: not used; torchtitan asks the environment.
        folder: the working directory, with the assets.
        steps: of training, in all runs that continue one another.
        degree: ranks of a pipeline.
        schedule: as torchtitan's configuration names it, or a class of bpipe's with `way="function"`.
        way: "torch", torchtitan as it is; "import", with its import changed; "function", with `bpipe.torchtitan.pipelining_fn`.
        options: of `pipelining_fn`.
        model: "llama3", torchtitan's own, or "transformers", one of Transformers' in torchtitan's backend for these.
        checkpoints: whether every second step is saved, and the last one that was saved is loaded first.
        changes: further attributes of the configuration, such as "training.steps".

    Returns:
        The losses of this rank's steps and of its validations, its parameters, and the module that has the schedule's class.
    """
    os.chdir(folder)
    cpu.leave_group()
    cpu.be_newer_than_2_13()
    config = _config(MODELS[model](), steps)
    config.parallelism.pipeline_parallel_degree = degree
    config.parallelism.pipeline_parallel_schedule = "1F1B" if way == "function" else schedule
    config.checkpoint = CheckpointManager.Config(enable=checkpoints, interval=2, last_save_model_only=False)
    for name, value in (changes or {}).items():
        part, _, attribute = name.rpartition(".")
        setattr(getattr(config, part) if part else config, attribute, value)
    if way == "import":
        sys.modules[PIPELINES["llama3"]] = load_changed(PIPELINES["llama3"])  # the other one imports it
        build = config.model_spec.pipelining_fn.__name__
        config.model_spec = replace(config.model_spec, pipelining_fn=getattr(load_changed(PIPELINES[model]), build))
    elif way == "function":
        config.model_spec = replace(config.model_spec, pipelining_fn=pipelining_fn(getattr(bpipe, schedule), **(options or {})))
    return _run(config.build())


def _llama3() -> Trainer.Config:
    """Return torchtitan's debug model with an attention that has a backward on CPU."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def _transformers() -> Trainer.Config:
    """Return the debug model of torchtitan's backend for Transformers, a Qwen3 whose configuration is made here."""
    from torchtitan.experiments.transformers_modeling_backend import config_registry
    from transformers import AttentionInterface, Qwen3Config

    AttentionInterface.register("flex_torchtitan", _causal_attention)
    Qwen3Config(vocab_size=512, intermediate_size=512, head_dim=16, architectures=["Qwen3ForCausalLM"]).save_pretrained("qwen3")
    config = config_registry.transformers_modeling_backend_debugmodel()
    config.hf_model = "./qwen3"
    return config


def _causal_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
    """Do what that backend's flex attention does with its causal mask: flex attention has no backward on CPU."""
    scale = kwargs.get("scaling")
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2), None


MODELS = {"llama3": _llama3, "transformers": _transformers}
PIPELINES = {
    "llama3": "torchtitan.distributed.pipeline_parallel",
    "transformers": "torchtitan.experiments.transformers_modeling_backend.pipeline",
}


def _config(config: Trainer.Config, steps: int) -> Trainer.Config:
    """Return the configuration with short sequences and few steps."""
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, SEQUENCE, BATCH
    config.training.disable_cuda_graphs = True  # torchtitan asks for it with a pipeline
    config.debug.seed, config.debug.deterministic = 7, True
    text = HuggingFaceTextDataLoader.Config(dataset="c4_test")
    config.validator = Validator.Config(enable=True, freq=2, steps=1, dataloader=text)
    return config


def _run(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "validation": []}
    _listen(trainer.metrics_processor, "log", found["losses"])
    _listen(trainer.metrics_processor, "log_validation", found["validation"])
    trainer.train()
    found["parameters"] = {
        name.replace("_checkpoint_wrapped_module.", ""): value.full_tensor().clone()
        for part in trainer.model_parts for name, value in part.named_parameters()
    }
    found["class"] = type(trainer.pp_schedule).__module__
    trainer.close()
    return found


def _listen(to: Any, name: str, losses: list[float]) -> None:
    """Keep the losses that torchtitan writes to its log."""
    method = getattr(to, name)

    def heard(*args: Any, **kwargs: Any) -> None:
        losses.append(kwargs["loss"] if "loss" in kwargs else args[1])
        method(*args, **kwargs)

    setattr(to, name, heard)
