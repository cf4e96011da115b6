"""Transformers models in slices: the gradients of whole sequences, with positions, padding and windows; the others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B
from bpipe.errors import ConfigurationError, StageError
from bpipe.slices import UpTo, sliced_transformer
from tests.over import nested
from tests.slices.test_run import furthest, taken

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 5},
    "GPT2": {"vocab_size": 37, "n_embd": 32, "n_layer": 4, "n_head": 4, **NO_DROPOUT},
    "Gemma2": {**GROUPED, "head_dim": 8},
    "Mamba": {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 4},
}


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**MODELS[name], **more})
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{head}")(config).double().train()


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def words_of(num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of words, and the words to be predicted."""
    return tuple(torch.randint(0, 37, (2, num_sequences, 12), generator=torch.Generator().manual_seed(1)))  # type: ignore[return-value]


def by_itself(model: Any, words: torch.Tensor, target: torch.Tensor, m: int = 2) -> list[torch.Tensor]:
    """Return the gradients of whole sequences in a single process."""
    for some, of_some in zip(words.chunk(m), target.chunk(m)):
        (loss_of(model(input_ids=some).logits, of_some) / m).backward()
    return taken([model])


def stepped(model: Any, words: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, **options: Any) -> None:
    """Run a step of the model in two stages and three slices."""
    loopback = Loopback(2)
    stages = [
        PipelineStage(sliced_transformer(part), i, 2, "cpu", loopback.rank(i))
        for i, part in enumerate(bpipe.split_transformer(model, 2))
    ]
    options = {"slices": 3, **nested({"kwargs_slice_spec": {"attention_mask": UpTo(1)}, **options})}
    loopback.step([Seq1F1B(stage, 2, loss_fn=loss_of, **options) for stage in stages], words, target=target, attention_mask=mask)


@pytest.mark.parametrize("side", ["", "right", "left"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral", "GPT2"])
def test_models(name: str, side: str) -> None:
    model, generator = model_of(name), torch.Generator().manual_seed(1)
    words, target = torch.randint(0, 37, (2, 4, 12), generator=generator)
    mask = torch.ones(4, 12, dtype=torch.long)
    if side:
        rows = slice(9, None) if side == "right" else slice(0, 3)
        mask[0, rows] = mask[3, rows] = 0
        target[mask == 0] = -100
    for some, of_some, padding in zip(words.chunk(2), target.chunk(2), mask.chunk(2)):
        (loss_of(model(input_ids=some, attention_mask=padding).logits, of_some) / 2).backward()
    expected = {path: parameter.grad for path, parameter in model.named_parameters()}
    model.zero_grad()
    stepped(model, words, target, mask, slice_lengths=[5, 4, 3])
    for path, parameter in model.named_parameters():
        assert float((parameter.grad - expected[path]).abs().max() / expected[path].abs().max()) < 1e-12, path


def test_single_precision() -> None:
    """Positions, rotary embeddings and the loss are in single precision, too."""
    model, (words, target) = model_of("Llama").float(), words_of(4)
    expected = by_itself(model, words, target)
    stepped(model, words, target, torch.ones_like(words), slice_lengths=[5, 4, 3])
    assert furthest(taken([model]), expected) < 2e-6


@pytest.mark.usefixtures("one_thread")
def test_one_slice_is_1f1b_to_the_bit() -> None:
    model, (words, target) = model_of("Llama"), words_of(4)
    parts = bpipe.split_transformer(model, 2)
    found = []
    for rule, modules, options in ((bpipe.OneFOneB, parts, {}), (Seq1F1B, [*map(sliced_transformer, parts)], {"slices": 1})):
        loopback, losses = Loopback(2), []
        stages = [PipelineStage(module, i, 2, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
        loopback.step([rule(stage, 4, loss_fn=loss_of, **options) for stage in stages], words, target=target, losses=losses)
        found.append([*losses, *taken([model])])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "name, more, told",
    [
        ("Gemma2", {}, "attention over slices has no softcap"),
        ("Mamba", {}, "MambaForCausalLM cannot take slices: .* has layers besides attention that mix positions"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"rotary embeddings .* \(dynamic\)",
        ),
        ("GPT2", {"attn_pdrop": 0.1}, "attention over slices has no dropout: set attention_dropout to 0"),
        ("GPT2", {"resid_pdrop": 0.1}, r"drew random numbers in its forward \(dropout\?\)"),
    ],
)
def test_models_that_are_refused(name: str, more: dict[str, Any], told: str) -> None:
    words = torch.ones(4, 12, dtype=torch.long)
    with pytest.raises((StageError, ConfigurationError), match=told):
        stepped(model_of(name, **more), words, words, words)


def test_a_mask_that_is_cut_like_words() -> None:
    words = torch.ones(4, 12, dtype=torch.long)
    with pytest.raises(
        StageError, match=r"an attention_mask of 4 positions came with a slice that ends at 8: give Options\(kwargs_slice_spec"
    ):
        stepped(model_of("Llama"), words, words, words, kwargs_slice_spec=None)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences(name: str) -> None:
    """Positions that begin again say where a document does; each computes what it does by itself."""
    model, generator = model_of(name), torch.Generator().manual_seed(1)
    words, target = torch.randint(0, 37, (2, 2, 12), generator=generator)
    lengths = [[5, 3, 4], [2, 9, 1]]
    positions = torch.stack([torch.cat([torch.arange(length) for length in of_row]) for of_row in lengths])
    for row, of_row in enumerate(lengths):
        parts = zip(words[row].split(of_row), target[row].split(of_row))
        losses = [loss_of(model(input_ids=one[None]).logits, other[None]) * len(one) for one, other in parts]
        (sum(losses) / words.numel()).backward()
    expected = {path: parameter.grad for path, parameter in model.named_parameters()}
    model.zero_grad()
    loopback = Loopback(2)
    stages = [
        PipelineStage(sliced_transformer(part), i, 2, "cpu", loopback.rank(i))
        for i, part in enumerate(bpipe.split_transformer(model, 2))
    ]
    schedules = [Seq1F1B(stage, 2, loss_fn=loss_of, slices=3, options=bpipe.Options(slice_lengths=[6, 4, 2])) for stage in stages]
    loopback.step(schedules, words, target=target, position_ids=positions)
    for path, parameter in model.named_parameters():
        assert float((parameter.grad - expected[path]).abs().max() / expected[path].abs().max()) < 1e-12, path


def test_positions_that_some_slices_lack() -> None:
    module = sliced_transformer(model_of("Llama", num_hidden_layers=1), prove=False)
    words = torch.ones(1, 4, dtype=torch.long)
    _, state = module(words)
    with pytest.raises(StageError, match="got position_ids with a slice, and none with an earlier one"):
        module(words, past=(state,), position_ids=torch.arange(4)[None])
    with pytest.raises(StageError, match=r"position_ids \[3, 1, 4\] that do not go on"):
        module(words, position_ids=torch.tensor([0, 1, 0, 1]).expand(3, 1, 4))
    with pytest.raises(StageError, match="attention over slices has no cu_seq_lens_q"):
        module(words, cu_seq_lens_q=torch.tensor([0, 2, 4]))


def test_checkpointing_in_a_stage() -> None:
    model = model_of("Llama", num_hidden_layers=1)
    model.activation_checkpointing_enable()
    with pytest.raises(ConfigurationError, match=r"with gradient checkpointing: use bpipe\.Balanced\(schedule, by='recompute'\)"):
        sliced_transformer(model)
    model.activation_checkpointing_disable()
    attention = model.model.layers[0].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **kwargs: checkpoint(inner, *args, **kwargs, use_reentrant=False)
    words = torch.ones(1, 6, dtype=torch.long)
    output, _ = sliced_transformer(model)(words)
    with pytest.raises(StageError, match="runs again in a backward, where it has no earlier slices"):
        output.logits.sum().backward()


def test_convolutions_over_positions() -> None:
    stage = nn.Module()
    stage.conv = nn.Conv1d(2, 2, 3)
    with pytest.raises(ConfigurationError, match="conv has layers besides attention that mix positions"):
        sliced_transformer(stage)


def test_without_slices_a_stage_computes_what_it_did() -> None:
    model = model_of("Llama")
    words = torch.arange(12).view(1, 12)
    expected = model(input_ids=words).logits
    stages = [sliced_transformer(part) for part in bpipe.split_transformer(model, 2)]
    assert torch.equal(stages[1].stage(stages[0].stage(words)), expected)
    assert torch.equal(model(input_ids=words).logits, expected)
