"""Tied models of Transformers, cut or built by hand, on 2 and 4 processes: a plain loop trains them as one process does.

`bpipe.auto` cuts by the same functions; its tied models are in `test_tied_stages.py` and `tests/foreign/test_tied_parts.py`.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()

pytestmark = pytest.mark.usefixtures("one_thread")

M, ROWS, TOKENS, WORDS, STEPS = 4, 8, 5, 11, 20
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": WORDS, "num_hidden_layers": 4}
OF_GPT2 = {"n_embd": 8, "n_head": 2, "n_layer": 4, "n_positions": TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**OF_GPT2, "vocab_size": WORDS}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 3}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 8, "n_layer": 4, "n_head": 2, "vocab_size": WORDS}),
    "olmo": ("OlmoForCausalLM", {**SIZES, "num_key_value_heads": 1}),
}
CASES = (
    ("gpt2", "split_transformer", 2),
    ("gpt2", "own stages", 4),
    ("llama", "split_transformer", 4),
    ("qwen2", "split_transformer", 2),
    ("gemma2", "split_transformer", 4),
    ("bloom", "split_transformer", 2),
    ("olmo", "split_transformer", 4),
    ("gpt2", "own stages", 2),
)


def model_of(kind: str) -> nn.Module:
    name, sizes = KINDS[kind]
    cls = getattr(transformers, name)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    torch.manual_seed(0)
    model: nn.Module = cls(cls.config_class(**sizes, **special, tie_word_embeddings=True)).double().train()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(3, WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class OwnStage(nn.Module):
    """A stage of GPT-2 as people build one: the model without what other stages have."""

    def __init__(self, model: Any, stage: int, num_stages: int) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        size, body = 4 // num_stages, self.model.transformer
        body.h = nn.ModuleList(body.h[stage * size : (stage + 1) * size])
        if stage > 0:
            body.wte = body.wpe = None
        if stage < num_stages - 1:
            body.ln_f = self.model.lm_head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.model.transformer
        if body.wte is not None:
            x = body.wte(x) + body.wpe.weight[: x.shape[1]]
        for block in body.h:
            found = block(x)
            x = found[0] if isinstance(found, tuple) else found
        return x if self.model.lm_head is None else self.model.lm_head(body.ln_f(x))


def schedule_of(kind: str, door: str, rank: int, num_ranks: int) -> bpipe.Schedule:
    model = model_of(kind)
    if door == "own stages":
        part: nn.Module = OwnStage(model, rank, num_ranks)
    else:
        part = bpipe.split_transformer(model, num_ranks, prove=False)[rank]
    return bpipe.BalancedOneFOneB(bpipe.PipelineStage(part, rank, num_ranks, "cpu"), M, loss_fn=loss_of)


def trained(rank: int, num_ranks: int, kind: str, door: str) -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    schedule = schedule_of(kind, door, rank, num_ranks)
    [part] = schedule.session.context.modules()
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        schedule.step(x, target=y, return_outputs=False)
        optimizer.step()
    schedule.close()
    return {name: one.detach().clone() for name, one in part.named_parameters()}


def alone(kind: str) -> list[torch.Tensor]:
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(one.chunk(M) for one in batch(step))):
            (loss_of(model(x, use_cache=False), y) / M).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize(("kind", "door", "num_ranks"), CASES)
def test_a_tied_model_trains_as_in_one_process(kind: str, door: str, num_ranks: int) -> None:
    """Each weight of a rank is one of the single process's, and the shared one is on two ranks."""
    expected, ranks = alone(kind), run_ranks(trained, num_ranks, num_ranks, kind, door)
    found = [weight for rank in ranks for weight in rank.values()]
    assert len(found) == len(expected) + 1
    for weight in found:
        alike = [one for one in expected if one.shape == weight.shape]
        assert min((one - weight).abs().max().item() for one in alike) < 1e-12
