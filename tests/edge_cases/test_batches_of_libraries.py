"""Masks of flex attention, DTensors, and what transformers make: cut as a single process makes them for each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bpipe.errors import ConfigurationError
from bpipe.model.cutting import Cutting
from bpipe.model.merging import merge
from bpipe.model.microbatch import describe, tensors_in
from tests.edge_cases.case import NUM_STAGES, Batch, Case, M
from tests.edge_cases.test_batches import ROWS, WIDTH, Layer, Taking, case_of, rows_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 8

# Flex attention


def documents(step: int) -> torch.Tensor:
    return torch.randint(0, 3, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step)).sort(1).values


def mask_of(documents: torch.Tensor) -> Any:
    """Attention within documents, which differ from sample to sample."""
    from torch.nn.attention.flex_attention import create_block_mask

    def within(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[b, q] == documents[b, k]) & (q >= k)

    return create_block_mask(within, len(documents), None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=4)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def dense(mask: Any) -> torch.Tensor:
    """What flex attention computes of a mask: its blocks, and `mask_mod` in them. Its backward does not run on CPUs."""
    from torch.nn.attention.flex_attention import create_mask

    blocks = mask.to_dense().bool().repeat_interleave(4, -1).repeat_interleave(4, -2)
    return create_mask(mask.mask_mod, len(blocks), 1, TOKENS, TOKENS, device="cpu") & blocks


class Attention(Layer):
    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        q = self.linear(x).unsqueeze(1)
        return x + F.scaled_dot_product_attention(q, q, q, attn_mask=dense(mask)).squeeze(1)


def masked(step: int) -> Batch:
    x, ids = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)), documents(step)
    cut = [((a,), {"mask": mask_of(d)}, a + 1) for a, d in zip(x.chunk(M), ids.chunk(M))]
    return Batch((x,), x + 1, {"mask": mask_of(ids)}, cut)


def test_each_microbatch_gets_its_own_part_of_a_block_mask() -> None:
    Case(lambda: [Attention(), *(Taking() for _ in range(NUM_STAGES - 1))], masked, F.mse_loss, steps=1).check(["1f1b", "zbv"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_parts_of_a_block_mask_have_the_blocks_that_torch_makes_and_attend_alike() -> None:
    from torch.distributed.pipelining.microbatch import _split_block_mask
    from torch.nn.attention.flex_attention import flex_attention

    mask, m = mask_of(documents(0)), 4
    (parts,) = zip(*Cutting(m).split((mask,), None, "args"))
    x = torch.randn(ROWS, 1, TOKENS, WIDTH)
    whole = flex_attention(x, x, x, block_mask=mask)
    attended = [flex_attention(one, one, one, block_mask=part) for one, part in zip(x.chunk(m), parts)]
    assert torch.equal(torch.cat(attended), whole)
    for part, theirs in zip(parts, _split_block_mask(mask, m), strict=True):
        assert torch.equal(dense(part), dense(theirs))
        assert part.shape == theirs.shape
        pairs = [(value, getattr(theirs, name)) for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
        assert len(pairs) >= 8
        assert all(torch.equal(*pair) for pair in pairs)
    assert tensors_in(parts[0])
    assert describe(parts[0]) == describe(parts[1]) != describe(mask)


def test_one_block_mask_for_all_is_repeated_and_others_are_refused() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=4)
    assert Cutting(M).split((mask,), None, "args") == [(mask,)] * M
    with pytest.raises(ConfigurationError, match=r"^args\[0\] of 12 samples does not divide into 8 microbatches"):
        Cutting(M).split((mask_of(documents(0)[:12]),), None, "args")


# DTensors


def sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))

    def of(placement: Any, local: torch.Tensor) -> Any:
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    for placement in (Shard(0), Shard(1), Replicate()):

        def make(x: torch.Tensor, placement: Any = placement) -> Any:
            torch.manual_seed(0)
            return of(placement, x + (rank if placement.is_shard() else 0))

        def read(batch: Any, placement: Any = placement) -> torch.Tensor:
            assert batch.placements == (placement,)
            local: torch.Tensor = batch.to_local()
            assert batch.shape == of(placement, local).shape, "the shape of the whole goes with the shard"
            return local

        case_of(make, read).check(["1f1b"])
    x = of(Shard(0), rows_of(rank))
    parts = [part for (part,) in Cutting(M).split((x,), None, "args")]
    assert torch.equal(merge(parts).to_local(), x.to_local())
    assert merge(parts).shape == x.shape
    assert describe(x) != describe(of(Replicate(), torch.cat([rows_of(0)] * 2)))
    cutting = Cutting(M)
    with pytest.raises(ConfigurationError, match=r"args\[1\] and args\[0\] are DTensors with different placements of the batch"):
        cutting.split((x, of(Replicate(), torch.cat([rows_of(0)] * 2))), None, "args")
    uneven = DTensor.from_local(torch.zeros(5 - rank, 2), mesh, [Shard(0)], run_check=False, shape=(9, 2), stride=(2, 1))
    with pytest.raises(ConfigurationError, match=r"of shape \[9, 2\] has uneven shards over 2 ranks"):
        Cutting(3).split((uneven,), None, "args")
    leaf = of(Shard(0), rows_of(rank)).requires_grad_()
    for (part,) in Cutting(M).split((leaf,), None, "args"):
        (part.to_local() * 3).sum().backward()
    assert torch.equal(leaf.grad.to_local(), torch.full((ROWS, WIDTH), 3.0))


def test_dtensors_keep_their_placements() -> None:
    run_ranks(sharded, 2)


# Transformers


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]")


def test_a_batch_encoding_is_cut_with_its_encodings(tokenizer: Any) -> None:
    texts = ["a b c"[: 1 + 2 * (i % 3)] for i in range(ROWS)]
    whole = tokenizer(texts, padding=True, return_tensors="pt")
    cutting = Cutting(M)
    parts = [part for (part,) in cutting.split((whole,), None, "args")]
    cutting.check()
    for i, part in enumerate(parts):
        assert type(part) is type(whole)
        assert torch.equal(part.input_ids, whole.input_ids[2 * i : 2 * i + 2])
        assert torch.equal(part["attention_mask"], whole.attention_mask[2 * i : 2 * i + 2])
        assert [part.word_ids(j) for j in range(2)] == [whole.word_ids(2 * i + j) for j in range(2)]
        assert part.tokens(1) == whole.tokens(2 * i + 1)
    assert len(whole.encodings) == ROWS
    assert tensors_in(whole) == [*whole.values()]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)

    def forward(self, batch: Any) -> torch.Tensor:
        return (self.embedding(batch.input_ids) * batch.attention_mask.unsqueeze(-1)).sum(1)


def test_a_batch_encoding_trains_as_in_a_single_process(tokenizer: Any) -> None:
    def encoded(texts: list[str]) -> Any:
        return tokenizer(texts, padding="max_length", max_length=3, return_tensors="pt")

    def batch(step: int) -> Batch:
        texts = ["a b c"[: 1 + 2 * ((i + step) % 3)] for i in range(ROWS)]
        y = rows_of(step)
        cut = [((encoded(texts[2 * i : 2 * i + 2]),), {}, part) for i, part in enumerate(y.chunk(M))]
        return Batch((encoded(texts),), y, cut=cut)

    make = lambda: [Embedding(), *(Layer() for _ in range(NUM_STAGES - 1))]  # noqa: E731
    Case(make, batch, F.mse_loss, steps=2).check(["balanced_1f1b", "recompute"])


def test_a_model_output_is_cut_and_a_cache_is_refused(tokenizer: Any) -> None:
    from transformers import DynamicCache
    from transformers.modeling_outputs import BaseModelOutput

    make = lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))  # noqa: E731
    case_of(make, lambda b: b.last_hidden_state + b["hidden_states"][1]).check(["1f1b"])
    with pytest.raises(ConfigurationError, match=r"kwargs\['cache'\] is a transformers\.cache_utils\.DynamicCache, which all"):
        Cutting(M).split({"cache": DynamicCache()}, None, "kwargs")
