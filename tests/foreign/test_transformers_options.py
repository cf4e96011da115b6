"""Options of a Transformers model that its stages might drop: done as the whole model does, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import bpipe
from bpipe.errors import BPipeError
from tests.ranks import run_ranks

M, B, T, V = 2, 4, 6, 32
SMALL: dict[str, Any] = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def _llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))


def _bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": V}
    return BertForTokenClassification(BertConfig(**{**SMALL, "intermediate_size": 32, **dropout, **options}))


def _gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "tie_word_embeddings": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options))


def _mixtral(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1, "num_local_experts": 4, "router_aux_loss_coef": 0.5}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **options}))


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _schedules(model: nn.Module, loss_fn: Any = _loss, **options: Any) -> tuple[bpipe.Loopback, list[bpipe.OneFOneB]]:
    parts, loopback = bpipe.split_transformer(model, 2), bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(part, i, 2, "cpu", loopback.rank(i)) for i, part in enumerate(parts)]
    return loopback, [bpipe.OneFOneB(stage, M, loss_fn=loss_fn, **options) for stage in stages]


def _step(model: nn.Module, kwargs: dict[str, Any]) -> None:
    loopback, ranks = _schedules(model)
    loopback.step(ranks, _ids(), target=_ids(), **kwargs)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _is_as_whole(
    make: Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: torch.Tensor,
    logits_of: Callable[[Any], torch.Tensor] = lambda out: out.logits,
    extra: Callable[[Any], Any] = lambda out: 0.0,
    **options: Any,
) -> None:
    """Train both for a step, and compare outputs and gradients; what is no tensor of samples is the same for all microbatches."""
    piped, whole = make(), make()
    loopback, ranks = _schedules(piped, **options)
    outputs = loopback.step(ranks, *args, target=target, **kwargs)
    plain = []
    for i in range(M):
        cut = lambda v, i=i: v.chunk(M)[i] if isinstance(v, torch.Tensor) and len(v) == B else v  # noqa: E731
        out = whole(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
        plain.append(logits_of(out).detach())
        ((_loss(logits_of(out), cut(target)) + extra(out)) / M).backward()
    assert torch.allclose(outputs, torch.cat(plain), atol=1e-6)
    got, right = _gradients(piped), _gradients(whole)
    assert got.keys() == right.keys()
    for name, gradient in right.items():
        assert torch.allclose(got[name], gradient, atol=1e-5), name


def _ids() -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def _padding() -> torch.Tensor:
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 4:] = mask[3, 3:] = 0
    return mask


def test_a_mask_by_position_or_by_name_is_as_in_the_whole_model() -> None:
    """`model(ids, mask)`: the second argument of the first stage is the mask of all stages, or it is refused by name."""
    _is_as_whole(_llama, (_ids(),), {"attention_mask": _padding()}, _ids())
    piped = _llama()
    loopback, ranks = _schedules(piped)
    with pytest.raises(BPipeError, match=r"attention_mask|positional|argument"):
        loopback.step(ranks, _ids(), _padding(), target=_ids())


def test_the_number_of_logits_to_keep_is_kept() -> None:
    """`logits_to_keep=2`: the last stage returns these alone, and trains on them."""
    _is_as_whole(_llama, (_ids(),), {"logits_to_keep": 2}, _ids()[:, -2:])


def test_segments_of_a_bert_reach_its_first_stage() -> None:
    """`token_type_ids` change the embeddings of the first stage, and `position_ids` too."""
    segments = (torch.arange(T) > 2).long().expand(B, T)
    _is_as_whole(_bert, (_ids(),), {"token_type_ids": segments, "attention_mask": _padding()}, _ids())
    _is_as_whole(_gpt2, (_ids(),), {"token_type_ids": segments}, _ids())


def test_positions_that_begin_elsewhere_reach_all_stages() -> None:
    """Left padding: `position_ids` of each sample, which every stage's rotary embedding reads."""
    positions = (torch.arange(T)[None] + torch.tensor([[0], [3], [5], [1]])).contiguous()
    _is_as_whole(_llama, (_ids(),), {"position_ids": positions}, _ids())
    _is_as_whole(_gpt2, (_ids(),), {"position_ids": positions}, _ids())


def test_a_mask_of_four_dimensions_is_as_in_the_whole_model() -> None:
    """A mask that was made outside, with its own heads and queries, for packed documents."""
    mask = torch.ones(T, T).tril().bool()
    mask[3:, :3] = False
    _is_as_whole(_llama, (_ids(),), {"attention_mask": mask.expand(B, 1, T, T).contiguous()}, _ids())


def test_what_the_whole_model_ignores_is_ignored() -> None:
    """Transformers takes any keyword: one that it does not know, and an encoder's states without cross attention."""
    _is_as_whole(_bert, (_ids(),), {"cross_attn_mask": _padding()}, _ids())
    states = torch.randn(B, T, 16, generator=torch.Generator().manual_seed(2))
    _is_as_whole(_bert, (_ids(),), {"encoder_hidden_states": states}, _ids())


def test_the_router_s_loss_leaves_padding_out_as_the_model_does() -> None:
    """With a padding mask, the model's own auxiliary loss counts real words alone, in each microbatch."""
    _is_as_whole(
        _mixtral,
        (_ids(),),
        {"attention_mask": _padding(), "output_router_logits": True},
        _ids(),
        extra=lambda out: 0.5 * out.aux_loss,
    )


def test_the_router_s_loss_is_that_of_a_sum_where_nothing_is_scaled() -> None:
    """With `scale_grads=False` losses are added up as they are, and so are the router's."""
    piped, whole = _mixtral(output_router_logits=True), _mixtral(output_router_logits=True)
    loopback, ranks = _schedules(piped, scale_grads=False)
    loopback.step(ranks, _ids(), target=_ids())
    for rows in _ids().chunk(M):
        out = whole(rows)
        (_loss(out.logits, rows) + 0.5 * out.aux_loss).backward()
    got, right = _gradients(piped), _gradients(whole)
    assert all(torch.allclose(got[name], right[name], atol=1e-5) for name in right)


def test_the_router_s_loss_is_trained_under_checkpointing() -> None:
    """The router's logits of layers whose forwards run twice reach the last stage once."""

    def make() -> nn.Module:
        model = _mixtral(output_router_logits=True)
        model.activation_checkpointing_enable()  # type: ignore[operator]
        return model.train()

    _is_as_whole(make, (_ids(),), {}, _ids(), extra=lambda out: 0.5 * out.aux_loss)


def test_a_router_s_loss_that_is_switched_off_in_step_trains_none() -> None:
    """`output_router_logits=False` in the call, where the configuration says True."""
    _is_as_whole(lambda: _mixtral(output_router_logits=True), (_ids(),), {"output_router_logits": False}, _ids())


DROPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "labels, for the model's own loss": (_llama, {"labels": _ids()}, "labels"),
    "a cache of earlier words": (_llama, {"past_key_values": DynamicCache(), "use_cache": True}, "past_key_values|use_cache|cache"),
    "attentions, asked for in the configuration": (
        lambda: _llama(output_attentions=True, attn_implementation="eager"),
        {},
        "output_attentions",
    ),
    "hidden states, asked for in the configuration": (lambda: _llama(output_hidden_states=True), {}, "output_hidden_states"),
    "tuples, asked for in the configuration": (lambda: _llama(return_dict=False), {}, "return_dict"),
    "embeddings instead of words": (_llama, {"inputs_embeds": torch.randn(B, T, 16)}, "inputs_embeds"),
    "labels of a classifier of words": (_bert, {"labels": _ids()}, "labels"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_a_stage_would_drop_is_refused_by_name(name: str) -> None:
    """When the model is cut, or when the option is given to `step`: the error names the option, and no gradient was added."""
    make, kwargs, option = DROPPED[name]
    model = make()
    with pytest.raises((BPipeError, TypeError), match=option):
        _step(model, kwargs)
    assert not _gradients(model)


def _qwen(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SMALL, "num_hidden_layers": 4, "intermediate_size": 32, "moe_intermediate_size": 16, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "router_aux_loss_coef": 0.5}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **experts, **options}))


@pytest.mark.parametrize("plain", [[0, 1], [2, 3], [1]])
def test_the_router_s_loss_of_a_model_some_of_whose_layers_have_no_router(plain: list[int]) -> None:
    """Stages of plain layers alone, in front or behind: the logits of the others reach the last stage through them."""
    _is_as_whole(
        lambda: _qwen(mlp_only_layers=plain, output_router_logits=True),
        (_ids(),),
        {"attention_mask": _padding()},
        _ids(),
        extra=lambda out: 0.5 * out.aux_loss,
    )


def _routers_apart(rank: int) -> dict[str, str]:
    """What comes of an option that one rank alone gives to its step."""
    found = {}
    for name, mine in {"the first alone": rank == 0, "the last alone": rank == 1, "both": True}.items():
        model, whole = _mixtral(), _mixtral()
        part = bpipe.split_transformer(model, 2)[rank]
        schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=_loss)
        try:
            schedule.step(*([_ids()] if rank == 0 else []), target=_ids(), **({"output_router_logits": True} if mine else {}))
        except BPipeError as error:
            found[name] = f"refused: {error}"
            schedule.close()
            continue
        for rows in _ids().chunk(M):
            out = whole(rows, output_router_logits=True)
            ((_loss(out.logits, rows) + 0.5 * out.aux_loss) / M).backward()
        right = _gradients(whole)
        same = all(torch.allclose(p.grad, right[n], atol=1e-5) for n, p in part.named_parameters() if p.grad is not None)
        found[name] = "same" if same else "other"
        schedule.close()
    return found


def test_an_option_that_one_rank_alone_gives_is_refused_or_done() -> None:
    """`output_router_logits=True` on one rank of two: the router's loss is trained on both, or the ranks say that they differ."""
    for rank in run_ranks(_routers_apart, 2):
        assert rank["both"] == "same"
        for name, said in rank.items():
            assert said == "same" or ("refused" in said and "router" in said), (name, said)
