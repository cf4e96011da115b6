"""Twelve tied models of Transformers, cut or built by hand, on 2 and 4 processes: a plain loop trains them as one process does.

Two of them also clipped, in float32 and bfloat16, sharded by FSDP2, and resumed over another number of stages.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
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
        self.takes = "input_ids" if stage == 0 else "inputs_embeds"
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
    looped(schedule, part, Way(), optimizer_of(part, Way()), range(STEPS))
    return {name: one.detach().clone() for name, one in part.named_parameters()}


class Way(NamedTuple):
    """How a model is trained.

    Args:
        num_replicas: of the pipeline, whose stages FSDP2 shards if there are several.
        norm: to which gradients are clipped.
    """

    dtype: torch.dtype = torch.float64
    norm: float = float("inf")
    num_replicas: int = 1
    momentum: float = 0.0


def optimizer_of(model: nn.Module, way: Way) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=way.momentum)


def alone(name: str, sizes: dict[str, Any], way: Way = Way()) -> dict[str, torch.Tensor]:  # noqa: B008
    model = model_of(name, sizes).to(way.dtype)
    optimizer = optimizer_of(model, way)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(one.chunk(M) for one in batch(step))):
            (loss_of(model(x).logits, y) / M).backward()
        nn.utils.clip_grad_norm_(model.parameters(), way.norm)
        optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(("name", "door", "num_ranks", "sizes"), CASES)
def test_a_tied_model_trains_as_in_one_process(name: str, door: str, num_ranks: int, sizes: dict[str, Any]) -> None:
    """Each weight of a rank is one of the single process's, and the shared one is on two ranks."""
    expected = [*{one.data_ptr(): one for one in alone(name, sizes).values()}.values()]
    found = [weight for rank in run_ranks(trained, num_ranks, num_ranks, name, door, sizes) for weight in rank.values()]
    assert len(found) == len(expected) + 1
    for weight in found:
        alike = [one for one in expected if one.shape == weight.shape]
        assert min((one - weight).abs().max().item() for one in alike) < 1e-12


TWO = {"GPT2LMHeadModel": OF_GPT2, "LlamaForCausalLM": ONE_KEY}
WAYS = {
    "clipped": (Way(norm=0.05), 1e-12),
    "in float32": (Way(torch.float32), 2e-6),
    "sharded": (Way(num_replicas=2), 1e-12),
    "sharded and clipped": (Way(norm=0.05, num_replicas=2), 1e-12),
}


def looped(
    schedule: Any, part: nn.Module, way: Way, optimizer: Any, steps: Sequence[int], replica: int = 0, group: Any = None
) -> None:
    for step in steps:
        x, y = (one.chunk(way.num_replicas)[replica] for one in batch(step))
        optimizer.zero_grad()
        schedule.step(x, target=y, return_outputs=False)
        if way.norm < float("inf"):
            bpipe.clip_grad_norm_(part.parameters(), way.norm, group=group)
        optimizer.step()
    schedule.close()


def trained_in_a_way(rank: int, way: Way, name: str, sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (way.num_replicas, 2), mesh_dim_names=("dp", "pp"))
    stage, pipeline = mesh.get_local_rank("pp"), mesh.get_group("pp")
    part = bpipe.split_transformer(model_of(name, sizes).to(way.dtype), 2, prove=False)[stage]
    if way.num_replicas > 1:
        fully_shard(part, mesh=mesh["dp"])
    schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(part, stage, 2, "cpu", group=pipeline), M, loss_fn=loss_of)
    looped(schedule, part, way, optimizer_of(part, way), range(STEPS), mesh.get_local_rank("dp"), pipeline)
    return {name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for name, one in part.named_parameters()}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("how", WAYS)
def test_ways_to_train_it(name: str, how: str) -> None:
    way, tolerance = WAYS[how]
    expected = alone(name, TWO[name], way)
    for found in run_ranks(trained_in_a_way, 2 * way.num_replicas, way, name, TWO[name]):
        for key, weight in found.items():
            torch.testing.assert_close(weight, expected[key], rtol=0, atol=tolerance)


def in_bfloat16(rank: int, by_hand: bool, name: str, sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    part: Any = bpipe.split_transformer(model_of(name, sizes).bfloat16(), 2, prove=False)[rank]
    [weight] = [one for one in part.parameters() if one.shape == (WORDS, SMALL)]
    tied = bpipe.TiedWeights({"embedding.weight": weight}) if by_hand else None
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=loss_of)
    optimizer = optimizer_of(part, Way())
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        schedule.step(x, target=y)
        if tied is not None:
            tied.sum_grads()
        optimizer.step()
    schedule.close()
    return {name: one.detach().clone() for name, one in part.named_parameters()}


@pytest.mark.parametrize("name", TWO)
def test_bfloat16_is_that_of_tied_weights_to_the_bit(name: str) -> None:
    for plain, by_hand in zip(*(run_ranks(in_bfloat16, 2, by_hand, name, TWO[name]) for by_hand in (False, True))):
        assert plain.keys() == by_hand.keys() and all(torch.equal(plain[key], by_hand[key]) for key in plain)


def half_way(rank: int, num_ranks: int, steps: Sequence[int], folder: str, name: str, sizes: dict[str, Any]) -> Any:
    """Train over the first or the last steps: save what the first leave, or begin with that."""
    warnings.simplefilter("ignore")
    way = Way(momentum=0.9)
    part = bpipe.split_transformer(model_of(name, sizes), num_ranks, prove=False)[rank]
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, num_ranks, "cpu"), M, loss_fn=loss_of)
    optimizer = optimizer_of(part, way)
    if steps[0] > 0:
        dcp.load(bpipe.training_state(part, optimizer), checkpoint_id=folder)
    looped(schedule, part, way, optimizer, steps)
    if steps[0] == 0:
        dcp.save(bpipe.training_state(part, optimizer), checkpoint_id=folder)
    return {name: one.detach().clone() for name, one in part.named_parameters()}


@pytest.mark.parametrize("name", TWO)
def test_it_resumes_over_another_number_of_stages(name: str, tmp_path: Any) -> None:
    expected = alone(name, TWO[name], Way(momentum=0.9))
    run_ranks(half_way, 2, 2, range(10), str(tmp_path), name, TWO[name])
    for found in run_ranks(half_way, 4, 4, range(10, STEPS), str(tmp_path), name, TWO[name]):
        for key, weight in found.items():
            torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e-12)
