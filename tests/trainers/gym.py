"""A rank of Modalities' own gym (trainer and evaluator) on CPU, with its GPT-2 in a pipeline of torch's or of bpipe's."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from modalities.batch import DatasetBatch
from modalities.checkpointing.stateful.app_state import AppState
from modalities.evaluator import Evaluator
from modalities.gym import Gym
from modalities.loss_functions import CLMCrossEntropyLoss
from modalities.models.gpt2.gpt2_model import (
    GPT2LLM,
    AttentionConfig,
    AttentionImplementation,
    LayerNormConfig,
    LayerNorms,
    LayerNormWrapperConfig,
    PositionTypes,
)
from modalities.models.model import ActivationType
from modalities.models.parallelism import pipeline_parallelism
from modalities.models.parallelism.stages_generator import GPT2LLMStagesGenerator
from modalities.running_env.fsdp.device_mesh import get_device_mesh
from modalities.trainer import Trainer
from modalities.training.gradient_clipping.fsdp_gradient_clipper import FSDP2GradientClipper, GradientClippingMode
from modalities.utils.profilers.profilers import SteppableNoProfiler

from tests.trainers.changed_import import load_changed

LAYERS, WIDTH, WORDS, LENGTH = 6, 128, 128, 16
BATCH, M = 8, 4


class Loader(list[DatasetBatch]):
    """Batches under the name that Modalities' loaders have."""

    def __init__(self, tag: str, num_batches: int) -> None:
        words = torch.randint(WORDS, (num_batches, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(len(tag)))
        super().__init__(DatasetBatch({"input_ids": x[:, :-1]}, {"target_ids": x[:, 1:]}) for x in words)
        self.dataloader_tag = tag


def train(rank: int, steps: int, *, schedule: str, layers_per_stage: int, way: str = "torch") -> dict[str, Any]:
    """Train and evaluate as `modalities.main` does, and return what the gym published and this rank's parameters."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # the trainer's sums of losses
    pipelines = pipeline_parallelism if way == "torch" else load_changed(pipeline_parallelism.__name__)
    loss, mesh = CLMCrossEntropyLoss("target_ids", "logits"), get_device_mesh("cpu", 1, 1, 1, dist.get_world_size(), 1, False, 1)
    pipeline = _pipeline(pipelines, mesh, schedule, layers_per_stage, loss)
    parts, published = pipeline.model_parts, []
    publisher = SimpleNamespace(publish_message=lambda payload, message_type: published.append(payload))
    gym = Gym(_trainer(mesh, steps, publisher, parts), Evaluator(publisher, publisher, mesh), loss, dist.get_world_size())
    optimizer = torch.optim.AdamW([parameter for part in parts for parameter in part.parameters()], lr=3e-3)
    gym.run(
        app_state=AppState(parts, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        training_log_interval_in_steps=1,
        checkpointing_interval_in_steps=steps + 1,
        evaluation_interval_in_steps=2,
        train_data_loader=Loader("train", steps),
        evaluation_data_loaders=[Loader("evaluation", 2)],
        checkpoint_saving=None,
        scheduled_pipeline=pipeline,
    )
    results = [message.losses for message in published if hasattr(message, "losses")]
    return {
        "losses": [{name: float(item.value) for name, item in losses.items()} for losses in results],
        "parameters": {name: p.detach().clone() for part in parts for name, p in part.named_parameters()},
        "class": type(pipeline.pp_schedule).__module__,
    }


def _pipeline(pipelines: ModuleType, mesh: Any, schedule: str, layers_per_stage: int, loss: Any) -> Any:
    pipelines.torch = SimpleNamespace(device=lambda kind, index: torch.device("cpu"))  # it says "cuda" by name
    factory = pipelines.PipelineFactory
    generator = GPT2LLMStagesGenerator(LAYERS)
    staged = factory.get_staged_pipeline(_model(), generator, mesh, mesh.get_local_rank("pp"), schedule, layers_per_stage)
    return factory.get_scheduled_pipeline(loss, schedule, BATCH, BATCH // M, mesh["pp"].size(), staged)


def _trainer(mesh: Any, steps: int, publisher: Any, parts: list[torch.nn.Module]) -> Trainer:
    return Trainer(
        global_rank=dist.get_rank(),
        progress_publisher=publisher,
        evaluation_result_publisher=publisher,
        gradient_acc_steps=1,
        global_num_tokens_per_train_step=BATCH * LENGTH,
        device_mesh=mesh,
        num_seen_train_steps=0,
        global_num_seen_tokens=0,
        num_target_steps=steps,
        num_target_tokens=steps * BATCH * LENGTH,
        gradient_clipper=FSDP2GradientClipper(parts, 1.0, GradientClippingMode.P2_NORM, mesh),
        profiler=SteppableNoProfiler(),
    )


def _model() -> GPT2LLM:
    norm = LayerNormWrapperConfig(norm_type=LayerNorms.layer_norm, config=LayerNormConfig(normalized_shape=WIDTH))
    return GPT2LLM(
        sample_key="input_ids",
        prediction_key="logits",
        poe_type=PositionTypes.ABSOLUTE,
        sequence_length=LENGTH,
        vocab_size=WORDS,
        n_layer=LAYERS,
        n_head_q=4,
        n_head_kv=4,
        n_embd=WIDTH,
        ffn_hidden=WIDTH,
        dropout=0.0,
        bias=True,
        activation_type=ActivationType.GELU,
        attention_implementation=AttentionImplementation.PYTORCH_FLASH,
        attention_config=AttentionConfig(qkv_transforms=[]),
        attention_norm_config=norm,
        ffn_norm_config=norm,
        lm_head_norm_config=norm,
        use_weight_tying=False,
        seed=5,
    )
