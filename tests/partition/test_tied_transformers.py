"""Twelve tied models of Transformers, cut or built by hand, on 2 and 4 processes: a plain loop trains them as one process does."""

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
LAYERS, SMALL = 4, 8
SIZES = {"hidden_size": SMALL, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
ONE_KEY = {**SIZES, "num_key_value_heads": 1}
OF_GPT2 = {"n_embd": SMALL, "n_head": 2, "n_layer": LAYERS, "n_positions": TOKENS}
OF_OPT = {"hidden_size": SMALL, "ffn_dim": 8, "num_attention_heads": 2, "num_hidden_layers": LAYERS, "word_embed_proj_dim": SMALL}
OF_BLOOM = {"hidden_size": SMALL, "n_layer": LAYERS, "n_head": 2}
OF_FALCON = {"hidden_size": SMALL, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
DOORS: dict[tuple[str, int], dict[str, dict[str, Any]]] = {
    ("split_transformer", 2): {"BloomForCausalLM": OF_BLOOM, "BertForMaskedLM": SIZES},
    ("split_transformer", 4): {"Gemma2ForCausalLM": {**ONE_KEY, "head_dim": 8, "sliding_window": 3}, "OPTForCausalLM": OF_OPT},
    ("own stages", 2): {"GPT2LMHeadModel": OF_GPT2, "MistralForCausalLM": ONE_KEY},
    ("own stages", 4): {"LlamaForCausalLM": ONE_KEY, "Starcoder2ForCausalLM": ONE_KEY},
    ("auto", 2): {"CohereForCausalLM": ONE_KEY, "GPTNeoXForCausalLM": SIZES},
    ("auto", 4): {"OlmoForCausalLM": ONE_KEY, "FalconForCausalLM": OF_FALCON},
}
CASES = [(name, *how, sizes) for how, models in DOORS.items() for name, sizes in models.items()]


def model_of(name: str, sizes: dict[str, Any]) -> nn.Module:
    cls = getattr(transformers, name)
    config = cls.config_class(**sizes, vocab_size=WORDS, bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    model: nn.Module = cls(config).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
    return model.train()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(3, WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class OwnStage(nn.Module):
    """A stage as people build one: the model without what other stages have, which gets what the layers before it return."""

    def __init__(self, model: Any, stage: int, num_stages: int) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        body, size = self.model.base_model, LAYERS // num_stages
        blocks, norm = ("h", "ln_f") if hasattr(body, "h") else ("layers", "norm")
        setattr(body, blocks, getattr(body, blocks)[stage * size : (stage + 1) * size])
        body.config.num_hidden_layers = size
        self.takes, self.gives = ("input_ids" if stage == 0 else "inputs_embeds"), "last_hidden_state"
        if stage > 0:
            body.set_input_embeddings(None)
        if stage < num_stages - 1:
            setattr(body, norm, nn.Identity())
            self.model.lm_head = None
        if stage > 0 and hasattr(body, "wpe"):
            body.wpe = Zeros()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model.base_model(**{self.takes: x}, use_cache=False)[0]
        return x if self.model.lm_head is None else self.model.lm_head(x)


class Zeros(nn.Module):
    """In place of an embedding of positions, which the first stage has added."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*positions.shape, SMALL, dtype=torch.float64)


def schedule_of(name: str, door: str, sizes: dict[str, Any], rank: int, num_ranks: int) -> Any:
    model = model_of(name, sizes)
    if door == "auto":
        x, y = batch(0)
        how: Any = {"microbatch_sizes": [ROWS // M], "stages_per_rank": [1], "options": bpipe.Options(effort=0)}
        return bpipe.auto(model, x, loss_of, target=y, **how)
    if door == "own stages":
        part: nn.Module = OwnStage(model, rank, num_ranks)
    else:
        part = bpipe.split_transformer(model, num_ranks, prove=False)[rank]
    return bpipe.BalancedOneFOneB(bpipe.PipelineStage(part, rank, num_ranks, "cpu"), M, loss_fn=loss_of)


def trained(rank: int, num_ranks: int, *how: Any) -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    schedule = schedule_of(*how, rank, num_ranks)
    [part] = schedule.modules if how[1] == "auto" else schedule.session.context.modules()
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        schedule.step(x, target=y, return_outputs=False)
        optimizer.step()
    schedule.close()
    return {name: one.detach().clone() for name, one in part.named_parameters()}


def alone(name: str, sizes: dict[str, Any]) -> list[torch.Tensor]:
    model = model_of(name, sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(one.chunk(M) for one in batch(step))):
            (loss_of(model(x), y) / M).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize(("name", "door", "num_ranks", "sizes"), CASES)
def test_a_tied_model_trains_as_in_one_process(name: str, door: str, num_ranks: int, sizes: dict[str, Any]) -> None:
    """Each weight of a rank is one of the single process's, and the shared one is on two ranks."""
    expected, ranks = alone(name, sizes), run_ranks(trained, num_ranks, num_ranks, name, door, sizes)
    found = [weight for rank in ranks for weight in rank.values()]
    assert len(found) > len(expected)
    for weight in found:
        alike = [one for one in expected if one.shape == weight.shape]
        assert min((one - weight).abs().max().item() for one in alike) < 1e-12
