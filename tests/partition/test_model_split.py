"""Cutting by names: what a stage is, that nothing is copied, that gradients are a single process's, and what is refused."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import BPipeError, ConfigurationError, StageError
from bpipe.partition.model_split import at_cuts
from bpipe.partition.skeleton import AddsNothing, PassThrough
from tests.partition.models import (
    NUM_BLOCKS,
    TOKENS,
    WIDTH,
    Decoder,
    Nano,
    Transformer,
    assert_equal,
    gradients_alone,
    gradients_piped,
    words,
)
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

M = 6
LAYERS = ["embed", *(f"blocks.{i}" for i in range(NUM_BLOCKS)), "norm", "head"]
FOUR = at_cuts(LAYERS, ["blocks.1", "blocks.3", "blocks.4"])


def storages(*modules: nn.Module) -> set[int]:
    return {tensor.data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("schedule", [bpipe.BalancedOneFOneB, bpipe.OneFOneB])
def test_gradients_of_a_cut_transformer(schedule: type[bpipe.Schedule]) -> None:
    torch.manual_seed(0)
    model, x, y = Transformer(), words(2 * M), words(2 * M, 1)
    expected = gradients_alone(model, M, x, y)
    parts = bpipe.split_model(model, FOUR)
    bpipe.check_split(model, parts, x)
    assert_equal(expected, gradients_piped(parts, M, x, y, schedule))


def test_several_stages_on_a_rank() -> None:
    model, x, y = Transformer(), words(2 * M), words(2 * M, 1)
    expected = gradients_alone(model, M, x, y)
    assert_equal(expected, gradients_piped(bpipe.split_model(model, FOUR), M, x, y, bpipe.ZBV, num_ranks=2))


def test_none_as_torchtitan_writes_it_and_keyword_arguments_on_every_stage() -> None:
    model, x, y, shift = Decoder(), words(2 * M), words(2 * M, 1), torch.randn(2 * M, 1, WIDTH)
    model.init_weights()
    expected = gradients_alone(model, M, x, y, shift=shift)
    stages = [["tok_embeddings"], ["layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4"], ["layers.5", "norm", "lm_head"]]
    parts = bpipe.split_model(model, stages, missing="none")
    assert [part.tok_embeddings is None for part in parts] == [False, True, True, True]
    assert [list(part.layers) for part in parts] == [[], ["0", "1", "2"], ["3", "4"], ["5"]]
    assert all(part.scale is model.scale for part in parts)
    bpipe.check_split(model, parts, x, shift=shift)
    assert_equal(expected, gradients_piped(parts, M, x, y, shift=shift))


def test_a_stage_shares_what_it_keeps_and_copies_nothing() -> None:
    model = Transformer()
    before = {name: id(module) for name, module in model.named_modules()}
    parts = bpipe.split_model(model, FOUR)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert [type(part) for part in parts] == [Transformer] * 4
    assert parts[1].get_submodule("blocks.1") is model.blocks[1] and parts[0].head is not model.head
    assert storages(*parts) == storages(model) and not storages(parts[0]) & storages(parts[1])
    assert [name for part in parts for name in part.state_dict()] == list(model.state_dict())
    assert [len(part.blocks) for part in parts] == [1, 2, 1, 2]


def test_a_part_frees_the_rest() -> None:
    import gc
    import weakref

    model = Transformer()
    last = weakref.ref(model.blocks[NUM_BLOCKS - 1].qkv.weight)
    part = bpipe.split_model(model, FOUR)[0]
    del model
    gc.collect()
    assert last() is None and len(list(part.blocks)) == 1


def test_on_the_meta_device_and_initialised_later() -> None:
    with torch.device("meta"):
        model = Decoder()
    parts = bpipe.split_model(
        model,
        [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "layers.4"], ["layers.5", "norm", "lm_head"]],
        missing="none",
    )
    assert all(tensor.is_meta for part in parts for tensor in part.parameters())
    whole, x = Decoder(), words(4)
    whole.init_weights()
    for part in parts:
        part.to_empty(device="cpu").init_weights()
    bpipe.check_split(whole, parts, x)


def test_sequential_and_a_module_in_two_places() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    parts = bpipe.split_model(model, [["0", "1"], ["2", "3", "4.0"], ["4.1"]])
    assert [list(dict(part.named_modules(remove_duplicate=False))) for part in parts] == [
        ["", "0", "1"],
        ["", "2", "3", "4", "4.0"],
        ["", "4", "4.1"],
    ]
    bpipe.check_split(model, parts, torch.randn(3, 4))
    with pytest.raises(ConfigurationError, match=r"no stage has 3 \(ReLU\)"):
        bpipe.split_model(model, [["0", "1"], ["2", "4"]])


class Loose(nn.Module):
    """A parameter and a buffer of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layers = nn.Parameter(torch.randn(4)), nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.register_buffer("scale", torch.tensor(0.5))
        self.table = torch.randn(3)  # a plain tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.start is None else x + self.start
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def test_parameters_and_buffers_of_the_model_itself() -> None:
    model = Loose()
    with pytest.raises(ConfigurationError, match="no stage has the parameter start: name it in the stage that uses it"):
        bpipe.split_model(model, [["layers.0"], ["layers.1"]])
    first, last = bpipe.split_model(model, [["start", "layers.0"], ["layers.1"]])
    assert first.start is model.start and last.start is None and "start" not in last.state_dict()
    assert first.scale is last.scale is model.scale and last.table is model.table
    bpipe.check_split(model, [first, last], torch.randn(2, 4))
    assert bpipe.split_model(model, [["start", "scale", "layers.0"], ["layers.1"]])[1].scale is None


class Scaled(nn.ModuleList):
    """A list with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))


def test_a_parameter_of_a_list_is_on_the_stage_that_names_the_list() -> None:
    model = nn.Sequential()
    model.layers, model.head = Scaled(), nn.Linear(4, 4)
    first, last = bpipe.split_model(model, [["layers"], ["head"]])
    assert list(first.state_dict()) == ["layers.scale", "layers.0.weight", "layers.0.bias"]
    assert list(last.state_dict()) == ["head.weight", "head.bias"]


class TwoNames(nn.Module):
    """A list of layers under two names, and tensors in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.tables = {"rope": (torch.randn(4), torch.randn(4))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.addcmul(layer(x), *self.tables["rope"]) if layer is self.layers[-1] else layer(x)
        return x


def test_a_list_with_two_names_and_tensors_in_a_plain_attribute() -> None:
    model = TwoNames()
    parts = bpipe.split_model(model, [[f"model.layers.{i}", f"layers.{i}"] for i in range(3)])
    assert [len(part.layers) for part in parts] == [1, 1, 1] and all(part.layers is part.model.layers for part in parts)
    assert all(part.tables["rope"][0] is model.tables["rope"][0] for part in parts)


def train_differently_cut(rank: int, is_alike: bool) -> list[str]:
    cut = ["0", "1"] if is_alike or rank else ["0"]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    names = [cut, [name for name in "0123" if name not in cut]]
    part = bpipe.split_model(model, [one[:: 1 - 2 * rank] for one in names])[rank]  # in another order: the same cut
    schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    schedule.close()
    return list(part._modules)


def test_ranks_that_cut_differently_are_told() -> None:
    assert run_ranks(train_differently_cut, 2, True) == [["0", "1"], ["2", "3"]]
    with pytest.raises(RankError, match="ranks 0 and 1 have cut the model into different stages"):
        run_ranks(train_differently_cut, 2, False)


def test_every_problem_is_listed() -> None:
    with pytest.raises(ConfigurationError) as raised:
        bpipe.split_model(Transformer(3), [["embed", "blocks.7"], [], ["blok.1", "head", "head"]])
    assert str(raised.value).splitlines() == [
        "these 3 stages are not a split of the model:",
        "  stage 0 names 'blocks.7', which the model does not have: 'blocks.2'?",
        "  stage 1 is empty",
        "  stage 2 names 'blok.1', which the model does not have: 'blocks.1'?",
        "  stage 2 names 'head' twice",
    ]
    with pytest.raises(ConfigurationError) as raised:
        bpipe.split_model(Transformer(3), [["embed", "blocks.1"], ["blocks.0", "blocks.1", "norm"]])
    assert str(raised.value).splitlines()[1:] == [
        "  no stage has blocks.2 (Block)",
        "  no stage has head (Linear)",
        "  blocks.1 is in stages 0, 1 and would run in each of them",
        "  blocks.0 is in stage 1, and blocks.1, which comes after it, in stage 0",
    ]
    with pytest.raises(ConfigurationError, match=r"blocks.0 is in stage 1, and blocks.1, which comes after it, in stage 0"):
        bpipe.split_model(Transformer(2), [["embed", "blocks.1"], ["blocks.0", "norm", "head"]])
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match="0 is in stage 1, and 1, which comes after it, in stage 0"):
        bpipe.split_model(nested, [["0.0", "1"], ["0.1"]])
    with pytest.raises(ConfigurationError, match=r"blocks.2 is in stages 0, 1 and would run in each of them"):
        bpipe.split_model(Transformer(3), [["embed", "blocks"], ["blocks.2", "norm", "head"]])
    with pytest.raises(ConfigurationError, match=r"\.\.\. and 23 more"):
        bpipe.split_model(Transformer(30), [["embed", "blocks.0"]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bpipe.split_model(print, [["a"]]), "split_model cuts an nn.Module, got builtin"),
        (lambda: bpipe.split_model(Transformer(), []), "there are none"),
        (lambda: bpipe.split_model(Transformer(), ["embed"]), "a stage is a list of names, got the text 'embed'"),
        (lambda: bpipe.split_model(Nano(), NANO, missing="skip"), "missing='skip': choose 'pass', 'zero' or 'none'"),
        (lambda: bpipe.split_model(Nano(), NANO, missing={"pos": "nil"}), r"missing\['pos'\]='nil'"),
        (lambda: bpipe.split_model(Nano(), NANO, missing={"emb": "zero"}), r"missing\['emb'\]: the model has no such module"),
        (lambda: at_cuts(LAYERS, ["blocks.9"]), "cuts at blocks.9, which are none of the layers embed, blocks.0"),
        (lambda: at_cuts(LAYERS, ["blocks.2", "blocks.1"]), "in the order of the layers"),
        (lambda: at_cuts(LAYERS, ["embed"]), "after the first one"),
        (lambda: bpipe.check_split(Nano(), []), "no stages to check"),
        (lambda: bpipe.check_split(Nano().to("meta"), [Nano()]), "on the meta device, where nothing has a value"),
    ],
)
def test_what_is_refused(call, message: str) -> None:
    with pytest.raises(BPipeError, match=message):
        call()


def test_what_cannot_be_copied_is_said() -> None:
    model = Transformer()
    model.lock = threading.Lock()
    with pytest.raises(ConfigurationError, match="Transformer cannot be copied without its parts: TypeError"):
        bpipe.split_model(model, FOUR)


# Proving a split

NANO = [["tok", "pos", "drop", "h.0"], ["h.1", "h.2"], ["h.3", "head"]]


def test_a_forward_that_does_not_go_well_with_missing_modules_is_caught() -> None:
    model = Nano()
    for missing, message in (
        ("none", "stage 0 of 3 cannot run: TypeError: 'NoneType' object is not callable"),
        ("pass", "stage 1 of 3 cannot run: RuntimeError: The size of tensor"),
    ):
        with pytest.raises(StageError, match=message):
            bpipe.check_split(model, bpipe.split_model(model, NANO, missing=missing), words(2))
    parts = bpipe.split_model(model, NANO)
    for part in parts[1:]:
        part.pos = nn.Embedding(TOKENS, WIDTH)  # runs, and adds positions again
    with pytest.raises(StageError, match=r"the 3 stages do not compute what the model computes: output 0 differs by up to [\d.]+"):
        bpipe.check_split(model, parts, words(2))


def test_a_module_that_is_added_is_replaced_by_what_adds_nothing() -> None:
    model, x, y = Nano().eval(), words(2 * M), words(2 * M, 1)
    parts = bpipe.split_model(model, NANO, missing={"pos": "zero"})
    assert [type(part.pos) for part in parts] == [nn.Embedding, AddsNothing, AddsNothing]
    assert [type(part.drop) for part in parts] == [nn.Dropout, PassThrough, PassThrough]
    bpipe.check_split(model, parts, x)
    expected = gradients_alone(model, M, x, y)
    loopback_gradients = gradients_piped(parts, M, x, y)  # of the tied weight: one parameter here, so both stages' are added up
    tied = {"tok.weight", "head.weight"}
    assert_equal(
        {k: v for k, v in expected.items() if k not in tied}, {k: v for k, v in loopback_gradients.items() if k not in tied}
    )
    # One process adds the two uses of a weight per microbatch, a pipeline all of the head's first: another order of sums.
    torch.testing.assert_close(loopback_gradients["tok.weight"], expected["tok.weight"])


def test_adding_nothing_changes_no_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.tensor([0.0, -0.0, 1.5, float("inf")], dtype=dtype)
        summed = x + AddsNothing()(torch.arange(4))
        assert summed.dtype is dtype and torch.equal(torch.signbit(summed), torch.signbit(x)) and torch.equal(summed, x)


class ByPlace(nn.Module):
    """InputForms up by a layer's place what it does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.factors = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]), [1.0, 2.0, 3.0, 4.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if isinstance(layer, PassThrough) else layer(x) * self.factors[index]
        return x


def test_positions_are_kept_where_asked_for() -> None:
    model, stages, x = ByPlace(), [["layers.0", "layers.1"], ["layers.2", "layers.3"]], torch.randn(2, 4)
    with pytest.raises(StageError, match="do not compute what the model computes"):
        bpipe.check_split(model, bpipe.split_model(model, stages), x)
    bpipe.check_split(model, bpipe.split_model(model, stages, keep_positions=True), x)


class Identical(nn.Module):
    """Does to its input, outside of its modules, what changes no output but every gradient."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.layers = factor, nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.layers[0].requires_grad_(factor == 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.detach() + self.factor * (x - x.detach())


@pytest.mark.parametrize(("factor", "message"), [(1.0, None), (2.0, "layers.1.weight gets another gradient: one of norm")])
def test_gradients_are_checked_too(factor: float, message: str | None) -> None:
    model, x = Identical(factor), torch.randn(2, 4)
    parts = bpipe.split_model(model, [["layers.0", "layers.1"], ["layers.2", "layers.3"]])
    with nullcontext() if message is None else pytest.raises(StageError, match=message):
        bpipe.check_split(model, parts, x)
    assert all(parameter.grad is None for parameter in model.parameters())


class Frozen(nn.Module):
    """Keeps gradients from its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).detach()
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_detached_stage_is_told() -> None:
    model = Frozen()
    with pytest.raises(StageError, match=r"layers.0.weight gets another gradient: one of norm [\d.]+ in the model, and none"):
        bpipe.check_split(model, bpipe.split_model(model, [["stem", "layers.0"], ["layers.1"]]), torch.randn(2, 4))
    model.layers[1].weight.data.fill_(float("nan"))
    bpipe.check_split(model, bpipe.split_model(model, [["stem"], ["layers.0", "layers.1"]]), torch.randn(2, 4))


class Averaging(nn.Module):
    """Assigns a new tensor to its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + x.detach().mean(0)
        for layer in self.layers:
            x = layer(x)
        return x + self.average if len(self.layers) > 1 else x


def test_buffers_that_a_forward_replaces_are_put_back() -> None:
    model = nn.Sequential(Averaging(), nn.Linear(4, 4))
    average = model[0].average
    bpipe.check_split(model, bpipe.split_model(model, [["0"], ["1"]]), torch.randn(2, 4))
    bpipe.measure_layers(model, torch.randn(2, 4), repeats=1)
    assert model[0].average is average and not average.any()


def test_checking_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    model[0].weight.grad = torch.ones(4, 4)
    parts, x = bpipe.split_model(model, [["0", "1"], ["2", "3"], ["4"]]), torch.randn(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, given, gradient = torch.get_rng_state(), x.clone(), model[0].weight.grad
    bpipe.check_split(model, parts, x)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, given) and model[0].weight.grad is gradient


class Sized(nn.Module):
    """Returns the size of what it got, whose numbers a stage may get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        size = x.shape if isinstance(self.layers[0], nn.Linear) else torch.Size([*x.shape, 1])
        for layer in self.layers:
            x = layer(x)
        return x, size


def test_a_size_with_another_length_is_another_size() -> None:
    model = Sized()
    last = deepcopy(model)
    last.layers[0] = nn.Identity()
    first = nn.Sequential(model.layers[0])
    with pytest.raises(StageError, match=r"output 1 is torch.Size\(\[2, 4\]\) of the model"):
        bpipe.check_split(model, [first, last], torch.randn(2, 4))
