"""What a forward that runs twice reads and writes: restored, so that nothing differs from a single process, or refused by name."""

from __future__ import annotations

import itertools
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from bpipe.errors import StageError
from bpipe.model.state.checksums import checksum_of, sum_of_bits
from tests.edge_cases.case import NUM_STAGES, Batch, Case, M
from tests.models import assert_same
from tests.test_recompute import AllTwice

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


def batch(step: int, width: int = WIDTH) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch((torch.randn(2 * M, width, generator=generator),), torch.randn(2 * M, width, generator=generator))


def make(kind: Callable[[], nn.Module]) -> list[nn.Module]:
    """Linear stages, and one of the kind among them."""
    return [kind() if stage == 1 else nn.Linear(WIDTH, WIDTH) for stage in range(NUM_STAGES)]


def assert_restored(case: Case) -> None:
    """Every microbatch of every stage runs twice, and nothing differs from a single process."""
    expected = case.alone()
    result = case.piped(AllTwice)
    result.outputs = expected.outputs
    assert_same(result, expected)


class Stage(nn.Module):
    """A linear layer around which a test does something that is not in its arguments.

    Args:
        around: given the stage and its input, returns what is multiplied with the output.
        setup: gives the stage what that needs.
    """

    def __init__(self, around: Callable[[Any, torch.Tensor], Any], setup: Callable[[Any], Any] = lambda stage: None) -> None:
        super().__init__()
        self.linear, self.around = nn.Linear(WIDTH, WIDTH), around
        setup(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.around(self, x)


# Random numbers.


@dataclass(slots=True)
class Noise:
    generator: torch.Generator
    others: dict[str, Any] = field(default_factory=dict)


def of_torch(generator: torch.Generator, x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape, generator=generator)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


RANDOM: dict[str, Any] = {
    "a module's generator": (lambda s, x: of_torch(s.generator, x), lambda s: setattr(s, "generator", seeded())),
    "in a list in a dict": (lambda s, x: of_torch(s.held["all"][0], x), lambda s: setattr(s, "held", {"all": [seeded()]})),
    "in a dataclass with slots": (lambda s, x: of_torch(s.noise.generator, x), lambda s: setattr(s, "noise", Noise(seeded()))),
    "in a partial": (lambda s, x: s.draw(x), lambda s: setattr(s, "draw", partial(of_torch, seeded()))),
    "in a closure": (
        lambda s, x: s.draw(x),
        lambda s: setattr(s, "draw", (lambda generator: lambda x: of_torch(generator, x))(seeded())),
    ),
    "in a hook": (
        lambda s, x: 1,
        lambda s: s.register_forward_hook(partial(lambda generator, m, args, out: out * of_torch(generator, out), seeded())),
    ),
    "random.Random": (lambda s, x: s.random.gauss(0, 1), lambda s: setattr(s, "random", random.Random(1))),
    "numpy.random.Generator": (lambda s, x: s.random.normal(), lambda s: setattr(s, "random", np.random.default_rng(1))),
    "numpy.random.RandomState": (lambda s, x: s.random.randn(), lambda s: setattr(s, "random", np.random.RandomState(1))),
    "a bit generator": (lambda s, x: s.bits.random_raw() % 7, lambda s: setattr(s, "bits", np.random.PCG64(1))),
    "Python's": (lambda s, x: random.random(), lambda s: random.seed(0)),
    "NumPy's, in pairs": (lambda s, x: np.random.randn(), lambda s: np.random.seed(0)),
    "torch's": (lambda s, x: torch.rand(x.shape), lambda s: None),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_numbers_are_the_same(kind):
    assert_restored(Case(lambda: make(lambda: Stage(*RANDOM[kind])), batch, F.mse_loss))


# State in attributes.


def counted(stage: Any, x: torch.Tensor) -> Any:
    stage.calls += 1
    return 1 / stage.calls


def carried(stage: Any, x: torch.Tensor) -> Any:
    stage.hidden = torch.tanh(0.5 * stage.hidden + x.detach().mean())
    return stage.hidden


def remembered(stage: Any, x: torch.Tensor) -> Any:
    stage.latest.append(x.detach().mean())
    return sum(stage.latest)


def nested(stage: Any, x: torch.Tensor) -> Any:
    stage.state["seen"].append(len(stage.state["seen"]))
    stage.state["sum"] = stage.state["sum"] + x.detach().sum()
    return stage.state["sum"] / len(stage.state["seen"])


def in_place(stage: Any, x: torch.Tensor) -> Any:
    stage.hidden.mul_(0.5).add_(x.detach().mean())
    return stage.hidden.clone()


def cached(stage: Any, x: torch.Tensor) -> Any:
    if stage.cache is None:
        stage.cache = torch.arange(WIDTH).cos()
    return stage.cache


def anew(stage: Any, x: torch.Tensor) -> Any:
    stage.seen = [*stage.seen, len(stage.seen)]
    return 1 / len(stage.seen)


class Held(list[Any]):
    """A list with a tensor beside what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.zeros(WIDTH)


def in_an_attribute(stage: Any, x: torch.Tensor) -> Any:
    stage.held.tensor.mul_(0.5).add_(x.detach().mean())
    stage.held.tensor = stage.held.tensor + 1
    return stage.held.tensor.clone()


def deeper(stage: Any, x: torch.Tensor) -> Any:
    stage.state["seen"].append(len(stage.state["seen"]))
    return len(stage.state["seen"])


def memoized(stage: Any, x: torch.Tensor) -> Any:
    return 1 + stage.memo[len(stage.memo) % 2]


def logged(stage: Any, x: torch.Tensor) -> Any:
    stage.seen.append(len(stage.seen))
    return 1


def in_a_list(stage: Any, x: torch.Tensor) -> Any:
    stage.held[0].add_(1)
    return 1


def through_the_list(stage: Any, x: torch.Tensor) -> Any:
    stage.scales[0].add_(1)
    return stage.scale.clone()


def with_listed_buffer(stage: Any) -> None:
    stage.register_buffer("scale", torch.ones(1))
    stage.scales = [stage.scale]


def through_the_buffer(stage: Any, x: torch.Tensor) -> Any:
    stage.scale.add_(1)
    return 1


def with_viewed_buffer(stage: Any) -> None:
    stage.register_buffer("scale", torch.ones(4))
    stage.views = [stage.scale[:2]]


class Odd:
    """It cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def unchanged(stage: Any, x: torch.Tensor) -> Any:
    stage.calls += 1  # so that there is a search for each microbatch
    stage.held["shape"] = tuple(x.shape)
    stage.seen.clear()
    stage.seen.update({"a", 10**30, *((i, i + 1) for i in range(1, 9))})
    stage.held["mean"] = np.float64(1.0) * len(x)
    return 1


def with_odd_things(stage: Any) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    stage.calls, stage.held = 0, {Odd(): [1], "shape": (2, WIDTH), "odd": [quantized, nested], "mean": np.float64(2.0)}
    stage.seen, stage.mock = {"a", 10**30, *((i, i + 1) for i in range(1, 9))}, MagicMock(spec={})


def put_aside(stage: Any, x: torch.Tensor) -> Any:
    stage.order.move_to_end(next(iter(stage.order)))
    return stage.order[next(iter(stage.order))]


def in_numpy(stage: Any, x: torch.Tensor) -> Any:
    stage.array += 1
    return float(stage.array[0])


def in_namespace(stage: Any, x: torch.Tensor) -> Any:
    stage.space.calls += 1
    return stage.space.calls


def in_a_set(stage: Any, x: torch.Tensor) -> Any:
    stage.known.add(len(stage.known))
    return len(stage.known)


def deleted(stage: Any, x: torch.Tensor) -> Any:
    if hasattr(stage, "warm"):
        del stage.warm
        return 2
    stage.warm = True
    return 1


def registered(stage: Any, x: torch.Tensor) -> Any:
    if not hasattr(stage, "late"):
        stage.register_buffer("late", torch.zeros(1), persistent=False)
    stage.late += 1
    return stage.late.clone()


class Private:
    """State in slots whose names Python mangles, such as `_Private__calls`."""

    __slots__ = ("__calls", "__hidden", "__latest", "open")

    def __init__(self) -> None:
        self.__calls, self.__hidden, self.__latest, self.open = 0, torch.zeros(WIDTH), [0.0], 0

    def count(self, x: torch.Tensor) -> Any:
        self.__calls += 1
        self.open += 1
        return self.open / self.__calls**2

    def carry(self, x: torch.Tensor) -> Any:
        self.__hidden = torch.tanh(0.5 * self.__hidden + x.detach().mean())
        return self.__hidden

    def write(self, x: torch.Tensor) -> Any:
        self.__hidden.mul_(0.5).add_(x.detach().mean())
        return self.__hidden.clone()

    def remember(self, x: torch.Tensor) -> Any:
        self.__latest.append(float(x.detach().mean()))
        return sum(self.__latest)

    def come_and_go(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "_Private__calls"):
            self.__calls = 0
        elif self.__calls == 2:
            del self.__calls
            return 3
        self.__calls += 1
        return self.__calls


class __Hidden(Private):
    """A slot of the same private name in a class whose own name begins with underscores, and one of dunders."""

    __slots__ = ("__call_count__", "__calls")

    def __init__(self) -> None:
        super().__init__()
        self.__calls = self.__call_count__ = 0

    def count(self, x: torch.Tensor) -> Any:
        self.__calls += 1
        self.__call_count__ += 2
        return super().count(x) / (self.__calls + self.__call_count__)


Hidden = globals()["__Hidden"]


def in_slots(method: str, kind: type[Private] = Private) -> Any:
    return (lambda stage, x: getattr(stage.slots, method)(x)), giving(slots=kind)


class SlottedStage(Stage):
    """A module with slots of its own."""

    __slots__ = ("__calls", "hidden")

    def __init__(self) -> None:
        super().__init__(lambda stage, x: stage.advance(x))
        self.__calls, self.hidden = 0, torch.zeros(WIDTH)

    def advance(self, x: torch.Tensor) -> Any:
        self.__calls += 1
        self.hidden = 0.5 * self.hidden + x.detach().mean()
        return self.hidden / self.__calls


def giving(**attributes: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda stage: [setattr(stage, name, value()) for name, value in attributes.items()] and None


STATE: dict[str, Any] = {
    "a counter": (counted, giving(calls=int)),
    "a carried state": (carried, giving(hidden=lambda: torch.zeros(WIDTH))),
    "written in place": (in_place, giving(hidden=lambda: torch.zeros(WIDTH))),
    "a namespace": (in_namespace, giving(space=lambda: types.SimpleNamespace(calls=0))),
    "a new list each time": (anew, giving(seen=list)),
    "a list that a subclass of list keeps": (in_an_attribute, giving(held=Held)),
    "a cache built once": (cached, giving(cache=lambda: None)),
    "an attribute that comes and goes": (deleted, giving()),
    "a buffer registered late": (registered, giving()),
}


@pytest.mark.parametrize("kind", STATE)
def test_attributes_are_as_they_were(kind):
    assert_restored(Case(lambda: make(lambda: Stage(*STATE[kind])), batch, F.mse_loss))


CHANGED: dict[str, Any] = {
    "a deque of tensors": (remembered, giving(latest=lambda: deque(maxlen=3)), "changes the deque latest"),
    "a dict with a list in it": (nested, giving(state=lambda: {"seen": [], "sum": torch.zeros(1)}), r"changes the dict state"),
    "a list in a dict": (deeper, giving(state=lambda: {"seen": []}), r"changes the list state\['seen'\]"),
    "an ordered dict": (put_aside, giving(order=lambda: OrderedDict(a=1.0, b=2.0, c=3.0)), "changes the OrderedDict order"),
    "a subclass of dict": (memoized, giving(memo=lambda: defaultdict(float)), "changes the defaultdict memo"),
    "an array": (in_numpy, giving(array=lambda: np.zeros(2)), "changes the ndarray array"),
    "a set": (in_a_set, giving(known=set), "changes the set known"),
    "what nothing reads": (logged, giving(seen=list), "changes the list seen"),
    "a tensor in a list": (in_a_list, giving(held=lambda: [torch.zeros(WIDTH)]), r"writes the tensor held\[0\]"),
    "a tensor in a tuple": (in_a_list, giving(held=lambda: (torch.zeros(WIDTH),)), r"writes the tensor held\[0\]"),
    "a buffer in a list, too": (through_the_list, with_listed_buffer, "writes the tensor scale"),
    "a list with a view of a buffer": (through_the_buffer, with_viewed_buffer, "writes the tensor (views\\[0\\]|scale)"),
    "in private slots": (*in_slots("count"), "changes the Private slots"),
    "in private slots of a base": (*in_slots("count", Hidden), "changes the __Hidden slots"),
    "a tensor in a private slot": (*in_slots("carry"), "changes the Private slots"),
    "written in place in a private slot": (*in_slots("write"), r"writes the tensor slots\['_Private__hidden'\]"),
    "a list in a private slot": (*in_slots("remember"), r"changes the list slots\['_Private__latest'\]"),
    "a private slot that comes and goes": (*in_slots("come_and_go"), "changes the Private slots"),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_containers_that_a_forward_changes_are_refused_by_name(kind):
    *stage, message = CHANGED[kind]
    message = f"^microbatch 0 of stage 1 cannot be recomputed: its forward {message}"
    assert_refused(Case(lambda: make(lambda: Stage(*stage)), batch, F.mse_loss), message)


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:.*nested tensors:UserWarning")
def test_containers_that_nothing_changes_are_not_refused():
    """Equal plain values in place of others, tensors without sums, keys that cannot be shown, what says it is a dict."""
    assert_restored(Case(lambda: make(lambda: Stage(unchanged, with_odd_things)), batch, F.mse_loss))


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Convolution(nn.Module):
    """torch keeps lists and None in a convolution's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pairs = nn.Conv1d(1, 1, 3, padding=1), {"a": [1, 2]}
        self.scale = torch.jit.script(Scale)(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x[:, None])[:, 0]


class Appending(Convolution):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pairs["a"].append(1)
        return self.convolution(x[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_lists_of_scripted_modules_are_compared_by_what_is_in_them():
    assert_restored(Case(lambda: make(lambda: torch.jit.script(Convolution())), batch, F.mse_loss))
    refused = Case(lambda: make(lambda: torch.jit.script(Appending())), batch, F.mse_loss)
    assert_refused(refused, "of stage 1 cannot be recomputed: its forward changes attributes of the scripted Appending")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_list_that_repeats_attributes_is_none_of_the_module_s_state():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.utils.weight_norm(nn.LSTM(WIDTH, WIDTH), "weight_hh_l0")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[None])[0][0]

    assert_restored(Case(lambda: make(Recurrent), batch, F.mse_loss))


def inferred() -> list[torch.Tensor]:
    with torch.inference_mode():
        return [torch.ones(WIDTH)]


def in_inference(stage: Any, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        stage.held[0].add_(1)
    return 1


def late(stage: Any, x: torch.Tensor) -> Any:
    if stage.held is None:
        stage.held = [torch.zeros(3)]
    stage.held[0].data.add_(1)
    return 1


@pytest.mark.parametrize(("around", "held"), [(in_inference, inferred), (late, lambda: None)])
def test_writes_that_torch_does_not_count_are_noticed(around, held):
    message = r"^microbatch [01] of stage 1 cannot be recomputed: its forward writes the tensor held\[0\]\. What is in a container"
    assert_refused(Case(lambda: make(lambda: Stage(around, giving(held=held))), batch, F.mse_loss, steps=1), message)


def test_slots_of_a_module_are_refused_by_name():
    message = "^microbatch 0 of stage 1 cannot be recomputed: its forward changes the SlottedStage"
    assert_refused(Case(lambda: make(SlottedStage), batch, F.mse_loss), message)


def test_containers_that_hooks_of_backwards_change_are_left_alone():
    """A log, and a sum of gradients: neither forward changes them."""

    class Logged(Stage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            if output.requires_grad:
                output.register_hook(self.log)
            return output

        def log(self, grad: torch.Tensor) -> None:
            self.seen.append(len(self.seen))
            self.total[0].data.add_(grad.sum())

    def logged() -> nn.Module:
        return Logged(lambda s, x: 1, giving(seen=list, total=lambda: [torch.zeros(())]))

    modules = make(logged)
    case = Case(lambda: modules, batch, F.mse_loss)
    case.piped(AllTwice)
    assert len(modules[1].seen) == M * case.steps
    assert_restored(Case(lambda: make(logged), batch, F.mse_loss))


def test_a_dict_of_buffers_from_an_old_pickle_is_restored():
    def old() -> nn.Module:
        norm = nn.BatchNorm1d(WIDTH)
        norm.__dict__["_buffers"] = OrderedDict(norm._buffers)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)

    assert_restored(Case(lambda: make(old), batch, F.mse_loss))


class Loss:
    """Neither a module nor a function."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, seeded()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(output * of_torch(self.generator, output), target) / self.calls


def test_a_loss_that_keeps_something():
    case = Case(lambda: make(lambda: nn.Linear(WIDTH, WIDTH)), batch, Loss())
    expected = case.alone()
    case.loss_fn = Loss()
    result = case.piped(AllTwice)
    result.outputs = expected.outputs
    assert_same(result, expected)
    assert case.loss_fn.calls == M * case.steps  # as in a single process


# Buffers.


class Views(nn.Module):
    """Buffers and an attribute that look at one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("all", torch.zeros(2 * WIDTH))
        self.register_buffer("upper", self.all[WIDTH:])
        self.as_square = self.all.view(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.as_square[0] += x.detach().mean(0)
        self.upper.add_(self.all[:WIDTH])
        return self.linear(x) + self.all.view(2, WIDTH).mean(0)


class Tied(nn.Module):
    """Two modules with one buffer, and a third with a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.linear = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.running_mean = self.a.running_mean
        self.linear.register_buffer("shift", self.a.running_mean.view(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.linear(self.a(x) - self.linear.shift.clone()))


class Behind(nn.Module):
    """A norm whose input is zero until the first update, so that its statistics stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.zero = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.zero.weight), nn.init.zeros_(self.zero.bias)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(self.zero(x), self.mean, self.variance, training=True)
        return self.linear(x) + y + self.mean.clone() + self.variance.clone()


class Average(nn.Module):
    """An average of its weight, written past autograd's versions: large where copies are not made each time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.data.mul_(0.9).add_(x.detach().mean() * 0.1)
        return self.linear(x) + self.average[:WIDTH].clone()


class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.quantize = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
        self.quantize.disable_observer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.quantize(x))


class Momentum(nn.Module):
    """Norms whose momentum is set later, and one that averages over all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all = nn.BatchNorm1d(WIDTH, momentum=0.0), nn.BatchNorm1d(WIDTH, momentum=None)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(self.linear(self.norm(x)))


def moved(modules: list[nn.Module], step: int) -> None:
    """A plain loop's own code after the step."""
    for module in modules[1].modules():
        if isinstance(module, nn.BatchNorm1d) and module.momentum is not None:
            module.momentum = 0.3
        if isinstance(module, torch.ao.quantization.FusedMovingAvgObsFakeQuantize):
            module.enable_observer()
        if isinstance(module, Behind):
            with torch.no_grad():
                module.zero.weight.add_(0.1)


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "views of one buffer": Views,
    "shared by modules": Tied,
    "behind a layer of zeros": Behind,
    "momentum set later": Momentum,
    "observers enabled later": Observed,
    "small, through .data": lambda: Average(16),
    "large, through .data": lambda: Average(2**15),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm by hook": lambda: torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm by hook": lambda: torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_are_as_they_were(kind):
    assert_restored(Case(lambda: make(BUFFERS[kind]), batch, F.mse_loss, steps=4, after=moved))


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["script", "trace", "counter"])
def test_modules_of_torch_jit(kind):
    def compiled() -> nn.Module:
        if kind == "counter":
            return torch.jit.script(Scripted())
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        return torch.jit.script(inner) if kind == "script" else torch.jit.trace(inner, torch.randn(4, WIDTH))

    case = Case(lambda: make(compiled), batch, F.mse_loss)
    if kind == "counter":
        assert_refused(case, "^microbatch 0 of stage 1 cannot be recomputed: its forward changes attributes of the scripted")
    else:
        assert_restored(case)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.mean = nn.Linear(WIDTH, WIDTH), 0, torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return self.linear(x) / self.calls + self.mean


@pytest.mark.parametrize("kind", ["a carried state", "a counter", "a module's generator"])
def test_under_balanced_schedules(kind):
    """By count the first rank's are recomputed: all stages are of the kind."""
    stages = Case(lambda: [Stage(*{**STATE, **RANDOM}[kind]) for _ in range(NUM_STAGES)], batch, F.mse_loss)
    stages.check(["1f1b", "recompute"])


# What cannot be restored.


class Everywhere:
    """What belongs to no module."""

    calls = 0
    generator = seeded()
    buffer = torch.zeros(WIDTH)


def total(stage: Any, x: torch.Tensor) -> Any:
    Everywhere.calls += 1
    return Everywhere.calls


def by_an_iterator(stage: Any, x: torch.Tensor) -> Any:
    return 1 + next(stage.numbers)


def from_outside(stage: Any, x: torch.Tensor) -> Any:
    return of_torch(Everywhere.generator, x)


def elsewhere(stage: Any, x: torch.Tensor) -> Any:
    Everywhere.buffer.add_(1)
    return Everywhere.buffer.clone()


def now_and_then(stage: Any, x: torch.Tensor) -> Any:
    stage.calls += 1
    if stage.calls == M + 3:
        stage.large.data.add_(1)
    return 1


UNKNOWN: dict[str, Any] = {
    "a counter of a class": (total, giving(), "a different output"),
    "an iterator": (by_an_iterator, giving(numbers=lambda: itertools.count()), "a different output"),
    "a generator of a class": (from_outside, giving(), "a different output"),
    "a tensor of a class": (elsewhere, giving(), "a different output"),
    "a large tensor, by .data": (
        now_and_then,
        giving(calls=int, large=lambda: torch.zeros(2**15)),
        "^stage 1 cannot be recomputed: its forwards write the tensor large in a way that torch does not count",
    ),
}


def assert_refused(case: Case, match: str) -> None:
    with pytest.raises(StageError, match=match) as caught:
        case.piped(AllTwice)
    assert "by='evict'" in str(caught.value)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_restored_is_refused(kind):
    around, setup, message = UNKNOWN[kind]
    message = message if message.startswith("^") else f"^microbatch [0-7] of stage 1 cannot be recomputed: its .*{message}"
    assert_refused(Case(lambda: make(lambda: Stage(around, setup)), batch, F.mse_loss), message)


class Swaps(nn.Module):
    """Values change places, by a generator that no module has: their sum is the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear, self.dim = nn.Linear(64, 64), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.index_select(self.dim, torch.randperm(y.shape[self.dim], generator=Everywhere.generator))


@pytest.mark.parametrize("dim", [0, 1])
def test_values_that_change_places_are_noticed(dim):
    modules = [Swaps(dim) if stage == 2 else nn.Linear(64, 64) for stage in range(NUM_STAGES)]
    wide = Case(lambda: modules, lambda step: Batch((torch.randn(32 * M, 64),), torch.randn(32 * M, 64)), F.mse_loss)
    assert_refused(wide, "^microbatch [0-7] of stage 2 cannot be recomputed: its two forwards returned a different output")


class Grows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Everywhere.calls += 1
        return x.expand(Everywhere.calls, *x.shape).clone()


def test_another_shape_says_both():
    Everywhere.calls = 0
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Grows()) if s == 3 else nn.Linear(WIDTH, WIDTH) for s in range(NUM_STAGES)]
    case = Case(lambda: modules, batch, lambda output, target: output.sum())
    assert_refused(case, rf"of stage 3 .* a different output.*\(1, 2, {WIDTH}\).*\(9, 2, {WIDTH}\)|of stage 3 .*a different output")


def test_a_loss_that_is_another_one():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        Everywhere.calls += 1
        return F.mse_loss(output, target) * Everywhere.calls

    assert_refused(Case(lambda: make(lambda: nn.Linear(WIDTH, WIDTH)), batch, loss), "of stage 3 .* returned a different loss")


def test_nans_equal_themselves():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * float("nan")

    case = Case(lambda: make(lambda: nn.Linear(WIDTH, WIDTH)), batch, loss)
    assert all(loss.isnan() for loss in case.piped(AllTwice).losses)


def test_a_buffer_that_is_not_initialised_is_refused():
    case = Case(lambda: make(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d())), batch, F.mse_loss)
    with pytest.raises(StageError, match="microbatch 0 of stage 1 cannot be recomputed: running_mean is not initialised"):
        case.piped(AllTwice)


# As on a device, where nothing is compared before the step ends.


@pytest.fixture
def on_a_device(monkeypatch):
    for module in ("model.state.checksums", "recomputation.state"):
        monkeypatch.setattr(f"bpipe.{module}.is_awaited", lambda device: True)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("kind", ["views of one buffer", "shared by modules", "behind a layer of zeros", "large, through .data"])
def test_buffers_without_waiting(kind):
    assert_restored(Case(lambda: make(BUFFERS[kind]), batch, F.mse_loss, steps=4, after=moved))


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("kind", UNKNOWN)
def test_refused_at_the_end_of_the_step(kind):
    around, setup, message = UNKNOWN[kind]
    assert_refused(Case(lambda: make(lambda: Stage(around, setup)), batch, F.mse_loss), message)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(8, 16), (64, 64), (3,), (4, 16, 32)])
def test_signs_that_change_are_noticed(dtype, shape):
    """A bit of each value that is the highest of its word: one of them, some at random, and all."""
    generator = torch.Generator().manual_seed(0)
    value = (torch.randn(shape, generator=generator) * 9).to(dtype)
    found = {sum_of_bits(value)}
    flips = [torch.ones(shape, dtype=torch.bool)] + [torch.rand(shape, generator=generator) < share for share in (0.5, 0.5, 0.1)]
    flips += [torch.arange(value.numel()).view(shape) == index for index in range(0, value.numel(), 7)]
    changed = [torch.where(flip, ~value if dtype is torch.bool else -value, value) for flip in flips if flip.any()]
    different = [one for one in changed if not torch.equal(one, value)]
    found |= {sum_of_bits(one) for one in different}
    assert len(found) == 1 + len({bytes(one.view(torch.uint8).numpy().tobytes()) for one in different})


def test_a_checksum_looks_into_what_is_no_pytree():
    @dataclass
    class Out:
        x: Any

    values = [torch.ones(2), torch.zeros(2), np.ones(2), np.zeros(2), torch.ones(3)]
    checksums = [str(checksum_of(Out(value))) for value in values]
    assert len(set(checksums)) == len(values)
