"""Parts of a model that share weights, on several processes: they train as a single process does, or are refused with a way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn import functional as F
from torch.nn.utils import parametrize

import bpipe
from bpipe.errors import BPipeError
from tests.ranks import run_ranks

W, B, M = 4, 8, 4


class Chain(nn.Module):
    """Layers one after the other, under the names 0 to 3."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        for i, layer in enumerate(layers):
            self.add_module(f"l{i}", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Adapter(nn.Module):
    """A layer that uses a matrix which others may use, too, beside one of its own."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(W, W), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.shared


class Times(nn.Module):
    """A parametrization by a factor that it may share."""

    def __init__(self, factor: nn.Parameter) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


class Hidden(nn.Module):
    """A layer that keeps another one's where `parameters()` does not find it."""

    def __init__(self, other: nn.Linear, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(W, W), how
        self.kept = {
            "a list": [other],
            "a dict": {"other": other},
            "an object": SimpleNamespace(other=other),
            "weights in a tuple": (other.weight, other.bias),
            "a function": lambda x: other(x),
            "a frozen layer in a list": [other.requires_grad_(False)] if how.startswith("a frozen") else (),
            "a list that is not used": [other],
        }[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if isinstance(self.kept, list):
            return y if "not used" in self.how else y + self.kept[0](x)
        if isinstance(self.kept, tuple):
            return y + F.linear(x, *self.kept)
        if callable(self.kept):
            return y + self.kept(x)
        return y + (self.kept["other"] if isinstance(self.kept, dict) else self.kept.other)(x)


def _chain() -> list[nn.Module]:
    return [nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W), nn.Linear(W, W)]


def _one_block_everywhere() -> nn.Module:
    layers = _chain()
    layers[3] = layers[0]  # as ALBERT's layers
    return Named(layers)


class Named(nn.Module):
    """Layers by hand, because a `Chain` of one module in two places has one child."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x))))  # type: ignore[no-any-return]


def _bias_alone() -> nn.Module:
    layers = _chain()
    layers[3].bias = layers[0].bias
    return Named(layers)


def _transposed_memory() -> nn.Module:
    layers = _chain()
    layers[3].weight = nn.Parameter(layers[0].weight.data.t())
    return Named(layers)


def _part_of_its_memory() -> nn.Module:
    layers = _chain()
    layers[3] = nn.Linear(W, 2)
    layers[3].weight = nn.Parameter(layers[0].weight.data[:2])
    return Named([*layers[:3], nn.Sequential(layers[3], nn.Linear(2, W))])


def _shared_adapter(*, trains: bool = True) -> nn.Module:
    shared = nn.Parameter(torch.randn(W, W), requires_grad=trains)
    return Named([Adapter(shared), nn.Tanh(), nn.Linear(W, W), Adapter(shared)])


def _parametrized() -> nn.Module:
    layers, factor = _chain(), nn.Parameter(torch.full((), 0.5))
    for layer in (layers[0], layers[3]):
        parametrize.register_parametrization(layer, "weight", Times(factor))
    return Named(layers)


def _original_shared() -> nn.Module:
    layers = _chain()
    for layer in (layers[0], layers[3]):
        parametrize.register_parametrization(layer, "weight", nn.Tanh())
    layers[3].parametrizations.weight.original = layers[0].parametrizations.weight.original  # type: ignore[union-attr]
    return Named(layers)


def _hidden(how: str) -> nn.Module:
    layers = _chain()
    layers[3] = Hidden(layers[0], how)  # type: ignore[arg-type]
    return Named(layers)


def _norm_of_both() -> nn.Module:
    norm = nn.BatchNorm1d(W)
    return Named([nn.Sequential(nn.Linear(W, W), norm), nn.Tanh(), nn.Linear(W, W), nn.Sequential(norm, nn.Linear(W, W))])


SUMMED: dict[str, Callable[[], nn.Module]] = {
    "one block in two places": _one_block_everywhere,
    "a bias alone": _bias_alone,
    "an adapter's matrix": _shared_adapter,
    "the factor of parametrizations": _parametrized,
    "the original of parametrized weights": _original_shared,
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "transposed memory under two weights": _transposed_memory,
    "two rows of another weight's memory": _part_of_its_memory,
    "a norm and its statistics": _norm_of_both,
}
HIDDEN = {how: partial(_hidden, how) for how in ("a list", "a dict", "an object", "weights in a tuple", "a function")}
FINE: dict[str, Callable[[], nn.Module]] = {
    "a frozen matrix of all": lambda: _shared_adapter(trains=False),
    **{how: partial(_hidden, how) for how in ("a frozen layer in a list", "a list that is not used")},
    **SUMMED,
}
MODELS = {**REFUSED, **HIDDEN, **FINE}
NAMES = [["a", "b"], ["c", "d"]]


def _cuts(rank: int, names: list[str]) -> dict[str, str]:
    """For each model that is cut: 'same' as in a single process, 'other', or what is said, and whether a forward had run."""
    found = {}
    for name in names:
        make = MODELS[name]
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(0)
        whole = make()
        x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
        ran: list[int] = []
        try:
            part = bpipe.split_model(model, NAMES)[rank]
            part.register_forward_hook(lambda *_, ran=ran: ran.append(1))
            stage = bpipe.PipelineStage(part, rank, 2, "cpu")
            schedule = bpipe.OneFOneB(stage, M, loss_fn=F.mse_loss)
            schedule.step(x, target=x)
            for rows in x.chunk(M):
                (F.mse_loss(whole(rows), rows) / M).backward()
            right = dict(whole.named_parameters(remove_duplicate=False))
            same = all(_are_close(p.grad, right[n].grad) for n, p in part.named_parameters())
            found[name] = "same" if same else "other"
            schedule.close()
        except BPipeError as error:
            found[name] = f"{'after a forward, ' if ran else ''}{error}"
        F.mse_loss(model(x), x).backward()  # what a step has guarded, it guards no longer
    return found


def _are_close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.allclose(one, other, atol=1e-6)


def test_what_split_model_s_parts_share_is_refused_before_the_first_forward() -> None:
    """Memory, statistics: the error speaks of `TiedWeights` or of the statistics, on all ranks."""
    for rank in run_ranks(_cuts, 2, [*REFUSED]):
        assert rank.keys() == REFUSED.keys()
        for name, said in rank.items():
            assert "TiedWeights" in said or "statistics" in said or "shar" in said, (name, said)
            assert "after a forward" not in said, (name, said)


def test_what_split_model_s_parts_share_otherwise_trains_as_in_a_single_process() -> None:
    for rank in run_ranks(_cuts, 2, [*FINE]):
        assert rank == dict.fromkeys(FINE, "same")


def test_a_layer_that_another_stage_keeps_hidden_is_refused_where_it_gets_a_gradient() -> None:
    """`self.others = [layer]`, which hides it from `parameters()`: the other stage's process would train a copy of it."""
    for rank in run_ranks(_cuts, 2, [*HIDDEN]):
        assert rank.keys() == HIDDEN.keys()
        for name, said in rank.items():
            assert "TiedWeights" in said and "of stage 0 got a gradient on stage 1" in said, (name, said)


def test_what_torch_s_pipeline_cuts_apart_trains_or_is_refused_before_the_first_forward() -> None:
    """torch's own tracer, whose parts have names of their own; what it refuses by itself is not cut."""
    for rank in run_ranks(_cuts_by_torch, 2):
        for name, said in rank.items():
            is_refused = "TiedWeights" in said or "statistics" in said or "shar" in said or said.startswith("torch:")
            assert is_refused if name in REFUSED else said == "it trains", (name, said)


def _cuts_by_torch(rank: int) -> dict[str, str]:
    found = {}
    for name, make in {**SUMMED, **REFUSED}.items():
        torch.manual_seed(0)
        x = torch.randn(B, W)
        try:
            pipe = pipeline(make(), (torch.randn(B // M, W),), split_spec={"c": SplitPoint.BEGINNING})
        except Exception as error:
            found[name] = f"torch: {error}"
            continue
        try:
            schedule = bpipe.OneFOneB(pipe.build_stage(rank, torch.device("cpu")), M, loss_fn=F.mse_loss)
            schedule.step(x, target=x)
            schedule.close()
            found[name] = "it trains"
        except BPipeError as error:
            found[name] = str(error)
    return found


def _trained(rank: int) -> dict[str, bool]:
    """With `TiedWeights`: whether three steps of training are those of a single process."""
    found = {}
    for name in ("one block in two places", "a bias alone", "an adapter's matrix", "the factor of parametrizations"):
        torch.manual_seed(0)
        part = bpipe.split_model(SUMMED[name](), NAMES)[rank]
        torch.manual_seed(0)
        whole = SUMMED[name]()
        x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
        shared = {
            "one block in two places": lambda m: {
                "weight": (m.a if rank == 0 else m.d).weight,
                "bias": (m.a if rank == 0 else m.d).bias,
            },
            "a bias alone": lambda m: {"bias": (m.a if rank == 0 else m.d).bias},
            "an adapter's matrix": lambda m: {"shared": (m.a if rank == 0 else m.d).shared},
            "the factor of parametrizations": lambda m: {"f": (m.a if rank == 0 else m.d).parametrizations.weight[0].factor},
        }[name](part)
        tied = bpipe.TiedWeights(shared)
        schedule = bpipe.OneFOneB(bpipe.PipelineStage(part, rank, 2, "cpu"), M, loss_fn=F.mse_loss)
        ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (part, whole))
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            schedule.step(x, target=x)
            tied.sum_grads()
            ours.step()
            for rows in x.chunk(M):
                (F.mse_loss(whole(rows), rows) / M).backward()
            theirs.step()
        right = whole.state_dict()
        found[name] = all(torch.allclose(value, right[key], atol=1e-6) for key, value in part.state_dict().items())
        schedule.close()
    return found


def test_with_tied_weights_parts_train_as_a_single_process() -> None:
    """The way out works for each of them."""
    for rank in run_ranks(_trained, 2):
        assert all(rank.values()), rank


def _autos(rank: int) -> dict[str, str]:
    found = {}
    for name in ("a bias alone", "transposed memory under two weights", "an adapter's matrix"):
        torch.manual_seed(0)
        model = nn.Sequential(*{**SUMMED, **REFUSED}[name]().children())
        x = torch.randn(B, W)
        try:
            schedule = bpipe.auto(
                model, x, F.mse_loss, target=x, stages_per_rank=(1,), microbatch_sizes=(2,), options=bpipe.Options(effort=0)
            )
            schedule.step(x, target=x)
            found[name] = "it trains"
        except BPipeError as error:
            found[name] = str(error)
    return found


def test_what_auto_cuts_apart_trains_or_is_refused() -> None:
    """A chain whose first and last layer share something: `bpipe.auto` refuses on all ranks, or keeps both on one."""
    for rank in run_ranks(_autos, 2):
        for name, said in rank.items():
            assert ("TiedWeights" in said or "shar" in said) if name in REFUSED else said == "it trains", (name, said)
