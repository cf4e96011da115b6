"""Batches of every kind are cut along their samples, as a single process cuts them, or refused by name before anything is sent.

`docs/batches.md` has a row for each kind; `test_page.py` holds the two together.
"""

from __future__ import annotations

import functools
from collections import ChainMap, OrderedDict, UserDict, UserList, deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils._pytree import register_constant, register_pytree_node

import bpipe
from bpipe.errors import ConfigurationError, StageError
from bpipe.model.call import Specs, call_of, microbatches_of
from bpipe.model.cutting import Cutting
from bpipe.model.microbatch import describe, detached, tensors_in
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support"),
]

ROWS, WIDTH = 2 * M, 4


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


# Kinds of batches: how one is made of rows, and how a module reads its rows again


@dataclass
class Sample:
    x: torch.Tensor
    scale: float = 2.0
    names: dict[str, int] = field(default_factory=lambda: {"a": 1})


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Sample
    mask: torch.Tensor | None = None
    seed: InitVar[int] = 0


@dataclass
class WithLength:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.width = self.x.shape[1]
        self.memo: dict[str, torch.Tensor] = {}

    def read(self) -> torch.Tensor:
        """As many a batch does: the first caller fills a memo, which the next microbatch must not find."""
        return self.memo.setdefault("doubled", self.x * 2)


class Bag(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class AttributeDict(dict[str, Any]):
    """The well-known one."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class BothWays(dict[str, Any]):
    """One whose attributes are set beside its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__.update(items)


class Images(list[torch.Tensor]):
    def __init__(self, images: Sequence[torch.Tensor], size: tuple[int, int, int]) -> None:
        super().__init__(images)
        self.size = size


class Graph:
    def __init__(self, nodes: torch.Tensor, kind: str) -> None:
        self.nodes, self.kind = nodes, kind


register_pytree_node(Graph, lambda graph: ([graph.nodes], graph.kind), lambda nodes, kind: Graph(*nodes, kind))


@dataclass(frozen=True)
class Settings:
    depth: int = 2


register_constant(Settings)


class Tagged(torch.Tensor):
    """A subclass that says nothing of how it is cut."""


Pair = namedtuple("Pair", ["x", "y"])


def sequences(x: torch.Tensor) -> list[torch.Tensor]:
    """A sequence of 1 to 5 steps for each row, as its numbers say."""
    return [row[None].expand(1 + int((row > 0).sum()), WIDTH) for row in x]


def jagged(x: torch.Tensor, layout: torch.layout = torch.jagged) -> torch.Tensor:
    return torch.nested.as_nested_tensor(sequences(x), layout=layout)


def packed(x: torch.Tensor) -> Any:
    return pack_sequence(sequences(x), enforce_sorted=False)


def packed_alike(x: torch.Tensor) -> Any:
    return pack_sequence([x[i, None].expand(M, WIDTH) * torch.arange(1.0, M + 1)[:, None] for i in range(len(x))])


def last_of(sequences: Any) -> torch.Tensor:
    padded, lengths = pad_packed_sequence(sequences, batch_first=True)
    return padded[torch.arange(len(lengths)), lengths - 1] + lengths[:, None]


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (lambda x: Sample(x), lambda b: b.x * b.scale * b.names["a"]),
    "frozen dataclass": (lambda x: Frozen(Sample(x), x > 0), lambda b: b.inner.x * b.mask),
    "dataclass with attributes": (WithLength, lambda b: b.read() / b.width),
    "UserDict": (lambda x: UserDict(x=x, more={"y": x}), lambda b: b["x"] + b["more"]["y"]),
    "dict subclass": (lambda x: Bag(x=x, flag=True), lambda b: b.x * b.flag),
    "dict subclass with attributes": (
        lambda x: AttributeDict(x=x, more=BothWays(y=x)),
        lambda b: b.x + b["x"] * b.more.y + b.more["y"],
    ),
    "list subclass": (lambda x: Images([x, x + 1], (3, 8, 8)), lambda b: b[0] * b[1] * b.size[0]),
    "OrderedDict, deque, namedtuple": (
        lambda x: OrderedDict(a=deque([x], maxlen=1), b=Pair(x, None)),
        lambda b: b["a"][0] * b["a"].maxlen + b["b"].x,
    ),
    "registered pytree": (lambda x: Graph(x, "graph"), lambda b: b.nodes * len(b.kind)),
    "registered constant": (lambda x: (x, Settings()), lambda b: b[0] * b[1].depth),
    "numpy array": (lambda x: x.numpy(), lambda b: torch.as_tensor(b)),
    "jagged tensor": (jagged, lambda b: torch.stack([one.sum(0) for one in b.unbind()])),
    "nested tensor": (lambda x: jagged(x, torch.strided), lambda b: torch.stack([one.sum(0) for one in b.unbind()])),
    "PackedSequence": (packed, last_of),
    "PackedSequence of equal lengths": (packed_alike, last_of),
    "sparse tensor": (lambda x: x.relu().to_sparse(), lambda b: b.to_dense()),
    "tensor subclass": (lambda x: x.as_subclass(Tagged), lambda b: b.as_subclass(torch.Tensor)),
}


class Reading(nn.Module):
    """The first stage of a model: reads its batch."""

    def __init__(self, read: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.read, self.linear = read, nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.tanh(self.linear(self.read(batch)))


class Layer(Reading):
    def __init__(self) -> None:
        super().__init__(lambda x: x)


def case_of(make: Callable[[torch.Tensor], Any], read: Callable[[Any], torch.Tensor]) -> Case:
    """A model that gets such a batch as its argument, and as its target."""

    def batch(step: int) -> Batch:
        x = rows_of(step)
        cut = [((make(part),), {}, make(part + 1)) for part in x.chunk(M)]
        return Batch((make(x),), make(x + 1), cut=cut)

    return Case(
        lambda: [Reading(read), *(Layer() for _ in range(NUM_STAGES - 1))],
        batch,
        lambda output, target: F.mse_loss(output, read(target)),
        steps=2,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_cut_along_its_samples(kind: str) -> None:
    case_of(*KINDS[kind]).check(["1f1b", "recompute"])


@pytest.mark.parametrize("kind", ["frozen dataclass", "jagged tensor"])
def test_under_every_other_schedule(kind: str) -> None:
    case_of(*KINDS[kind]).check(sorted(set(SCHEDULES) - {"1f1b", "recompute"}))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_what_a_single_process_makes(kind: str) -> None:
    """Of the same type, with the same tensors in them, which the checks of inputs and the memory's bookkeeping find."""
    make, read = KINDS[kind]
    x = rows_of(0)
    cutting = Cutting(M)
    parts = cutting.split((make(x),), None, "args")
    cutting.check()
    for (part,), rows in zip(parts, x.chunk(M), strict=True):
        expected = make(rows)
        assert type(part) is type(expected) or kind == "tensor subclass"
        assert torch.equal(read(part), read(expected))
        assert len(tensors_in(part)) == len(tensors_in(expected)) >= (kind != "numpy array")
        assert describe(part) == describe(expected) or kind == "tensor subclass"
        assert all(not tensor.requires_grad for tensor in tensors_in(detached(part)))


@pytest.mark.parametrize("kind", ["jagged tensor", "nested tensor", "PackedSequence", "sparse tensor"])
def test_microbatches_of_other_sizes_are_described_one_by_one(kind: str) -> None:
    x = rows_of(0)
    call, specs = call_of(KINDS[kind][0](x)), Specs(None, None, None)
    descriptions = microbatches_of(call, M, specs, is_training=True).descriptions()
    assert len(set(descriptions)) > 1
    assert len(set(microbatches_of(call_of(x), M, specs, is_training=True).descriptions())) == 1


def test_jagged_tensors_that_shared_their_offsets_still_do() -> None:
    x = jagged(rows_of(0))
    scale = torch.nested.nested_tensor_from_jagged(torch.full_like(x.values(), 2.0), x.offsets())
    for one, other in Cutting(M).split((x, scale), None, "args"):
        assert torch.equal((one * other).values(), one.values() * 2)


# What is refused


class Unknown:
    """A batch of a class that nobody knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@dataclass
class Cached:
    x: torch.Tensor

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        return self.x > 0


def cached(x: torch.Tensor) -> Cached:
    batch = Cached(x)
    assert batch.mask.any()
    return batch


class Masked:
    __slots__ = ("__mask",)

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        self.__mask = x > 0
        return self.__mask


@dataclass
class WithMask(Masked):
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.mask(self.x)


@dataclass
class Stubborn:
    """Its copies are made of something else."""

    x: torch.Tensor

    def __copy__(self) -> Stubborn:
        raise NotImplementedError("no copies")


@dataclass
class Single:
    """One for the whole process: all instances share their attributes, so that its copy is it."""

    x: torch.Tensor

    def __copy__(self) -> Single:
        new = object.__new__(Single)
        new.__dict__ = self.__dict__
        return new


class Uneven(torch.Tensor):
    """A subclass whose parts are not what is asked for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result[:-1] if func is torch.Tensor.tensor_split else result


def of_document(x: torch.Tensor) -> Callable[..., Any]:
    return lambda b, h, q, k: x[b, q] == x[b, k]


def numbered(x: torch.Tensor) -> Any:
    return (row for row in x)


UNKNOWN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "object": (
        Unknown,
        r" is a tests\.edge_cases\.test_batches\.Unknown, which bpipe does not know how to cut \(if the class is yours",
    ),
    "object in a pytree": (lambda x: {"more": [x, Unknown(x)]}, r"\['more'\]\[1\] is a .*Unknown"),
    "SimpleNamespace": (lambda x: SimpleNamespace(x=x), "types.SimpleNamespace"),
    "UserList": (UserList, "collections.UserList"),
    "ChainMap": (lambda x: ChainMap({"x": x}), "collections.ChainMap"),
    "generator": (numbered, "is a generator, which"),
    "iterator": (iter, "Iterator|iterator"),
    "dict view": (lambda x: {"x": x}.values(), "dict_values"),
    "mappingproxy": (lambda x: MappingProxyType({"x": x}), "mappingproxy"),
    "set of tensors": (lambda x: {x}, "is a set, which"),
    "function over a tensor": (of_document, "is a function, which"),
    "partial over an array": (lambda x: functools.partial(of_document, x.numpy()), "functools.partial"),
    "method of an object": (lambda x: UserDict(x=x).get, "is a method, which"),
    "cached property": (cached, r"\.mask is a tensor or an array in an attribute"),
    "tensor in a private slot": (WithMask, r"\._Masked__mask is a tensor or an array in an attribute"),
    "dataclass that does not copy": (
        Stubborn,
        "Stubborn, and it cannot be rebuilt from other parts: NotImplementedError: no copies",
    ),
    "object that is its own copy": (Single, "Single, and it cannot be rebuilt from other parts: TypeError: its copy is itself"),
    "tensor subclass with parts of its own": (lambda x: x.as_subclass(Uneven), r"shapes \[\(2, 4\)\] instead of 8 times \[2, 4\]"),
    "csr": (lambda x: x.to_sparse_csr(), "layout torch.sparse_csr, which torch cannot cut"),
    "jagged tensor that requires a gradient": (
        lambda x: torch.nested.nested_tensor(sequences(x), layout=torch.jagged, requires_grad=True),
        "nested or sparse tensor that requires a gradient",
    ),
    "too few sequences": (lambda x: packed(x[:12]), "of 12 samples does not divide into 8 microbatches"),
    "numbers": (lambda x: list(range(ROWS)), "is a list of 16 entries, and may have one for each sample or be the same for all"),
    "captions": (lambda x: tuple(map(str, range(ROWS))), "is a tuple of 16 entries"),
    "metadata": (lambda x: [{"id": i} for i in range(ROWS)], "is a list of 16 entries"),
    "boxes": (lambda x: [torch.zeros(M, 4) for _ in range(ROWS)], "is a list of 16 entries"),
    "two thirds": (lambda x: torch.zeros(ROWS // 2 * 3), "has 24 rows but .* 16: a microbatch would get 3 and 2 of them"),
    "half": (lambda x: torch.zeros(ROWS // 2), "has 8 rows but .* 16: a microbatch would get 1 and 2 of them"),
}


class Taking(Layer):
    """Takes whatever it is given beside its input."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x)


def taking(args: Sequence[Any] = (), target: Any = None, kwargs: dict[str, Any] | None = None) -> Case:
    x = rows_of(0)
    target = x if target is None else target
    return Case(
        lambda: [Taking() for _ in range(NUM_STAGES)],
        lambda step: Batch((x, *args), target, kwargs or {}),
        lambda output, target: output.square().mean(),
    )


WAYS_OUT = {
    "args": r"^args\[0\].* Give args_chunk_spec=, .*step\(arg_mbs=...\)$",
    "kwargs": r"^kwargs\['extra'\].* Give kwargs_chunk_spec=, .*step\(kwarg_mbs=...\)$",
    "the target": r"^the target.* [Cc]ut it yourself: step\(target_mbs=...\)$",
}


def cut(name: str, value: Any) -> None:
    cutting = Cutting(M)
    cutting.split((rows_of(0),), None, "rows")
    cutting.split({"args": (value,), "kwargs": {"extra": value}, "the target": value}[name], None, name)
    cutting.check()


@pytest.mark.parametrize("kind", UNKNOWN)
def test_refused_by_type_and_name(kind: str) -> None:
    make, message = UNKNOWN[kind]
    taking([make(rows_of(0))]).refused(ConfigurationError, f"(?i)^args.*{message}", ["1f1b"])
    for name, way_out in WAYS_OUT.items():
        with pytest.raises(ConfigurationError, match=f"(?is){way_out}"):
            cut(name, make(rows_of(0)))


def test_refused_under_every_schedule() -> None:
    taking([Unknown(rows_of(0))]).refused(ConfigurationError, "Unknown")


@pytest.mark.parametrize("kind", UNKNOWN)
def test_the_way_out_repeats_anything_whole(kind: str) -> None:
    value = UNKNOWN[kind][0](rows_of(0))
    cutting = Cutting(M)
    parts = cutting.split((rows_of(0), value), (TensorChunkSpec(0), None), "args")
    cutting.check()
    assert all(part[1] is value for part in parts)


PLAIN = [
    None,
    True,
    3,
    2.5,
    1j,
    "text",
    b"bytes",
    torch.float32,
    torch.device("cpu"),
    torch.Size([ROWS]),
    torch.Generator(),
    range(ROWS),
    slice(3),
    Path("."),
    nn.Linear(2, 2),
    nn.Linear,
    F.relu,
    torch.relu,
    np.float32(2),
    functools.partial(F.leaky_relu, negative_slope=0.1),
    {"a", "b"},
    [1, 2, 3],
    (None,) * ROWS,
    {"a": [1, 2]},
]


def test_what_holds_no_samples_is_repeated() -> None:
    cutting = Cutting(M)
    parts = cutting.split((rows_of(0), *PLAIN), None, "args")
    cutting.check()
    assert all(list(part[1:]) == PLAIN for part in parts)


def test_lists_that_are_no_lists_of_samples() -> None:
    """Hidden states of as many layers as samples, one microbatch."""
    x = rows_of(0)
    cutting = Cutting(M)
    parts = cutting.split((x, [x] * ROWS), None, "args")
    cutting.check()
    assert [len(parts[0][1]), len(parts[0][1][0])] == [ROWS, 2]
    for value in ([1] * 4, [torch.zeros(4), torch.zeros(6)]):
        cutting = Cutting(1)
        cutting.split({"more": value}, None, "kwargs")
        cutting.check()


def test_a_list_on_a_rank_without_any_tensor() -> None:
    """Nothing says there how many samples a batch has: a rank in the middle repeats image_size=(224, 224), as the others do."""
    cutting = Cutting(2)
    assert cutting.split({"image_size": (224, 224)}, None, "kwargs") == [{"image_size": (224, 224)}] * 2
    cutting.check()


def test_a_graph_inside_a_dataclass_is_noticed() -> None:
    x = rows_of(0).requires_grad_() * 2
    case = case_of(lambda x: Frozen(Sample(x), x > 0), lambda b: b.inner.x)
    case.batch = lambda step: Batch((Frozen(Sample(x), x > 0),), rows_of(1))
    case.refused(ConfigurationError, "is part of an autograd graph", ["1f1b"])


class Changing(Reading):
    """Changes the batch that it was given."""

    def forward(self, batch: Any) -> torch.Tensor:
        y = super().forward(batch)
        batch.inner.x.add_(1)
        return y


def test_a_batch_that_is_changed_inside_a_dataclass_cannot_be_recomputed() -> None:
    case = case_of(*KINDS["frozen dataclass"])
    case.make = lambda: [Changing(KINDS["frozen dataclass"][1]), *(Layer() for _ in range(NUM_STAGES - 1))]
    with pytest.raises(StageError, match="its input was changed in place"):
        case.piped(SCHEDULES["recompute"])


@pytest.mark.parametrize("shape", [(1, 3), (1, 1, 3, 3)])
def test_one_row_for_all_samples_may_be_repeated(shape):
    """Position ids and masks: to drop the last batch is not the only advice."""
    with pytest.raises(
        ConfigurationError, match=r"None for a value that each microbatch gets whole, such as position ids or a mask"
    ):
        Cutting(4).split({"given": torch.ones(shape)}, None, "kwargs")


def test_a_target_with_fewer_rows_is_refused_beside_a_spec():
    given = call_of(torch.randn(8, 3), target=torch.randn(4, 3))
    for specs in (Specs(None, None, None), Specs((TensorChunkSpec(0),), None, None)):
        with pytest.raises(ConfigurationError, match=r"^the target has 4 rows"):
            microbatches_of(given, 4, specs, is_training=True)


@pytest.mark.parametrize(
    "one, other",
    [(torch.float32, torch.float64), (range(2), range(3)), (np.bool_(True), np.bool_(False)), (b"a", b"b"), (int, str)],
)
def test_what_may_select_a_branch_is_another_shape(one, other):
    assert describe(one) != describe(other)


def test_a_value_that_holds_itself_is_refused_by_name():
    @dataclass
    class Node:
        x: torch.Tensor
        parent: Any = None

    node = Node(torch.zeros(8, 2))
    node.parent = node
    with pytest.raises(ConfigurationError, match=r"^args holds itself"):
        Cutting(4).split((node,), None, "args")


class Growing:
    """Looks like a cache of keys and values: it grows with each forward."""

    def get_seq_length(self) -> int:
        return 0


@pytest.mark.parametrize("where", ["args", "kwargs", "a target", "a dict", "a tuple", "an evaluation"])
def test_a_cache_is_left_out_or_given_by_microbatch(where: str) -> None:
    """No class of the user's to register, and none to repeat: all microbatches would share it."""
    cutting, cache = Cutting(M), Growing()
    values: dict[str, tuple[str, Any]] = {
        "args": ("args", (rows_of(0), cache)),
        "kwargs": ("kwargs", {"past_key_values": cache}),
        "a target": ("the target", cache),
        "a dict": ("kwargs", {"more": {"cache": cache}}),
        "a tuple": ("args", (rows_of(0), (rows_of(0), cache))),
        "an evaluation": ("kwargs", {"x": rows_of(0), "cache": cache}),
    }
    name, value = values[where]
    own = {"args": "arg", "kwargs": "kwarg"}.get(name, "target")
    told = rf"{name}.* is a .*Growing, which all microbatches would share: leave it out .* each microbatch its own: step\({own}_mbs"
    with pytest.raises(ConfigurationError, match=told):
        cutting.split(value, None, name)


def test_the_caches_of_microbatches_are_given_by_microbatch() -> None:
    seen = []

    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
            seen.append(cache)
            return super().forward(x)

    schedule = bpipe.OneFOneB(bpipe.PipelineStage(Takes(3, 3), 0, 1, "cpu", group=bpipe.Loopback(1).rank(0)), 2)
    caches = [Growing(), Growing()]
    schedule.eval(arg_mbs=[(torch.ones(2, 3),)] * 2, kwarg_mbs=[{"cache": one} for one in caches])
    assert seen == caches
