"""Distributed checkpoints: saved over some stages, loaded over others, and trained on as if nothing had been in between."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import bpipe
from bpipe.errors import BPipeError, ConfigurationError
from tests.ranks import run_ranks
from tests.training.language import LanguageModel, Pipeline, assert_equal, groups_of, train_alone
from tests.training.test_tied import P, Tied, tied_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized"
    ),  # it is, in the test's own process
]

BEFORE, AFTER = range(2), range(2, 4)
STATISTICS = {"with_statistics": True}
TWO_RANKS = {"2": (2, 2, bpipe.BalancedOneFOneB), "2 x 2": (2, 4, bpipe.Interleaved1F1B), "V": (2, 4, bpipe.ZBV)}


def state_of(pipeline: Pipeline, **options: Any) -> dict[str, Any]:
    return bpipe.training_state(pipeline.modules.values(), pipeline.optimizer, group=pipeline.group, **options)


def saved(rank: int, folder: Path) -> dict[str, Any]:
    """Train over four stages, save on the way, and go on; then resume: what the last steps gave."""
    pipeline = Pipeline(rank, P, **STATISTICS)
    dcp.save(state_of(pipeline), checkpoint_id=folder / "fresh")
    pipeline.train(BEFORE)
    for group in pipeline.optimizer.param_groups:
        group["lr"] *= 0.5
    dcp.save({**state_of(pipeline), "step": 2}, checkpoint_id=folder / "trained")
    went_on = pipeline.train(AFTER), pipeline.values()
    return {"went on": went_on, "resumed": resumed(rank, folder / "trained", 4, 4, bpipe.OneFOneB)}


def resumed(rank: int, folder: Path, num_ranks: int, num_stages: int, schedule: type[bpipe.Schedule]) -> Any:
    pipeline = Pipeline(rank, num_ranks, num_stages, schedule, **STATISTICS)
    with torch.no_grad():
        for module in pipeline.modules.values():
            for parameter in module.parameters():
                parameter.zero_()
    state = {**state_of(pipeline), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 2 and not pipeline.optimizer.param_groups[0]["params"][0].grad
    return pipeline.train(AFTER), pipeline.values()


def two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    return {**{way: resumed(rank, folder, *how) for way, how in TWO_RANKS.items()}, "names": names_of(rank)}


def merged(parts: Any) -> dict[str, torch.Tensor]:
    return {name: value for part in parts for name, value in part.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], dict[str, torch.Tensor], list[Any]]:
    """A folder with the checkpoint, what went on over four stages, and each rank's resumed run."""
    folder = tmp_path_factory.mktemp("checkpoint")
    ranks = run_ranks(saved, P, folder)
    seen, values = zip(*(of_rank["went on"] for of_rank in ranks))
    return folder, seen[0], merged(values), [of_rank["resumed"] for of_rank in ranks]


@pytest.fixture(scope="module")
def on_two_ranks(run: Any) -> dict[str, list[Any]]:
    ranks = run_ranks(two_ranks, 2, run[0] / "trained")
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


def test_saving_changes_nothing(run: Any) -> None:
    """Neither on the way nor before the first step: a single process that never saved ends with the same bits."""
    whole = LanguageModel(**STATISTICS)
    optimizer = torch.optim.AdamW(groups_of([whole]))
    list(train_alone(whole, BEFORE, optimizer))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    seen = list(train_alone(whole, AFTER, optimizer))
    assert [loss for loss, _ in seen] == [loss for loss, _ in run[1]]
    assert_equal(run[2], dict(whole.state_dict()))


def assert_resumed(run: Any, ranks: list[Any]) -> None:
    assert all(seen == run[1] for seen, _ in ranks)
    assert_equal(merged(values for _, values in ranks), run[2])


def test_resumed_over_four_stages_and_one(run: Any) -> None:
    assert_resumed(run, run[3])
    assert_resumed(run, [resumed(0, run[0] / "trained", 1, 1, bpipe.OneFOneB)])


@pytest.mark.parametrize("way", TWO_RANKS)
def test_resumed_over_two_ranks(run: Any, on_two_ranks: dict[str, list[Any]], way: str) -> None:
    assert_resumed(run, on_two_ranks[way])


def plain_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], StateDictOptions]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(module, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}, options


def test_torch_alone_reads_it(run: Any) -> None:
    """Names and layout are those of the original model, and of torch's own functions."""
    folder, seen, values, _ = run
    whole = LanguageModel(**STATISTICS)
    optimizer = torch.optim.AdamW(groups_of([whole]))
    state, options = plain_state(whole, optimizer)
    names = {name for name in dcp.FileSystemReader(folder / "trained").read_metadata().state_dict_metadata if name != "step"}
    assert names == {f"{part}.{name}" for part, values in state.items() for name in values}
    dcp.load(state, checkpoint_id=folder / "trained")
    set_state_dict(whole, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    assert [loss for loss, _ in train_alone(whole, AFTER, optimizer)] == [loss for loss, _ in seen]
    assert_equal(dict(whole.state_dict()), values)


def test_a_run_that_has_not_begun(run: Any) -> None:
    """Saved before the first step and loaded: the first step is the first."""
    whole, other = LanguageModel(**STATISTICS), LanguageModel(**STATISTICS)
    expected = list(train_alone(whole, BEFORE))
    optimizer = torch.optim.AdamW(groups_of([other]))
    dcp.load(bpipe.training_state(other, optimizer), checkpoint_id=run[0] / "fresh")
    assert list(train_alone(other, BEFORE, optimizer)) == expected
    assert_equal(dict(other.state_dict()), dict(whole.state_dict()))


# Tied weights.


def of_tied(rank: int, folder: Path) -> tuple[list[Any], dict[str, torch.Tensor], list[Any]]:
    """Save with copies on both ends; then load what a single process has saved with one weight."""
    pipeline = Pipeline(rank, P, model=Tied)
    tied = tied_of(pipeline)
    tied.broadcast()
    pipeline.train(BEFORE, tied)
    dcp.save(state_of(pipeline, tied=tied), checkpoint_id=folder / "of copies")
    seen, values = pipeline.train(AFTER, tied), pipeline.values()
    dcp.load(state_of(pipeline, tied=tied), checkpoint_id=folder / "of one")
    return seen, values, pipeline.train(AFTER, tied)


def test_tied_weights_have_one_state(tmp_path: Path) -> None:
    """The order of one addition a microbatch is another in a single process, see test_tied: hence the tolerance."""
    whole = Tied()
    optimizer = torch.optim.AdamW(groups_of([whole]))
    list(train_alone(whole, BEFORE, optimizer))
    state, _ = plain_state(whole, optimizer)
    dcp.save(state, checkpoint_id=tmp_path / "of one")
    of_one = list(train_alone(whole, AFTER, optimizer))
    seen, values, again = zip(*run_ranks(of_tied, P, tmp_path))
    assert torch.equal(merged(values)["embedding.weight"], merged(values)["head.weight"])
    torch.testing.assert_close(again[0], of_one, rtol=1e-5, atol=1e-6)
    other = Tied()
    optimizer = torch.optim.AdamW(groups_of([other]))
    dcp.load(bpipe.training_state(other, optimizer), checkpoint_id=tmp_path / "of copies")
    torch.testing.assert_close(list(train_alone(other, AFTER, optimizer)), seen[0], rtol=1e-5, atol=1e-6)


# What is refused.


def told(call: Any) -> str:
    try:
        call()
    except BPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def names_under_wrappers(rank: int) -> tuple[set[str], set[str]]:
    """The names in the model's state and in the optimizer's, of a wrapped stage that has a "module" of its own, too."""
    group = [dist.new_group([one]) for one in range(2)][rank]
    block = DistributedDataParallel(nn.Sequential(OrderedDict(module=nn.Linear(1, 1))), process_group=group)
    stage = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), block), process_group=group)
    state = bpipe.training_state(stage, torch.optim.SGD(stage.parameters(), lr=0.1), group=group)
    settings = state["optimizer"].state_dict()
    return set(state["model"].state_dict()), {key.split(".", 1)[1].removesuffix(".lr") for key in settings if key.endswith(".lr")}


def names_of(rank: int) -> dict[str, Any]:
    """Stages whose names are not the model's, and stages that hold the same."""
    torch.manual_seed(rank)
    renamed, alike = nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(3)
    return {
        "wrapped": names_under_wrappers(rank),
        "renamed": told(lambda: bpipe.training_state(renamed)["model"].state_dict()),
        "alike": told(lambda: bpipe.training_state(alike)["model"].state_dict()),
        "twice on a rank": told(lambda: bpipe.training_state([alike, nn.BatchNorm1d(4 if rank else 3)])["model"].state_dict()),
    }


def test_two_tensors_of_one_name_are_refused(on_two_ranks: dict[str, list[Any]]) -> None:
    for seen in on_two_ranks["names"]:
        text = "ConfigurationError: 2 names stand for different tensors of several stages, among them '0.bias', of which"
        assert seen["renamed"].startswith(text)
        assert seen["alike"] == "nothing"
        assert "'bias'" in seen["twice on a rank"]


def test_names_of_data_parallel_modules_are_the_model_s(on_two_ranks: dict[str, list[Any]]) -> None:
    expected = {"0.weight", "0.bias", "1.module.weight", "1.module.bias"}
    assert [seen["wrapped"] for seen in on_two_ranks["names"]] == [(expected, expected)] * 2


def test_other_groups_and_other_modules_are_refused() -> None:
    module = LanguageModel()
    optimizer = torch.optim.AdamW(module.parameters())
    flat = bpipe.training_state(module, torch.optim.AdamW(groups_of([module])))["optimizer"].state_dict()
    with pytest.raises(
        ConfigurationError, match=r"another parameter group than others of its group here: {.*'lr': \(0\.02, 0\.01\)"
    ):
        bpipe.training_state(module, optimizer)["optimizer"].load_state_dict(flat)
    with pytest.raises(ConfigurationError, match="parameters that are in none of the modules"):
        bpipe.training_state(LanguageModel(1, 2), optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), amsgrad=True),
    ],
)
def test_other_optimizers(make: Any, tmp_path: Path) -> None:
    whole, other = LanguageModel(), LanguageModel()
    optimizer, others = make(whole.parameters()), make(other.parameters())
    whole.blocks["0"].norm1.bias.requires_grad_(False)
    other.blocks["0"].norm1.bias.requires_grad_(False)
    list(train_alone(whole, BEFORE, optimizer))
    optimizer.zero_grad()
    dcp.save(bpipe.training_state(whole, optimizer), checkpoint_id=tmp_path)
    dcp.load(bpipe.training_state(other, others), checkpoint_id=tmp_path)
    assert list(train_alone(other, AFTER, others)) == list(train_alone(whole, AFTER, optimizer))
    assert_equal(dict(other.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.AdamW])
def test_a_first_step_after_loading(make: Any, tmp_path: Path) -> None:
    """Of these some have states that are not zero before any step, and depend on the learning rate."""
    whole, other = LanguageModel(), LanguageModel()
    optimizer, others = make(whole.parameters(), lr=0.01), make(other.parameters(), lr=0.01)
    dcp.save(bpipe.training_state(whole, optimizer), checkpoint_id=tmp_path)
    dcp.load(bpipe.training_state(other, others), checkpoint_id=tmp_path)
    assert list(train_alone(other, BEFORE, others)) == list(train_alone(whole, BEFORE, optimizer))
    assert_equal(dict(other.state_dict()), dict(whole.state_dict()))


class Together:
    """Several optimizers that step one after the other."""

    def __init__(self, optimizers: Any) -> None:
        self.all = list(optimizers.values() if isinstance(optimizers, dict) else optimizers)

    def zero_grad(self) -> None:
        for one in self.all:
            one.zero_grad()

    def step(self) -> None:
        for one in self.all:
            one.step()


def halves(whole: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices between the layers, and the rest."""
    matrices = [one for name, one in whole.named_parameters() if one.ndim == 2 and "block" in name]
    known = set(map(id, matrices))
    return matrices, [one for one in whole.parameters() if id(one) not in known]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


SEVERAL: dict[str, Any] = {
    "muon and adamw": lambda m, rest: [torch.optim.Muon(m, lr=0.01), torch.optim.AdamW(rest, lr=0.01)],
    "by name": lambda m, rest: {"matrices": sgd(m), "rest": torch.optim.AdamW(rest, lr=0.01)},
    "a tuple of two of a kind": lambda m, rest: (sgd(m), sgd(rest)),
    "one without states": lambda m, rest: [torch.optim.SGD(m, lr=0.1), torch.optim.Adagrad(rest, lr=0.01)],
    "one for each parameter": lambda m, rest: [sgd([one]) for one in (*m, *rest)],
    "one that has nothing to do": lambda m, rest: [sgd([*m, *rest]), torch.optim.SGD([{"params": []}], lr=0.1)],
}


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("kind", SEVERAL)
def test_several_optimizers(kind: str, begun: bool, tmp_path: Path) -> None:
    """As torch's own functions save several; what is loaded goes on as what was saved."""
    models = LanguageModel(), LanguageModel()
    optimizers, others = (SEVERAL[kind](*halves(model)) for model in models)
    list(train_alone(models[0], BEFORE if begun else (), Together(optimizers)))
    Together(optimizers).zero_grad()
    dcp.save(bpipe.training_state(models[0], optimizers), checkpoint_id=tmp_path)
    dcp.load(bpipe.training_state(models[1], others), checkpoint_id=tmp_path)
    ran = [list(train_alone(model, AFTER, Together(both))) for model, both in zip(models, (optimizers, others))]
    assert ran[0] == ran[1]
    assert_equal(dict(models[0].state_dict()), dict(models[1].state_dict()))


@pytest.mark.parametrize("saved_as", ["one", "two"])
def test_one_optimizer_goes_on_as_two_and_two_as_one(saved_as: str, tmp_path: Path) -> None:
    models = LanguageModel(), LanguageModel()
    one, two = sgd(models[0].parameters()), [sgd(half) for half in halves(models[1])]
    for model, optimizers in zip(models, ([one], two)):
        list(train_alone(model, BEFORE, Together(optimizers)))
        Together(optimizers).zero_grad()
    expected, loaded = (0, 1) if saved_as == "one" else (1, 0)
    both = one, two
    state, other = (bpipe.training_state(models[at], both[at]) for at in (expected, loaded))
    assert state["optimizer"].state_dict().keys() == other["optimizer"].state_dict().keys()
    dcp.save(state, checkpoint_id=tmp_path)
    for optimizer in ([one], two)[loaded]:
        optimizer.state.clear()
    dcp.load(bpipe.training_state(models[loaded], both[loaded]), checkpoint_id=tmp_path)
    ran = [list(train_alone(model, AFTER, Together(given))) for model, given in zip(models, ([one], two))]
    assert ran[0] == ran[1]


def test_what_several_optimizers_cannot_be() -> None:
    model = LanguageModel()
    matrices, rest = halves(model)
    with pytest.raises(ConfigurationError, match=r"is in several optimizers, as are \d+ more"):
        bpipe.training_state(model, [sgd(matrices), sgd(model.parameters())])
    for wrong in ("adam", 3, [sgd(rest), None], model):
        with pytest.raises(ConfigurationError, match=r"give a torch.optim.Optimizer, or several in a list or a dict"):
            bpipe.training_state(model, wrong)


def test_a_group_that_has_nothing_on_this_stage(tmp_path: Path) -> None:
    whole = LanguageModel()
    optimizer = torch.optim.AdamW([{"params": list(whole.parameters())}, {"params": [], "lr": 0.5}])
    list(train_alone(whole, BEFORE, optimizer))
    dcp.save(bpipe.training_state(whole, optimizer), checkpoint_id=tmp_path)
    other = LanguageModel()
    again = torch.optim.AdamW([{"params": [], "lr": 0.5}, {"params": list(other.parameters()), "lr": 0.1}])
    dcp.load(bpipe.training_state(other, again), checkpoint_id=tmp_path)
    assert [group["lr"] for group in again.param_groups] == [0.5, 1e-3]
    assert list(train_alone(other, AFTER, again)) == list(train_alone(whole, AFTER, optimizer))
