"""Hugging Face Transformers in a pipeline: small random models, nothing downloaded, gradients of a single process."""

from __future__ import annotations

import copy
import pickle
import warnings
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.partition.transformers import split_transformer, transformer_layers
from tests.over import Over
from tests.partition.models import assert_equal, cross_entropy, gradients_alone, gradients_piped
from tests.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()

pytestmark = pytest.mark.usefixtures("one_thread")

M, ROWS, TOKENS, WORDS = 4, 8, 6, 31
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": WORDS}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": WORDS, "n_positions": 16}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "bert": ("BertForMaskedLM", SIZES),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 3}),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 3}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 4, "n_head": 2, "vocab_size": WORDS}),  # layers return tuples
}
NO_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_probs_dropout_prob", "hidden_dropout_prob")


def model_of(kind: str) -> nn.Module:
    name, sizes = KINDS[kind]
    cls = getattr(transformers, name)
    config = cls.config_class(**sizes, **SPECIAL, **({"max_window_layers": 2} if kind == "qwen2" else {}))
    for dropout in NO_DROPOUT:  # draws are in another order when stages take turns
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    torch.manual_seed(0)
    model: nn.Module = cls(config).train()
    return model


class Logits(nn.Module):
    """The model's logits alone, without a cache, whose layout rounds otherwise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.model(x, use_cache=False, **kwargs).logits


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[::2, -2:] = 0
    x, y = (torch.randint(3, WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2))
    return {"x": x, "y": y, "attention_mask": mask, "position_ids": torch.arange(TOKENS).flip(0).repeat(ROWS, 1)}


def kwargs_for(kind: str) -> dict[str, torch.Tensor]:
    return {k: v for k, v in inputs().items() if k == "attention_mask" or (k == "position_ids" and kind != "bloom")}


def expected_of(kind: str, model: nn.Module) -> dict[str, torch.Tensor]:
    found = gradients_alone(Logits(model), M, inputs()["x"], inputs()["y"], **kwargs_for(kind))
    return {name.removeprefix("model."): gradient for name, gradient in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_names_and_keyword_arguments(kind: str) -> None:
    """Positions and a mask are given, which every stage needs."""
    model = model_of(kind)
    x, y, kwargs = inputs()["x"], inputs()["y"], kwargs_for(kind)
    parts = split_transformer(model, 4)
    bpipe.check_split(model, parts, x, **kwargs)
    assert {name for part in parts for name in part.state_dict()} == set(model.state_dict())
    assert [type(part).__name__ for part in parts] == [type(model).__name__] * 4
    assert all(isinstance(part, type(model)) for part in parts)
    tied = {id(one) for one in parts[0].parameters()} & {id(one) for one in parts[-1].parameters()}
    assert len(tied) == (kind not in ("llama", "qwen2"))
    expected, found = expected_of(kind, model), gradients_piped(parts, M, x, y, **kwargs)
    untied = [name for name, parameter in model.named_parameters() if id(parameter) not in tied]
    for name in {name for name, parameter in model.named_parameters()} - set(untied):
        # The first stage adds all its lookups to what the last one has added; one process adds both by microbatch.
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert_equal({name: expected[name] for name in untied}, {name: found[name] for name in untied})


def test_checkpointing_turned_on_before_the_split_and_balance_in_bytes() -> None:
    model = model_of("bert")
    expected = expected_of("bert", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    parts, runs = split_transformer(model, 4), []
    model.bert.encoder.layer[1].attention.register_forward_hook(lambda *_: runs.append(1))
    in_bytes = Over(bpipe.OneFOneB, {"budget": "lowest"})
    found = gradients_piped(parts, M, inputs()["x"], inputs()["y"], in_bytes, **kwargs_for("bert"))
    assert len(runs) == 2 * M  # each microbatch again in its backward
    tied = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(found.pop(tied), expected.pop(tied), rtol=1e-4, atol=1e-6)  # another order of sums
    del found["cls.predictions.decoder.weight"]  # the same one
    assert_equal(expected, found)


def test_dropout_is_drawn_as_in_the_whole_model() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**KINDS["gpt2"][1], **SPECIAL)).train()
    assert model.transformer.drop.p > 0
    bpipe.check_split(model, split_transformer(model, 4), inputs()["x"])


def test_two_uses_of_a_weight_are_two_gradients_to_sum() -> None:
    """As in two processes: each with a weight of its own, whose gradients are summed by hand."""
    model = model_of("gpt2")
    expected = expected_of("gpt2", model)["transformer.wte.weight"]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found = gradients_piped(split_transformer(model, 4), M, inputs()["x"], inputs()["y"], **kwargs_for("gpt2"))
    summed = found["transformer.wte.weight"] + found["lm_head.weight"]
    torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-6)  # another order of sums


def as_rank(rank: int) -> dict[str, torch.Tensor]:
    part = split_transformer(model_of("llama"), 2)[rank]
    schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=cross_entropy)
    schedule.step(inputs()["x"], target=inputs()["y"], **kwargs_for("llama"))
    schedule.close()
    return {name: parameter.grad for name, parameter in part.named_parameters()}


def test_over_gloo() -> None:
    first, last = run_ranks(as_rank, 2)
    assert_equal(expected_of("llama", model_of("llama")), {**first, **last})


def test_cut_by_measured_layers_and_by_numbers_of_layers() -> None:
    model = model_of("llama")
    groups = transformer_layers(model)
    assert groups == [("model.embed_tokens",), *((f"model.layers.{i}",) for i in range(4)), ("model.norm", "lm_head")]
    layers = bpipe.measure_layers(model, inputs()["x"], layers=groups)
    choice = bpipe.choose_stages(layers, 3, 6)
    bpipe.check_split(model, split_transformer(model, choice.stages), inputs()["x"])
    assert [len(part.model.layers) for part in split_transformer(model, [2, 1, 1])] == [2, 1, 1]
    bpipe.check_split(model, split_transformer(model, 1), inputs()["x"])


def test_a_model_without_a_head_and_one_on_meta() -> None:
    cls = transformers.BertModel
    model = cls(transformers.BertConfig(**SIZES))
    bpipe.check_split(model, split_transformer(model, 2), inputs()["x"])
    with torch.device("meta"):
        parts = split_transformer(transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4)), 2)
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())


NAME_OF_CACHE = "cache" if "cache" in signature(transformers.LlamaModel.forward).parameters else "past_key_values"  # before 5.24


def test_nothing_is_cached() -> None:
    caches: list[Any] = []
    model = model_of("llama")
    assert model.config.use_cache
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: caches.append(kwargs[NAME_OF_CACHE]), with_kwargs=True)
    gradients_piped(split_transformer(model, 2), M, inputs()["x"], inputs()["y"])
    assert caches == [None] * (4 * M)


def test_what_a_stage_does_not_take() -> None:
    part = split_transformer(model_of("llama"), 2)[0]
    with pytest.raises(ConfigurationError, match="a stage of LlamaForCausalLM does not take labels: give them to the schedule"):
        part(inputs()["x"], labels=inputs()["y"])


@pytest.mark.parametrize(
    "option",
    [
        {"output_hidden_states": True},
        {"output_hidden_states": [1, -1]},  # some of them
        {"output_attentions": True},
        {"output_indices": True},  # of any kind
        {"return_dict": False},
        {"use_cache": True},
        {"next_sentence_label": torch.ones(2)},
        {"mc_labels": torch.ones(2)},
    ],
)
def test_an_option_that_would_be_dropped_is_refused_by_name(option: dict[str, Any]) -> None:
    """On every stage, before it computes; what asks for what a stage does anyway is taken."""
    parts, ((name, value),) = split_transformer(model_of("llama"), 2), option.items()
    hidden = parts[0](inputs()["x"])
    for part, given in zip(parts, (inputs()["x"], hidden)):
        with pytest.raises(ConfigurationError, match=f"a stage of LlamaForCausalLM does not take {name}: "):
            part(given, **option)
        plain = {name: None if isinstance(value, torch.Tensor) else name == "return_dict"}
        assert torch.equal(part(given, **plain), part(given))


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "return_dict"])
def test_a_configuration_that_asks_for_what_a_stage_drops(name: str) -> None:
    model = model_of("llama")
    model.set_attn_implementation("eager")
    setattr(model.config, name, name != "return_dict")
    with pytest.raises(ConfigurationError, match=f"LlamaForCausalLM cannot be cut by split_transformer with {name}=.* in its conf"):
        split_transformer(model, 2)


@pytest.mark.parametrize("how", ["by name", "by name, each microbatch", "by position", "evaluated by name", "two stages on a rank"])
def test_words_by_name(how: str) -> None:
    """Every rank may give them, as it does the other arguments; only the first stage takes them."""
    model, x, y = model_of("llama"), inputs()["x"], inputs()["y"]
    per_rank, expected = 2 if how == "two stages on a rank" else 1, expected_of("llama", model)
    for one in model.parameters():
        one.grad = None
    parts, p = split_transformer(model, 4), 4 // per_rank
    loopback = bpipe.Loopback(p)
    stages = [bpipe.PipelineStage(part, i, 4, "cpu", loopback.rank(i % p)) for i, part in enumerate(parts)]
    held, kwargs = [stages[rank::p] for rank in range(p)], kwargs_for("llama")
    schedules = [
        bpipe.OneFOneB(own[0], M, cross_entropy) if per_rank == 1 else bpipe.Interleaved1F1B(own, M, cross_entropy) for own in held
    ]
    if how == "evaluated by name":
        assert torch.equal(loopback.eval(schedules, input_ids=x, **kwargs), loopback.eval(schedules, x, **kwargs))
        return
    if how == "by name, each microbatch":
        cut = zip(*(one.chunk(M) for one in (x, *kwargs.values())))
        each = [dict(zip(("input_ids", *kwargs), of_one)) for of_one in cut]
        loopback.step(schedules, kwarg_mbs=each, target=y)
    else:
        args, words = ((x,), {}) if how == "by position" else ((), {"input_ids": x})
        loopback.step(schedules, *args, target=y, **kwargs, **words)
    assert_equal(expected, {name: one.grad for name, one in model.named_parameters()})


def test_words_twice_or_never_are_refused() -> None:
    first, second = split_transformer(model_of("llama"), 2)
    words = inputs()["x"]
    for args, kwargs in (((words,), {"input_ids": words}), ((), {}), ((), {"attention_mask": words}), ((words, words), {})):
        with pytest.raises(ConfigurationError, match="the first stage of LlamaForCausalLM takes input_ids once"):
            first(*args, **kwargs)
    assert torch.equal(second(first(words), input_ids=words), second(first(words)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_stage_is_copied_and_pickled_as_any_module(copied: Any) -> None:
    for part in split_transformer(model_of("llama"), 2):
        again = copied(part)
        given = inputs()["x"] if hasattr(part.model.embed_tokens, "weight") else torch.ones(2, 3, 16)
        assert torch.equal(again(given), part(given)) and type(again) is type(part)
        assert all(torch.equal(one, again.state_dict()[name]) for name, one in part.state_dict().items())


def test_a_head_without_logits_is_refused() -> None:
    """The second of its two outputs would be lost, and its weights would never learn."""
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES))
    with pytest.raises(ConfigurationError, match="BertForQuestionAnswering returns start_logits and end_logits, and a last stage"):
        split_transformer(model, 2)


@pytest.mark.parametrize(("kind", "way"), [("gpt2", "Cut it with bpipe.split_transformer"), ("vit", "let torch's tracer cut")])
def test_what_torch_fx_cannot_trace_is_cut_here_if_it_can_be(kind: str, way: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = model_of(kind) if kind == "gpt2" else transformers.ViTModel(transformers.ViTConfig(**sizes))
    with pytest.raises(ConfigurationError, match=rf"cannot trace the forward of {type(model).__name__}: a decorator wraps.*{way}"):
        bpipe.split_traced(model, [[name] for name, _ in model.named_children()])


def test_what_cannot_be_cut() -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    t5 = transformers.T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2, vocab_size=9)
    for model, message in (
        (nn.Linear(2, 2), "it is not a model of transformers"),
        (transformers.T5ForConditionalGeneration(t5), "it has an encoder and a decoder"),
        (transformers.ViTModel(transformers.ViTConfig(**small)), "its forward takes no inputs_embeds"),
        (transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=8)), "has 0 lists of 4 layers"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            split_transformer(model, 2)
    with pytest.raises(ConfigurationError, match="a stage is a list of names, got the text 'model"):
        split_transformer(model_of("llama"), ["model.norm", "lm_head"])
    with pytest.raises(ConfigurationError, match="4 layers do not fill 5 stages"):
        split_transformer(model_of("llama"), 5)


# The proof


def xglm(dropout: float) -> nn.Module:
    sizes = {"d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2, "vocab_size": WORDS}
    rest = {"attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
    model: nn.Module = transformers.XGLMForCausalLM(transformers.XGLMConfig(**sizes, **rest, dropout=dropout)).eval()
    return model


def test_what_a_forward_does_outside_of_its_modules_is_caught() -> None:
    """XGLM drops out by a function in its forward, which every stage would do again: in train mode, whatever it is in now."""
    with pytest.raises(ConfigurationError, match="XGLMForCausalLM cannot be cut by split_transformer: in a small model of its"):
        split_transformer(xglm(0.5), 2)
    model = xglm(0.0).train()
    bpipe.check_split(model, split_transformer(model, 2), inputs()["x"])


SMALL_T5 = {"d_model": 16, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 90}
WRONG: dict[str, tuple[Any, str]] = {
    "scaled, and positions added": (
        lambda: transformers.CTRLModel(transformers.CTRLConfig(n_embd=16, dff=16, n_layer=3, n_head=2, vocab_size=90)),
        "CTRLModel .* output 0 differs by up to",
    ),
    "a bias of the first layer": (
        lambda: transformers.T5EncoderModel(transformers.T5Config(**SMALL_T5)),
        "T5EncoderModel .* output 0 differs by up to",
    ),
    "normed before the layers": (
        lambda: transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**SIZES, num_key_value_heads=1)),
        "NanoChatForCausalLM .* output 0 differs by up to",
    ),
    "a bias that the encoder holds": (
        lambda: transformers.MPNetModel(transformers.MPNetConfig(**SIZES)),
        "MPNetModel .* stage 0 of 2 cannot run",
    ),
    "embeddings that the encoder looks up": (
        lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(**SIZES, relative_attention=True)),
        "DebertaV2Model .* cannot run",
    ),
    "rows of the batch by their padding": (
        lambda: transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**KINDS["gpt2"][1], **SPECIAL)),
        "GPT2ForSequenceClassification .* output 0 differs by up to",
    ),
    "no padding to begin with": (
        lambda: transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**KINDS["gpt2"][1])),
        "the cut cannot be proven, because a small model of its kind does not run on words: ValueError: Cannot handle batch sizes",
    ),
    "a parameter of its own": (
        lambda: transformers.XLNetModel(transformers.XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=16, vocab_size=90)),
        "no stage has the parameter mask_emb",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_would_be_wrong_is_refused(kind: str) -> None:
    make, message = WRONG[kind]
    with pytest.raises(ConfigurationError, match=message):
        split_transformer(make(), 2)


def by_auto(model: nn.Module, *batch: torch.Tensor) -> Any:
    loopback = bpipe.Loopback(2)
    how: Any = {"microbatch_sizes": [ROWS // M], "stages_per_rank": [1], "options": bpipe.Options(effort=0)}
    return [bpipe.auto(model, batch, cross_entropy, target=inputs()["y"], group=loopback.rank(rank), **how) for rank in range(2)]


def test_auto_cuts_what_is_proven_and_refuses_what_is_not() -> None:
    """The loss gets logits, and stages get a mask by its name."""
    x, llama = inputs()["x"], model_of("llama")
    first, last = by_auto(llama, x)
    assert first.modules[0].model.embed_tokens is llama.model.embed_tokens and last.modules[0].lm_head is llama.lm_head
    with pytest.raises(ConfigurationError, match=r"with the batch: stage 0 of 2 cannot run: .* Give auto input_ids"):
        by_auto(model_of("llama"), x, torch.ones_like(x))
    with pytest.raises(ConfigurationError, match="XGLMForCausalLM cannot be cut by split_transformer: in a small model of its"):
        by_auto(xglm(0.5), x)


@pytest.mark.parametrize("factor", [1.0, 12.0])
def test_a_factor_of_embeddings_is_applied_once(factor: float) -> None:
    config = transformers.GraniteConfig(**SIZES, num_key_value_heads=1, embedding_multiplier=factor, attention_multiplier=0.3)
    model = transformers.GraniteForCausalLM(config).train()
    parts = split_transformer(model, 4)
    bpipe.check_split(model, parts, inputs()["x"])
    assert model.model.embedding_multiplier == parts[0].model.embedding_multiplier == factor
    assert [part.model.embedding_multiplier for part in parts[1:]] == [1.0] * 3


@pytest.mark.parametrize(
    ("name", "is_right"),
    [("Llama", True), ("Granite", True), ("Gemma2", True), ("Qwen2Moe", True), ("NanoChat", False), ("RecurrentGemma", False)],
)
def test_large_models_and_those_on_meta_are_judged_by_a_smaller_configuration(name: str, is_right: bool) -> None:
    cls = getattr(transformers, f"{name}Model")
    config = cls.config_class(num_hidden_layers=5)
    if hasattr(config, "embedding_multiplier"):
        config.embedding_multiplier = 12.0
    with torch.device("meta"):
        model = cls(config)
        assert sum(one.numel() for one in model.parameters()) > 2**24
        if is_right:
            assert len(split_transformer(model, 5)) == 5
        else:
            with pytest.raises(ConfigurationError, match=f"{name}Model cannot be cut by split_transformer: in a small model of"):
                split_transformer(model, 5)


class Multiplied(transformers.LlamaModel):
    """A user's own, whose configuration says nothing of what it does."""

    factor = 1.0

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=self.factor * embedded, **kwargs)


def test_a_model_that_a_user_has_changed_is_judged_by_a_copy() -> None:
    model = model_of("llama").model
    model.__class__ = Multiplied
    assert len(split_transformer(model, 2)) == 2
    model.factor = 2.0
    with pytest.raises(ConfigurationError, match="Multiplied cannot be cut by split_transformer"):
        split_transformer(model, 2)
    assert len(split_transformer(model, 2, prove=False)) == 2


def test_the_model_is_not_run_and_nothing_is_left_behind() -> None:
    model, runs = model_of("bert"), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: runs.append(1))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    split_transformer(model.eval(), 2)
    assert not runs and not any(module.training for module in model.modules()) and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())
    assert all(one.grad is None for one in model.parameters()) and model.config.use_cache


def test_attention_of_gpus_is_left_out_of_the_proof() -> None:
    for device in ("cpu", "meta"):
        model = model_of("llama").to(device)
        model.config._attn_implementation = "flash_attention_2"
        assert len(split_transformer(model, 2)) == 2 and model.config._attn_implementation == "flash_attention_2"


def test_what_is_not_built_is_said() -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.config.hidden_act = "unheard of"
    with pytest.raises(ConfigurationError, match=r"because no small model of its kind can be built: KeyError.* pass prove=False"):
        split_transformer(model, 2)
    assert len(split_transformer(model, 2, prove=False)) == 2


def test_pictures_are_not_taken() -> None:
    part = split_transformer(model_of("llama"), 2)[0]
    with pytest.raises(ConfigurationError, match="a stage of LlamaForCausalLM does not take pixel_values: split_transformer cuts"):
        part(inputs()["x"], pixel_values=torch.ones(1))
