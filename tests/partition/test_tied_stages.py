"""Weights that stages of a cut model share: on several processes they train as one weight does, or are refused.

Each case is a model whose stages share something, in another way each, and how it is cut.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import bpipe
from bpipe.errors import AgreementError, BPipeError, ConfigurationError, RankFailedError
from bpipe.model.ties import shared_by
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

M, WORDS, WIDTH, STEPS = 2, 5, 3, 2


class Language(nn.Module):
    """An embedding, a layer and a head that has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.middle(self.embedding(x)))
        return output


class View(Language):
    """Two parameters over the same memory."""

    def tie(self) -> None:
        self.head.weight = nn.Parameter(self.embedding.weight.detach())


class PartOfAnother(Language):
    """The layer's weight is some rows of the embedding's."""

    def tie(self) -> None:
        self.middle.weight = nn.Parameter(self.embedding.weight.detach()[1 : 1 + WIDTH])


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Parametrized(Language):
    """What a parametrization computes the weights from is shared."""

    def tie(self) -> None:
        for module in (self.embedding, self.head):
            parametrize.register_parametrization(module, "weight", Doubled())
        self.head.parametrizations.weight.original = self.embedding.parametrizations.weight.original


class Scaled(nn.Module):
    """A parameter of the model itself, which both stages use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


class UsedTwice(nn.Module):
    """The same module comes first and last, under two names."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last, self._cut = self.first, cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x))
        if self._cut:
            bpipe.pipe_split()
        output: torch.Tensor = self.last(x)
        return output


class Statistics(UsedTwice):
    """A norm without weights, whose statistics are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.first, self.last = nn.Sequential(self.first, norm), nn.Sequential(norm, self.last)


class Entry(nn.Module):
    """Two lists of parameters have an entry in common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Parameter(torch.randn(WIDTH))
        self.a, self.b = nn.ParameterList([shared]), nn.ParameterDict({"same": shared})
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, (*self.a, *self.b.values())):
            x = layer(x) * scale
        return x


def by_names(*stages: Sequence[str]) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: bpipe.split_model(model, [list(names) for names in stages])


def wrapped(model: nn.Module) -> list[nn.Module]:
    """A wrapper hides that a stage was cut."""
    return [nn.Sequential(part) for part in ENDS(model)]


def by_torch(model: nn.Module) -> Any:
    cuts = {} if isinstance(model, UsedTwice) else {"head": bpipe.SplitPoint.BEGINNING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export
        return bpipe.pipeline(model, mb_args=(batch(model)[0].chunk(M)[0],), split_spec=cuts or None)


def by_auto(model: nn.Module) -> Any:
    x, y = batch(model)
    return bpipe.auto(
        model,
        x,
        loss_of,
        target=y,
        layers=["embedding", "middle", "head"],
        microbatch_sizes=[4 // M],
        stages_per_rank=[1],
        options=bpipe.Options(effort=0),
    )


def of_transformers() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": WORDS, "num_hidden_layers": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **sizes))
    return model


# They depend on the order of microbatches over all stages, so that they stay refused.
STATISTICS = "statistics of a norm without weights"

# An optimizer steps each of two parameters over the same memory by itself, so that no sum of their gradients is what it makes.
MEMORY = ("two parameters over the same memory", "a part of another parameter")


class Case(NamedTuple):
    """How a model is made and cut into two stages."""

    model: Callable[[], nn.Module]
    cut: Callable[[nn.Module], Any]


ENDS = by_names(["embedding", "middle"], ["head"])
CASES = {
    "an embedding and a head": Case(Language, ENDS),
    "two parameters over the same memory": Case(View, ENDS),
    "a part of another parameter": Case(PartOfAnother, by_names(["embedding"], ["middle", "head"])),
    "what a parametrization takes": Case(Parametrized, ENDS),
    "a parameter that two stages name": Case(Scaled, by_names(["layers.0", "scale"], ["layers.1", "scale"])),
    "a module that two stages have": Case(UsedTwice, by_names(["first", "middle"], ["last"])),
    STATISTICS: Case(Statistics, by_names(["first", "middle"], ["last"])),
    "entries of a list and a dict": Case(Entry, by_names(["layers.0", "a.0"], ["layers.1", "b.same"])),
    "inside of wrappers": Case(Language, wrapped),
    "split_transformer": Case(of_transformers, lambda model: bpipe.split_transformer(model, 2, prove=False)),
    "torch's pipeline()": Case(Language, by_torch),
    "torch's pipe_split() and a module called twice": Case(lambda: UsedTwice(cut=True), by_torch),
    "auto": Case(Language, by_auto),
}


SLOW = ("split_transformer", "torch's pipeline()", "torch's pipe_split() and a module called twice", "auto")


def batch(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    takes_words = any(isinstance(one, nn.Embedding) for one in model.modules())
    if not takes_words:
        return torch.randn(4, WIDTH, generator=generator), torch.randint(0, WIDTH, (4,), generator=generator)
    words = torch.randint(0, WORDS, (4, 2), generator=generator)
    return words, (words + 1) % WORDS


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def alone(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that a single process trains."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(one.chunk(M) for one in batch(model))):
            output = model(x)
            (loss_of(getattr(output, "logits", output), y) / M).backward()
        optimizer.step()
    return {name: one.detach() for name, one in state_of(model).items()}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one for name, one in module.state_dict(keep_vars=True).items() if one.is_floating_point()}


def schedule_of(parts: Any, rank: int) -> tuple[Any, nn.Module]:
    """The schedule of a model that was cut, and this rank's part."""
    if isinstance(parts, bpipe.Schedule):
        return parts, parts.modules[0]
    if isinstance(parts, bpipe.Pipe):
        stage = parts.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    else:
        stage = bpipe.PipelineStage(parts[rank], rank, 2, "cpu")
    return bpipe.OneFOneB(stage, M, loss_fn=loss_of), stage.submod


def trained(rank: int, case: Case, ties: Callable[[nn.Module], Any] | None = None) -> dict[str, torch.Tensor] | BPipeError:
    """The weights of this rank's part after some steps, or the error that the first of these raises."""
    model = case.model()
    x, y = batch(model)
    schedule, part = schedule_of(case.cut(model), rank)
    tied, optimizer = None if ties is None else ties(part), torch.optim.SGD(part.parameters(), lr=0.5)
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            schedule.step(x, target=y, return_outputs=False)
            if tied is not None:
                tied.sum_grads()
            optimizer.step()
    except BPipeError as error:
        return error.with_traceback(None)
    finally:
        schedule.close()
    return {name: one.detach() for name, one in state_of(part).items()}


def tied_weights(part: nn.Module) -> bpipe.TiedWeights:
    weight = next(one for name, one in part.named_parameters() if name in ("embedding.weight", "head.weight"))
    tied = bpipe.TiedWeights({"embedding.weight": weight})
    tied.broadcast()
    return tied


def everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(rank, case) for name, case in CASES.items() if name not in SLOW}
    found["tied"] = trained(rank, CASES["an embedding and a head"], tied_weights)
    found["frozen"] = trained(rank, Case(lambda: frozen(Language()), ENDS))
    return found


def frozen(model: Language) -> nn.Module:
    model.embedding.weight.requires_grad_(False)
    return model


def slow_ones(rank: int) -> dict[str, Any]:
    return {name: trained(rank, CASES[name]) for name in SLOW}


@cache
def outcomes(name: str) -> list[Any]:
    """What a case has led to on each rank; cases run together, because processes take long to start."""
    ranks = run_together(name in SLOW)
    return [found[name] for found in ranks]


@cache
def run_together(are_slow: bool) -> list[dict[str, Any]]:
    return run_ranks(slow_ones if are_slow else everything, 2)


def assert_trained(expected: Mapping[str, torch.Tensor], found: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for part in found:
        for name, value in part.items():
            known = expected[name.removeprefix("0.").partition("@")[0] if name not in expected else name]
            torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*MEMORY, STATISTICS])
def test_each_process_would_train_its_own_copy(name: str) -> None:
    """So the first step is refused before anything is sent, on both ranks, with what is shared and the way out."""
    for found in outcomes(name):
        assert isinstance(found, ConfigurationError), found
        assert "one tensor of several stages" in str(found) and ("TiedWeights" in str(found) or "norm" in name)


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*MEMORY, STATISTICS)])
def test_stages_of_two_processes_train_a_shared_weight_as_one_process_does(name: str) -> None:
    for found in outcomes(name):
        if isinstance(found, BPipeError):
            raise found
    assert_trained(alone(CASES[name].model()), outcomes(name))


@pytest.mark.parametrize("name", ["tied", "frozen"])
def test_what_is_taken_care_of_trains(name: str) -> None:
    """TiedWeights sum the gradients, and a frozen weight has none."""
    model = Language() if name == "tied" else frozen(Language())
    assert_trained(alone(model), outcomes(name))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].cut not in (by_torch, by_auto)])
def test_one_process_has_one_weight(name: str) -> None:
    """In a loopback the stages share what they shared in the model."""
    case, loopback = CASES[name], bpipe.Loopback(2)
    model = case.model()
    parts = case.cut(model)
    stages = [bpipe.PipelineStage(part, index, 2, "cpu", group=loopback.rank(index)) for index, part in enumerate(parts)]
    schedules = [bpipe.GPipe(stage, M, loss_fn=loss_of) for stage in stages]
    x, y = batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loopback.step(schedules, x, target=y)
        optimizer.step()
    expected = alone(case.model())
    if name == STATISTICS:  # each stage's microbatches follow one another, not each other's
        expected = {key: value for key, value in expected.items() if not key.rpartition(".")[2].startswith("running")}
    assert_trained(expected, [{key: one for key, one in state_of(model).items() if key in expected}])


MATRIX = torch.arange(24.0).reshape(4, 6)
# Views of one matrix, of a stage each, and which stages are tied.
VIEWS: dict[str, tuple[list[torch.Tensor], list[tuple[int, ...]]]] = {
    "columns beside each other": ([MATRIX[:, :3], MATRIX[:, 3:]], []),
    "every other element": ([MATRIX.flatten()[::2], MATRIX.flatten()[1::2]], []),
    "other rows": ([MATRIX[:2], MATRIX[2:]], []),
    "parts of a transposed one": ([MATRIX.t()[:4], MATRIX.t()[4:]], []),
    "a column in common": ([MATRIX[:, :4], MATRIX[:, 3:]], [(0, 1)]),
    "a column and a row": ([MATRIX[:, 5], MATRIX[3]], [(0, 1)]),
    "the whole, and columns": ([MATRIX[:, :3], MATRIX[:, 3:], MATRIX], [(0, 1, 2)]),
    "two pairs among each other": ([MATRIX[:, :3], MATRIX[:, 3:], MATRIX[:, 5], MATRIX[:, 0]], [(0, 3), (1, 2)]),
    "other types of elements": ([MATRIX[:, :3], MATRIX.view(torch.bfloat16)[:, 6:], MATRIX.view(torch.bfloat16)[:, 4:6]], [(0, 2)]),
    "nothing": ([MATRIX[:0], MATRIX[:0]], []),
}


@pytest.mark.parametrize("name", VIEWS)
def test_parameters_are_tied_by_the_bytes_that_they_share(name: str) -> None:
    """Not by the memory between their first byte and their last one: fused weights lie among each other."""
    views, tied = VIEWS[name]
    parts = [nn.ParameterDict({"w": nn.Parameter(view)}) for view in views]
    assert sorted(tuple(sorted(tie.names)) for tie in shared_by(parts)) == tied


def test_a_rank_between_hears_of_it() -> None:
    """A rank without the shared weight ends, too, and does not wait for the others."""
    first, middle, last = run_ranks(refused_between, 3, expect_errors=True)
    assert isinstance(first, ConfigurationError) and isinstance(last, ConfigurationError)
    assert isinstance(middle, (RankFailedError, AgreementError)) and "one tensor of several stages" in str(middle)


def refused_between(rank: int) -> Any:
    part = by_names(["embedding"], ["middle"], ["head"])(View())[rank]
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 3, "cpu"), 4, loss_fn=loss_of)
    x, y = batch(View())
    try:
        schedule.step(x, target=y)
    except BPipeError as error:
        return error.with_traceback(None)
    finally:
        schedule.close()


@pytest.mark.parametrize("name", ["an embedding and a head", "inside of wrappers", "a part of another parameter", STATISTICS])
def test_copies_on_the_ranks_of_a_loopback_are_refused(name: str) -> None:
    """As of parts that a test copies for each rank: before, each stage trained its own without a word."""
    case, loopback = CASES[name], bpipe.Loopback(2)
    model = case.model()
    parts = [copy.deepcopy(part) for part in case.cut(model)]
    stages = [bpipe.PipelineStage(part, index, 2, "cpu", group=loopback.rank(index)) for index, part in enumerate(parts)]
    schedules = [bpipe.GPipe(stage, M, loss_fn=loss_of) for stage in stages]
    x, y = batch(model)
    with pytest.raises(ConfigurationError, match=r"one tensor of several stages.*(have copies of it now|a norm of its own)"):
        loopback.step(schedules, x, target=y)
    assert loopback.eval(schedules, x) is not None
    for stage, part in zip(stages, case.cut(model)):
        stage.submod = part
    assert loopback.step(schedules, x, target=y) is not None


def test_copies_on_one_rank_are_refused() -> None:
    """Two stages of a rank that shared a weight, until the user copied one of them."""
    first, second = ENDS(Language())
    second = copy.deepcopy(second)
    loopback = bpipe.Loopback(1)
    stages = [bpipe.PipelineStage(part, index, 2, "cpu", group=loopback.rank(0)) for index, part in enumerate((first, second))]
    schedule = bpipe.Interleaved1F1B(stages, M, loss_fn=loss_of)
    x, y = batch(first)
    with pytest.raises(ConfigurationError, match="have copies of it now"):
        schedule.step(x, target=y)
