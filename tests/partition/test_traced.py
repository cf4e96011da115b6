"""A traced model is cut where it is named, and what passes stages in between is found."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.partition.traced import split_traced

pytestmark = pytest.mark.usefixtures("one_thread")

C, M = 6, 4


class UNet(nn.Module):
    """Sizes on the way down are joined with the same sizes on the way up."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(1 if i == 0 else C, C, 3, padding=1) for i in range(depth))
        self.norm, self.mid = nn.BatchNorm1d(C), nn.Conv1d(C, C, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv1d(2 * C, C if i else 1, 3, padding=1) for i in reversed(range(depth)))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = torch.relu(down(x))
            kept.append(x)
            x = nn.functional.avg_pool1d(x, 2)
        x = torch.tanh(self.mid(self.norm(x))) * self.scale
        for up in self.up:
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return x


class Residuals(nn.Module):
    """Each block attends to the outputs of all earlier ones, and to the input."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)) for _ in range(num_blocks))
        self.queries = nn.ParameterList(torch.randn(C) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for block, query in zip(self.blocks, self.queries):
            found = torch.stack(kept)
            x = ((found * query).sum(-1, keepdim=True).softmax(0) * found).sum(0)
            kept.append(x + block(x))
        return kept[-1]


class Heads(nn.Module):
    """What the first stage makes is used by the third one alone, so that the second one gets nothing from it but its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> dict[str, torch.Tensor]:
        a = self.a(x)
        return {"sum": self.c(self.b(words)) + a.cos(), "first": a}


class InPlace(nn.Module):
    """Values that their own stage, or the only one that gets them, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(C, C), nn.Linear(C, C), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(C, C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        same = a
        a += 1
        b = self.b(a)
        b *= 2
        return self.c(b) + same.sin()


def total(output: Any, target: torch.Tensor) -> torch.Tensor:
    values = output.values() if isinstance(output, dict) else [output]
    return sum((nn.functional.mse_loss(value, target) for value in values), torch.zeros(()))


CASES: dict[str, tuple[Any, list[list[str]], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "unet in seven": (
        UNet,
        [["down.0"], ["down.1"], ["down.2"], ["norm", "mid", "scale"], ["up.0"], ["up.1"], ["up.2"]],
        (1, 16),
        {"skip_relu": (0, 6), "skip_relu_1": (1, 5), "skip_relu_2": (2, 4)},
    ),
    "unet in two": (UNet, [["down", "norm", "mid", "scale"], ["up"]], (1, 16), {}),
    "residuals": (
        Residuals,
        [[f"blocks.{i}", f"queries.{i}"] for i in range(4)],
        (C,),
        {"skip_x": (0, 1, 2, 3), "skip_add": (0, 1, 2, 3), "skip_add_1": (1, 2, 3)},
    ),
    "in place": (InPlace, [["a"], ["b"], ["c"]], (C,), {"skip_sin": (0, 2)}),
    "heads": (Heads, [["a"], ["b"], ["c"]], (C,), {"skip_a": (0, 2), "skip_cos": (0, 2)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.BalancedOneFOneB])
def test_parts_train_as_the_model(name: str, schedule: Any) -> None:
    torch.manual_seed(0)
    make, lists, shape, expected = CASES[name]
    model = make().double()
    alone = deepcopy(model)
    example = torch.randn(2, 3, *shape, dtype=torch.float64)
    parts, skips = split_traced(model, lists, tuple(example if name == "heads" else example[:1]))
    assert skips == expected
    assert {path for part in parts for path in part.state_dict()} == {*model.state_dict()}
    loopback, n = bpipe.Loopback(len(parts)), len(parts)
    schedules = [
        schedule(bpipe.PipelineStage(part, i, n, "cpu", loopback.rank(i), skips=skips), M, total) for i, part in enumerate(parts)
    ]
    x, words, target = torch.randn(3, 2 * M, *shape, dtype=torch.float64)
    given = (x, words) if name == "heads" else (x,)
    output = loopback.step(schedules, *given, target=target)
    for *one, wanted in zip(*(whole.chunk(M) for whole in (*given, target))):
        (total(alone(*one), wanted) / M).backward()
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(alone.named_parameters())[path].grad, rtol=0, atol=1e-12)
    for path, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, dict(alone.named_buffers())[path], rtol=0, atol=1e-12)
    assert {*output} == {"sum", "first"} if name == "heads" else output.shape == target.shape


class Reversed(torch.autograd.Function):
    """Reverses gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Broken(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b, self.c = kind, nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("total", torch.zeros(()))
        self.kept = list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        if self.kind == "branches" and a.sum() > 0:
            a = -a
        if self.kind == "backwards":
            return self.a(self.c(self.b(a)))
        if self.kind == "function in place":
            return self.c(self.b(a) + nn.functional.relu(a, inplace=True))
        b = self.b(a)
        if self.kind == "in place":
            b = b + a.mul_(2)
        if self.kind == "view":
            return self.c(b) + b.view(-1).mul_(2).view(b.shape)
        if self.kind == "operator":
            kept, b = b, self.c(b)
            kept += 1
            return b + kept
        if self.kind == "writes":
            self.total = self.total + 1
        if self.kind == "lists":
            self.kept.append(b)
        if self.kind == "no_grad":
            with torch.no_grad():
                b = self.b(a)
        if self.kind == "function":
            b = Reversed.apply(b)
        if self.kind == "shape":
            return self.c(b).view(x.shape[0], -1).reshape(a.shape)
        if self.kind == "tensor" and isinstance(b, torch.Tensor):
            b = b * 2
        if self.kind == "constant":
            b = b + torch.randn(C)
        if self.kind == "mode":
            b = nn.functional.dropout(b, 0.1, self.training)
        if self.kind == "buffer":
            self.total.add_(1)
            return self.c(b * self.total) + a * self.total
        if self.kind == "weights":
            return nn.functional.linear(self.c(b), self.a.weight)
        return self.c(b) + a


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("branches", "torch.fx cannot trace the forward of Broken"),
        ("backwards", "a of stage 0 uses what stage 2 makes, which runs later"),
        ("in place", "a may be changed in place by mul_, and stages 0, 1, 2 have it: clone it in the forward"),
        ("function in place", "a may be changed in place by relu, and stages 0, 1 have it: clone it in the forward"),
        ("operator", "b may be changed in place by iadd, and stages 1, 2 have it"),
        ("view", "view may be changed in place by mul_, and stages 1, 2 have it"),
        ("constant", "draws random numbers, or makes tensors out of nothing"),
        ("writes", "the forward of Broken writes total"),
        ("lists", "the forward of Broken writes kept"),
        ("no_grad", "the stages do not do what the model does.*gets another gradient"),
        ("function", "the stages do not do what the model does.*gets another gradient"),
        ("shape", "a shape, dtype or device of one stage is used by a later one"),
        ("tensor", "the stages do not do what the model does"),
        ("mode", "the forward of Broken does something else when it trains, between the named modules"),
        ("buffer", "total is used by stages 0, 1"),
        ("weights", "a.weight is used by stages 0, 2: cut the model by hand, and tie its weights"),
    ],
)
def test_forwards_that_cannot_be_cut(kind: str, message: str) -> None:
    model = Broken(kind)
    before = {**vars(model)}
    with pytest.raises(ConfigurationError, match=message):
        split_traced(model, [["a", "relu"], ["b"], ["c"]], (torch.randn(3, C),))
    assert vars(model) == before


def test_a_statistic_that_a_later_stage_reads() -> None:
    """Each rank would have its own."""

    class Late(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(C)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.norm(self.a(x)))) + self.norm.running_mean

    with pytest.raises(ConfigurationError, match="a buffer that several stages use is written by one of them"):
        split_traced(Late(), [["a", "norm"], ["b"], ["c"]], (torch.randn(3, C),))


def test_hooks_of_what_is_cut() -> None:
    model = Broken("")
    model.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ConfigurationError, match="the model has hooks, and is cut into stages"):
        split_traced(model, [["a", "relu"], ["b"], ["c"]], (torch.randn(3, C),))


def test_a_buffer_that_several_stages_read_is_on_each() -> None:
    class Masked(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(C))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x) * self.mask) * self.mask)

    model = Masked().eval()
    parts, skips = split_traced(model, [["a"], ["b"], ["c"]], (torch.randn(3, C),))
    assert not skips and not model.training
    assert [("mask" in part.state_dict()) for part in parts] == [True, True, False]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["a", "relu"], ["b"]], "no stage has c"),
        ([["a", "relu"], ["b"], ["c", "d"]], "names 'd'"),
        ([["a", "b", "relu"], ["b"], ["c"]], "b is in stages 0, 1: name it once"),
    ],
)
def test_lists_that_are_no_split(stages: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_traced(Broken(""), stages)


def test_a_hook_that_renames_entries_of_the_state() -> None:
    """A parameter under another name is no tensor that torch.fx has met."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in [key for key in state if key.startswith("0.")]:
            state[f"old_{key}"] = state.pop(key)

    model.register_state_dict_post_hook(renamed)
    parts, _ = split_traced(model, [["0"], ["1"]], (torch.ones(2, 4),))
    assert [list(part.state_dict()) for part in parts] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


class Optional(nn.Module):
    """Its forward branches on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, twice: bool = False, *, scale: float = 2.0, how: str = "add"
    ) -> torch.Tensor:
        a = self.a(x) * scale
        if mask is not None:
            a = a * mask
        a = a.relu() if how == "relu" else a + 1
        return self.b(self.b(a) if twice else a)


class Unnamed(nn.Module):
    """A stage without the keyword arguments, which a loopback gives to all of them, and processes to the first one's rank alone."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args)


MASK = torch.linspace(0, 1, 2 * M)[:, None]


@pytest.mark.parametrize(
    ("args", "kwargs", "changed"),
    [
        ((), {}, {"mask": MASK}),
        ((None,), {}, {"mask": MASK, "twice": False}),
        ((), {"mask": None}, {"mask": MASK}),
        ((MASK,), {}, {"twice": True}),
        ((), {"mask": MASK}, {"how": "relu"}),
        ((None, True), {}, {"mask": None, "twice": False}),
        ((), {"how": "relu", "scale": 3.0}, {"how": "add"}),
        ((MASK,), {"twice": True, "how": "relu"}, {"how": "add"}),
    ],
)
def test_a_forward_that_branches_on_optional_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], changed: dict[str, Any]
) -> None:
    """None, flags and texts are what the example says, given or not; a step that says otherwise is refused by its first stage."""
    torch.manual_seed(0)
    model = Optional()
    alone, x, target = deepcopy(model), torch.randn(2 * M, C), torch.randn(2 * M, C)
    (first, last), skips = split_traced(model, [["a"], ["b"]], (x, *args), kwargs)
    loopback = bpipe.Loopback(2)
    stages = [
        bpipe.PipelineStage(part, i, 2, "cpu", loopback.rank(i), skips=skips) for i, part in enumerate((first, Unnamed(last)))
    ]
    loopback.step([bpipe.OneFOneB(stage, M, nn.functional.mse_loss) for stage in stages], x, *args, target=target, **kwargs)
    for i in range(M):
        rows = slice(2 * i, 2 * i + 2)
        cut = [one[rows] if isinstance(one, torch.Tensor) else one for one in args]
        named = {name: one[rows] if isinstance(one, torch.Tensor) else one for name, one in kwargs.items()}
        (nn.functional.mse_loss(alone(x[rows], *cut, **named), target[rows]) / M).backward()
    for one, other in zip(model.parameters(), alone.parameters()):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    name, value = next((name, value) for name, value in changed.items() if value is not None)
    names = ("mask", "twice")
    with pytest.raises(
        ConfigurationError, match=f"{name} is .*, and was .* in the example by which split_traced has cut the model"
    ):
        first(x, **{**dict(zip(names, args)), **kwargs, name: value})
