"""All slices of a sequence save together what the whole sequence saves: under autocast, with masks, with grouped queries."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B
from bpipe.memory.saved.joined import keeping_pieces
from bpipe.slices import UpTo, by_pieces, causal_attention, sliced_transformer
from bpipe.slices.attention import masked_attention
from tests.slices.models import HEADS, WIDTH, Attention, Stage

POSITIONS, M = 32, 2


def saved_bytes(module: nn.Module, slices: int, autocast: bool, batch: Any, loss_fn: Any, **options: Any) -> int:
    """Return the bytes that all slices of a sequence save together, where the predicted bytes are the used ones."""
    loopback = Loopback(1)
    schedule = Seq1F1B(PipelineStage(module, 0, 1, "cpu", loopback.rank(0)), M, loss_fn=loss_fn, slices=slices, **options)
    x, target, kwargs = batch
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        for _ in range(2):
            module.zero_grad()
            loopback.step([schedule], x, target=target, **kwargs)
    assert schedule.stats["predicted_peak_bytes"] == schedule.stats["peak_bytes"]
    return sum(known.footprint.own_bytes for known in schedule.session.context.memory.kinds.values())


class InFull(Attention):
    """Attention whose queries and keys are in single precision under autocast, as rotary embeddings leave them."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self._key_heads = key_heads
        self.kv = nn.Linear(WIDTH, 2 * key_heads * WIDTH // HEADS)

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        batch, n, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(batch, n, HEADS, -1).transpose(1, 2).float()
        k, v = self.kv(y).view(batch, n, 2, self._key_heads, -1).permute(2, 0, 3, 1, 4)
        k = k.float()
        x = x + self.out(causal_attention(q, k, v, past).transpose(1, 2).reshape(batch, n, WIDTH))
        return x + self.mlp(x), (k, v)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_own_stages(key_heads: int, autocast: bool) -> None:
    """Before, each slice cast all earlier keys again, and saved each cast."""
    torch.manual_seed(0)
    module = Stage("attention")
    module.layers = nn.ModuleList(InFull(key_heads) for _ in range(2))
    x = torch.randn(2 * M, POSITIONS, WIDTH)
    whole, sliced = (saved_bytes(module, k, autocast, (x, x, {}), nn.functional.mse_loss) for k in (1, 8))
    assert sliced <= 1.02 * whole


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


SMALL = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "name, key_heads, autocast, padding",
    [
        ("Llama", 4, True, None),
        ("Llama", 2, False, slice(3)),
        ("Mistral", 2, False, None),
        ("Llama", 2, True, None),
        ("Llama", 4, True, slice(-3, None)),
        ("Mistral", 4, True, None),
        ("Mistral", 2, False, slice(3)),
    ],
)
def test_transformers(name: str, key_heads: int, autocast: bool, padding: slice | None) -> None:
    """Before, a mask made each slice save the earlier keys and values again, repeated for each query's head."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    more = {"sliding_window": 10} if name == "Mistral" else {}
    config = getattr(transformers, f"{name}Config")(**SMALL, num_key_value_heads=key_heads, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    module = sliced_transformer(bpipe.split_transformer(model, 1)[0])
    words, mask = torch.randint(0, 37, (2 * M, POSITIONS)), torch.ones(2 * M, POSITIONS, dtype=torch.long)
    if padding is not None:
        mask[::2, padding] = 0  # in each microbatch, because Transformers makes no mask where there is no padding
    batch = words, words, {"attention_mask": mask}
    options = {"options": bpipe.Options(kwargs_slice_spec={"attention_mask": UpTo(1)})}
    whole, sliced = (saved_bytes(module, k, autocast, batch, loss_of, **options) for k in (1, 8))
    assert sliced <= 1.02 * whole


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("kind", ["seen", "added"])
def test_masks_by_pieces(monkeypatch: pytest.MonkeyPatch, kind: str, key_heads: int, has_kernel: bool) -> None:
    """A window, and the padding of a sequence whose first positions see nothing at all."""
    if not has_kernel:
        monkeypatch.setattr(by_pieces, "has_kernel", lambda *_: False)
    torch.manual_seed(0)
    n, lengths = 12, [5, 3, 4]
    whole = [torch.randn(2, heads, n, 8, dtype=torch.float64, requires_grad=True) for heads in (4, key_heads, key_heads)]
    places = torch.arange(n)
    mask = ((places[:, None] >= places) & (places[:, None] - places < 6)).repeat(2, 1, 1, 1)
    mask[0, :, :, :3] = False
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    given = mask if kind == "seen" else added
    repeated = [whole[0], *(one.repeat_interleave(4 // key_heads, 1) for one in whole[1:])]
    expected = nn.functional.scaled_dot_product_attention(*repeated, attn_mask=given)
    seeing = mask.any(-1)[:, 0]
    gradient = torch.randn_like(expected) * seeing[:, None, :, None]
    expected.backward(gradient)
    gradients = [one.grad.nan_to_num() for one in whole if one.grad is not None]
    again = [one.detach().requires_grad_() for one in whole]
    q, k, v = (one.split(lengths, 2) for one in again)
    ends = [5, 8, 12]
    outputs = [
        masked_attention(q[s], k[s], v[s], list(zip(k[:s], v[:s])), given[:, :, ends[s] - lengths[s] : ends[s], : ends[s]], None)
        for s in range(3)
    ]
    found = torch.cat(outputs, 2)
    found.backward(gradient)
    rows = seeing[:, None, :, None].expand_as(found)
    torch.testing.assert_close(found[rows], expected[rows], rtol=1e-12, atol=1e-12)
    assert not found[~rows].nan_to_num().any()
    for one, other in zip(again, gradients):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.nan_to_num(), other, rtol=1e-12, atol=1e-12)


def test_masks_that_are_learned() -> None:
    """Their gradient would be lost."""
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(bpipe.errors.StageError, match="gives no gradient to its mask"):
        masked_attention(q, q, q, [(q, q)], torch.zeros(1, 1, 3, 6, requires_grad=True), None)


def test_keys_with_a_mask_are_handed_on_as_attention_has_cast_them() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1})
    module = sliced_transformer(transformers.LlamaForCausalLM(config), prove=False)
    mask = torch.tensor([[0, 1, 1, 1]])
    with torch.autocast("cpu", torch.bfloat16), keeping_pieces(sets_hooks=True) as casts:
        _, state = module(torch.ones(1, 4, dtype=torch.long), attention_mask=mask)
    (key, _) = state["layers"][0]
    assert key.dtype is torch.float32 and casts[id(key)][1].dtype is torch.bfloat16
