"""What a dry run says of models of Transformers is what their first step takes, padded batches included."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import bpipe
from tests.partition.sweep.classes import class_of, small
from tests.prediction.test_dry_run import is_proven

P, M, TOKENS = 2, 2, 8
CLASSES = [
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "BloomForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "ModernBertForMaskedLM",
    "Olmo2ForCausalLM",
    "OlmoForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "RobertaForMaskedLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
]

PADDED = [  # with masks of other kinds: of two directions, as a bias, sliding, with sinks
    *("LlamaForCausalLM", "BertForMaskedLM", "RobertaForMaskedLM", "BloomForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "MistralForCausalLM", "ModernBertForMaskedLM"),
]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, is_padded", [*product(CLASSES, [False]), *product(PADDED, [True])])
def test_the_first_step_takes_what_was_predicted(name: str, is_padded: bool) -> None:
    parts, loopback = bpipe.split_transformer(small(class_of(name)).train(), P), bpipe.Loopback(P)
    schedules = [
        bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(part, i, P, "cpu", loopback.rank(i)), M, loss_fn=loss_of), "lowest")
        for i, part in enumerate(parts)
    ]
    words = torch.randint(3, 60, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(words)
    if is_padded:
        mask[:, -3:] = 0
    loopback.step(schedules, words, target=words, attention_mask=mask, return_outputs=False)
    assert [one.session.source._dry_run.failure for one in schedules] == ["", ""]
    assert all(map(is_proven, schedules))
