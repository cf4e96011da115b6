"""The loss that a mixture of experts adds for its router reaches the gradients of all stages, as in a plain loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.partition.transformers import split_transformer
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

M, WORDS, COEFFICIENT = 4, 64, 0.5
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "tie_word_embeddings": False,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "one router a layer": ("Mixtral", {"num_local_experts": 4, "router_aux_loss_coef": COEFFICIENT}),
    "a first layer without one": (
        "Qwen3Moe",
        {"num_experts": 4, "head_dim": 8, "moe_intermediate_size": 8, "mlp_only_layers": [0], "router_aux_loss_coef": COEFFICIENT},
    ),
    "another name of the coefficient": (
        "JetMoe",
        {"num_local_experts": 4, "kv_channels": 8, "aux_loss_coef": COEFFICIENT, "num_key_value_heads": 1},
    ),
    "a shared expert": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "router_aux_loss_coef": COEFFICIENT,
        },
    ),
    "experts in one tensor": ("GptOss", {"num_local_experts": 4, "head_dim": 8, "router_aux_loss_coef": COEFFICIENT}),
}


def model_of(kind: str = "one router a layer", **options: Any) -> nn.Module:
    name, own = KINDS[kind]
    sizes = {key: value for key, value in SIZES.items() if not (name == "JetMoe" and key == "num_attention_heads")}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**sizes, **own, **options}))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    words, target = (torch.randint(4, WORDS, (2 * M, 5), generator=generator) for _ in range(2))
    mask = torch.ones(2 * M, 5, dtype=torch.long)
    mask[::2, -2:] = 0
    return words, target, mask


def alone(model: nn.Module, *, scale: float = 1 / M, is_added: bool = True, **kwargs: Any) -> dict[str, torch.Tensor | None]:
    """Gradients of a plain loop, by what the model itself adds."""
    coefficient = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", None)
    whole, target, mask = batch()
    for words, wanted, of_words in zip(whole.chunk(M), target.chunk(M), mask.chunk(M)):
        output = model(words, attention_mask=of_words, use_cache=False, **kwargs)
        loss = cross_entropy(output.logits, wanted)
        (scale * (loss + coefficient * output.aux_loss if is_added else loss)).backward()
    return {name: one.grad for name, one in model.named_parameters()}


def piped(
    model: nn.Module, make: Callable[..., Any] = bpipe.OneFOneB, per_rank: int = 1, num_stages: int = 4, **kwargs: Any
) -> dict[str, torch.Tensor | None]:
    words, target, mask = batch()
    parts, p = split_transformer(model, num_stages), num_stages // per_rank
    loopback = bpipe.Loopback(p)
    stages = [bpipe.PipelineStage(part, i, num_stages, "cpu", loopback.rank(i % p)) for i, part in enumerate(parts)]
    held = [stages[rank::p] for rank in range(p)]
    schedules = [make(own if per_rank > 1 else own[0], M, cross_entropy) for own in held]
    for one in model.parameters():
        one.grad = None
    loopback.step(schedules, words, target=target, attention_mask=mask, **kwargs)
    return {name: one.grad for name, one in model.named_parameters()}


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient is found[name] is None) or torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind: str) -> None:
    """The model's own loss, of the router's logits of all layers, on all stages."""
    model = model_of(kind)
    expected = alone(copy.deepcopy(model))
    assert_same(expected, piped(model))
    without = alone(copy.deepcopy(model), is_added=False)
    assert any(one is not None and not torch.equal(one, without[name]) for name, one in expected.items() if "layers.0" in name)


HOW: dict[str, dict[str, Any]] = {
    "one stage": {"num_stages": 1},
    "two stages on a rank": {"make": bpipe.Interleaved1F1B, "per_rank": 2},
    "gradients in two halves": {"make": bpipe.ZBH1},
    "evicted": {"make": lambda *args: bpipe.Balanced(bpipe.OneFOneB(*args), budget=None)},
    "recomputed": {"make": lambda *args: bpipe.Balanced(bpipe.GPipe(*args), budget=None, by="recompute")},
    "in bytes": {"make": lambda *args: bpipe.Balanced(bpipe.OneFOneB(*args), budget="lowest")},
    "asked in the step": {"output_router_logits": True},
}


@pytest.mark.parametrize("how", HOW)
def test_ways_to_run(how: str) -> None:
    model = model_of(output_router_logits="output_router_logits" not in HOW[how])
    assert_same(alone(copy.deepcopy(model), output_router_logits=True), piped(model, **HOW[how]))


def test_left_out_in_the_step() -> None:
    """What a call says comes before the configuration."""
    model = model_of()
    assert_same(alone(copy.deepcopy(model), is_added=False), piped(model, output_router_logits=False))


def test_a_sum_over_microbatches() -> None:
    """With scale_grads=False the router's loss is not divided either."""
    model = model_of()
    expected = alone(copy.deepcopy(model), scale=1.0)
    assert_same(expected, piped(model, lambda *args: bpipe.OneFOneB(*args, scale_grads=False)))


def test_a_router_that_is_frozen() -> None:
    model = model_of()
    for name, one in model.named_parameters():
        one.requires_grad_("gate" not in name)
    assert_same(alone(copy.deepcopy(model)), piped(model))


def test_checkpoints_inside() -> None:
    model = model_of()
    expected = alone(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    assert_same(expected, piped(model))


@pytest.mark.parametrize("when", ["before the split", "after the split", "between steps"])
def test_the_whole_model_has_run_too(when: str) -> None:
    """It leaves hooks on the layers, which stages share, so that logits are recorded twice."""
    model = model_of()
    expected = alone(copy.deepcopy(model))
    if when == "before the split":
        alone(model)
    parts = split_transformer(model, 2)
    loopback = bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(part, i, 2, "cpu", loopback.rank(i)) for i, part in enumerate(parts)]
    schedules = [bpipe.OneFOneB(stage, M, cross_entropy) for stage in stages]
    words, target, mask = batch()
    if when == "between steps":
        loopback.step(schedules, words, target=target, attention_mask=mask)
    if when != "before the split":
        alone(model)
    for one in model.parameters():
        one.grad = None
    loopback.step(schedules, words, target=target, attention_mask=mask)
    assert_same(expected, {name: one.grad for name, one in model.named_parameters()})


def test_an_evaluation_and_its_losses() -> None:
    """They are those of the words."""
    model, losses = model_of().eval(), []
    parts, loopback = split_transformer(model, 2), bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(part, i, 2, "cpu", loopback.rank(i)) for i, part in enumerate(parts)]
    schedules = [bpipe.OneFOneB(stage, M, cross_entropy) for stage in stages]
    words, target, mask = batch()
    with torch.no_grad():
        whole = [model(*one, use_cache=False).logits for one in zip(words.chunk(M), mask.chunk(M))]
    found = loopback.eval(schedules, words, target=target, attention_mask=mask, losses=losses)
    assert torch.equal(found, torch.cat(whole))
    assert losses == [cross_entropy(*one) for one in zip(whole, target.chunk(M))]


def as_rank(rank: int) -> dict[str, torch.Tensor | None]:
    part = split_transformer(model_of(), 2)[rank]
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, cross_entropy)
    words, target, mask = batch()
    schedule.step(input_ids=words, target=target, attention_mask=mask)
    schedule.close()
    return {name: one.grad for name, one in part.named_parameters()}


def test_over_processes_with_words_by_name() -> None:
    first, last = run_ranks(as_rank, 2)
    assert_same(alone(model_of()), {name: {**first, **last}[name] for name, _ in model_of().named_parameters()})


def test_what_cannot_be_added_is_refused() -> None:
    words = batch()[0]
    first, last = split_transformer(model_of(), 2)
    hidden, logits = first(words)
    assert len(logits) == 2
    with pytest.raises(ConfigurationError, match="output_router_logits reaches some stages of MixtralForCausalLM only"):
        last(hidden, output_router_logits=True)
    with pytest.raises(ConfigurationError, match="output_router_logits reaches some stages of MixtralForCausalLM only"):
        last(hidden, logits, output_router_logits=False)
    with pytest.raises(ConfigurationError, match="takes input_ids once, as its only positional argument or by name"):
        first(words, logits)
    with pytest.raises(ConfigurationError, match=r"MixtralModel cannot be cut.*output_router_logits=True in its configuration"):
        split_transformer(model_of().model, 2)
    with pytest.raises(ConfigurationError, match="cannot take slices with output_router_logits, because the router's loss is of"):
        bpipe.slices.sliced_transformer(first)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "output_router_logits": False}))
    with pytest.raises(ConfigurationError, match="does not take output_router_logits: the model computes no loss of its router"):
        split_transformer(llama, 2)[0](words, output_router_logits=True)


def test_a_split_is_proven_with_the_routers_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that dropped it would have other gradients than the small model."""
    from bpipe.partition import stage_class

    monkeypatch.setattr(stage_class, "plain", lambda model, output: output["logits"])
    stage_class.stage_class.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="gets another gradient"):
            split_transformer(model_of(), 2)
    finally:
        stage_class.stage_class.cache_clear()
