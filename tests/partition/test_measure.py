"""Measuring layers: bytes as the runtime counts them, the order in which they run, and the meta device like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import ConfigurationError
from tests.models import Block
from tests.partition.models import NUM_BLOCKS, WIDTH, WORDS, Decoder, Nano, Transformer, cross_entropy, words

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("model", [Transformer(dropout=0.1), Decoder()], ids=["ModuleList", "ModuleDict"])
def test_bytes_are_those_that_a_profile_counts(model: nn.Module) -> None:
    x, y = words(2), words(2, 1)
    layers = bpipe.measure_layers(model, x, loss_fn=cross_entropy, target=y, repeats=1)
    blocks = "blocks" if isinstance(model, Transformer) else "layers"
    ends = (("embed",), ("norm", "head")) if isinstance(model, Transformer) else (("tok_embeddings",), ("norm", "lm_head"))
    assert [one.names for one in layers] == [ends[0], *((f"{blocks}.{i}",) for i in range(NUM_BLOCKS)), ends[1]]
    block = model.get_submodule(f"{blocks}.1")
    of_block = bpipe.profile(block, torch.randn(2, x.shape[1], WIDTH), [2], repeats=1)
    if isinstance(model, Transformer):  # the other one multiplies between its blocks, which counts with the block before
        assert layers[2].saved_bytes == of_block.at(2).own_bytes
    assert layers[2].output_bytes == of_block.at(2).output_bytes == 2 * x.shape[1] * WIDTH * 4
    assert layers[2].static_bytes == of_block.static_bytes()
    whole = bpipe.profile(model, x, [2], loss_fn=cross_entropy, target=y, repeats=1).at(2)
    assert sum(one.saved_bytes for one in layers) - sum(one.shared_bytes for one in layers[1:]) == whole.own_bytes
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in layers)


def test_what_neighbours_both_save_counts_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    layers = bpipe.measure_layers(model, torch.randn(4, 8), repeats=1)
    assert [(one.saved_bytes, one.shared_bytes) for one in layers] == [(0, 0), (128, 0), (128, 128), (128, 0), (128, 128)]
    for start, end in ((1, 3), (2, 5), (1, 5)):
        stage = nn.Sequential(*model[start:end])
        counted = sum(one.saved_bytes for one in layers[start:end]) - sum(one.shared_bytes for one in layers[start + 1 : end])
        assert counted == bpipe.profile(stage, torch.randn(4, 8), [4], repeats=1).at(4).own_bytes


def test_the_meta_device_counts_the_same_bytes_and_operations_instead_of_seconds() -> None:
    x, y = words(2), words(2, 1)
    real = bpipe.measure_layers(Transformer(), x, loss_fn=cross_entropy, target=y, repeats=1)
    with torch.device("meta"):
        model = Transformer()
    layers = bpipe.measure_layers(model, x, loss_fn=cross_entropy, target=y, flops_per_s=1.0)
    for one, other in zip(real, layers, strict=True):
        assert (one.names, one.saved_bytes, one.shared_bytes) == (other.names, other.saved_bytes, other.shared_bytes)
        assert (one.output_bytes, one.static_bytes) == (other.output_bytes, other.static_bytes)
    rows, tokens = 2 * x.shape[1], x.shape[1]
    products = rows * WIDTH * (3 * WIDTH + WIDTH + 8 * WIDTH) + 2 * rows * tokens * WIDTH  # of q, k, v, out, mlp; and of attention
    assert layers[1].forward_s == 2 * products and layers[1].backward_s == 2 * layers[1].forward_s
    assert layers[-1].forward_s == 2 * rows * WIDTH * WORDS and layers[0].forward_s == 0
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_a_model_that_fits_nowhere_is_cut_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(2**17, 2**13), *(Block(2**13, 64, 0.0) for _ in range(12)), nn.Linear(2**13, 2**17))
    layers = bpipe.measure_layers(model, torch.zeros(1, 512, dtype=torch.long))
    choice = bpipe.choose_stages(layers, 4, 8, schedule="balanced_1f1b")
    parts = bpipe.split_model(model, choice.stages)
    assert sum(one.static_bytes for one in layers) > 2**36  # 64 GiB
    assert len(parts[-1]) < len(parts[1])  # the head outweighs a block
    assert [name for part in parts for name in part.state_dict()] == list(model.state_dict())


GROUPS = ["stem", ("layers.a", "layers.b"), "head"]


class Backwards(nn.Module):
    """Registers its modules in another order than it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers = nn.Linear(4, 2), nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})
        self.stem = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers["b"](torch.relu_(self.layers["a"](self.stem(x)) * scale)))


def test_layers_come_in_the_order_in_which_they_run() -> None:
    model, kwargs = Backwards(), {"scale": torch.ones(())}
    assert [one.names for one in bpipe.measure_layers(model, torch.zeros(2, 4), kwargs)] == [
        ("stem", "layers.a", "layers.b", "head")
    ]
    assert [one.names for one in bpipe.measure_layers(model, (torch.zeros(2, 4),), kwargs, layers=GROUPS)] == [
        ("stem",),
        ("layers.a", "layers.b"),
        ("head",),
    ]


def test_positions_stay_with_the_embedding_and_a_tied_weight_with_both() -> None:
    layers = bpipe.measure_layers(Nano(), words(2), bytes_per_parameter=10)
    assert [one.names for one in layers] == [("tok", "pos", "drop"), ("h.0",), ("h.1",), ("h.2",), ("h.3",), ("head",)]
    assert [layers[0].static_bytes, layers[-1].static_bytes] == [10 * WIDTH * (WORDS + 6), 10 * WIDTH * WORDS]


def test_static_bytes_by_dtype_and_frozen_ones() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16), nn.Linear(8, 8, bias=False, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    layers = bpipe.measure_layers(model, torch.zeros(1, 8, dtype=torch.bfloat16))
    assert [one.static_bytes for one in layers] == [2 * 64, (2 + 2 + 8 + 4) * 64]
    assert layers[0].backward_s == 0 and layers[0].saved_bytes == 0


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(4, 4)
    buffers, x = [buffer.clone() for buffer in model.buffers()], torch.randn(8, 4)
    state, given, gradient = torch.get_rng_state(), x.clone(), model[0].weight.grad
    bpipe.measure_layers(model, x, repeats=2)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, given)
    assert all(map(torch.equal, buffers, model.buffers())) and model[0].weight.grad is gradient and model[0].bias.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


RELU = nn.ReLU()


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (print, {}, "measure_layers measures an nn.Module, got builtin"),
        (Unused(), {}, "unused did not run in the model's forward"),
        (nn.Sequential(nn.Linear(4, 4), RELU, nn.Linear(4, 4), RELU), {}, "1 runs twice in a forward"),
        (nn.Sequential(nn.Linear(4, 4)), {"layers": ["0", "1"]}, "'1', which the model does not have"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"layers": ["0", ()]}, "layer 1 is empty"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"layers": ["1", "0"]}, "0 runs before 1: give layers= in the order of the"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"layers": ["0", ("1", "0")]}, "0 is in layers 0 and 1"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4))), {"layers": ["0", "0.0"]}, "0.0 of layer 1 is part of 0 of layer 0"),
        (nn.Sequential(nn.Linear(4, 4)), {"repeats": 0}, "repeats=0"),
        (nn.Sequential(nn.Linear(4, 4)), {"flops_per_s": 0}, "flops_per_s=0"),
    ],
)
def test_what_is_refused(model, arguments, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        bpipe.measure_layers(model, torch.zeros(2, 4), **arguments)


def test_attention_with_fewer_heads_for_keys_is_counted_too() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, kv = self.q(x).unflatten(2, (4, 4)).transpose(1, 2), self.kv(x).unflatten(2, (2, 4)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True).transpose(1, 2).flatten(2)

    layers = bpipe.measure_layers(nn.Sequential(Grouped()).to("meta"), torch.zeros(2, 6, 16))
    assert layers[0].forward_s > 0


def test_a_sparse_buffer_counts_like_a_dense_one() -> None:
    """As `bpipe.profile` counts it; torch has no `nbytes` of a sparse tensor."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, x)

    layers = bpipe.measure_layers(nn.Sequential(nn.Linear(8, 8), Graph()), torch.randn(4, 8), repeats=1)
    assert layers[1].static_bytes == 64


class Widening(nn.Module):
    """Adds to a product of its input one of parameters alone, which has no part in the gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) + (self.own @ self.own)[:1]


def test_halves_of_a_backward_are_those_of_a_split_one() -> None:
    """Gradients of inputs; in the first layer there are none to compute, so that all of its backward waits."""
    model = nn.Sequential(nn.Linear(8, 8), Widening(), nn.ReLU(), nn.Linear(8, 2)).to("meta")
    layers = bpipe.measure_layers(model, torch.zeros(4, 8), flops_per_s=1.0)
    assert [one.input_s for one in layers] == [0, 2 * 4 * 8 * 8, 0, 2 * 4 * 8 * 2]
    assert [one.backward_s for one in layers] == [2 * 4 * 8 * 8, 2 * 2 * 4 * 8 * 8 + 2 * 2 * 8 * 8 * 8, 0, 2 * 2 * 4 * 8 * 2]
    assert [one.weight_s for one in layers] == [2 * 4 * 8 * 8, 2 * 4 * 8 * 8 + 2 * 2 * 8 * 8 * 8, 0, 2 * 4 * 8 * 2]
    timed = bpipe.measure_layers(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(4, 8))
    assert timed[0].input_s == 0 and (timed[1].input_s or 0) > 0 and (timed[1].weight_s or 0) > 0


def test_halves_of_a_module_in_place_and_with_keyword_arguments_are_measured() -> None:
    layers = bpipe.measure_layers(Backwards(), torch.zeros(2, 4), {"scale": torch.ones(())}, layers=GROUPS)
    assert [one.input_s is not None and one.input_s > 0 for one in layers] == [False, True, True]


class Applies(nn.Module):
    """Gets a function that holds a tensor between two tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, change: Any, beside: torch.Tensor) -> torch.Tensor:
        assert beside.shape == (3, 4)
        return change(self.linear(x)) + beside


def test_a_module_gets_its_own_tensors_whatever_else_holds_some() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Applies(), Applies()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = torch.ones(4)
            for block in self.blocks:
                x = block(x, lambda part: part * factor, torch.ones(3, 4))
            return x

    loss = {"loss_fn": lambda output, target: output.sum(), "target": torch.ones(1)}
    assert len(bpipe.measure_layers(Model(), torch.ones(3, 4), layers=["blocks.0", "blocks.1"], **loss)) == 2
