"""A rank of Accelerate's pipelined inference on CPU: `prepare_pippy` on a Transformers model with random weights."""

from __future__ import annotations

from typing import Any

import accelerate.inference
import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainers import cpu
from tests.trainers.changed_import import load_changed

LAYERS, WORDS = 4, 64


def infer(rank: int, way: str, batch: int = 4) -> dict[str, Any]:
    """Return the logits, on the last rank, and those of the model in one process."""
    cpu.leave_group()
    PartialState(cpu=True)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=LAYERS, use_cache=False, **sizes)).eval()
    words = torch.randint(WORDS, (batch, 8))
    with torch.no_grad():
        whole = model(words).logits
        module = accelerate.inference if way == "torch" else load_changed("accelerate.inference")
        piped = module.prepare_pippy(model, split_points=["model.layers.2"], example_args=(words[:2],))
        logits = piped(words)
    return {"logits": logits, "whole": whole, "class": type(model.pippy_stage).__module__}
