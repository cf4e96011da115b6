"""What a last stage returns is put together as a single process puts it, or refused before any gradient was added."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, merge_chunks, sum_reducer
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_structure

import bpipe
from bpipe.errors import ConfigurationError, StageError
from bpipe.model.pytree import leaves_of
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, M, pipeline
from tests.edge_cases.test_batches import AttributeDict, Bag, Graph, Images, Layer, Pair, Unknown, jagged, rows_of
from tests.over import nested

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")]


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    note: str = "same"


class Last(Layer):
    """Returns a tensor in some wrapping."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


def tensor_in(output: Any) -> torch.Tensor:
    return next(leaf for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)


def run(wrap: Callable[[torch.Tensor], Any], schedule: Any = bpipe.OneFOneB, **options: Any) -> tuple[Any, list[Any], list[Any]]:
    """Step once; return the outputs, the schedules and the modules."""
    torch.manual_seed(0)
    modules = [*(Layer() for _ in range(NUM_STAGES - 1)), Last(wrap)]
    loss_fn = lambda output, target: F.mse_loss(tensor_in(output), target)  # noqa: E731
    loopback, schedules = pipeline(schedule, modules, loss_fn)
    if options:
        schedules = [bpipe.OneFOneB(list(one.session.context.stages.values()), M, loss_fn=loss_fn, **options) for one in schedules]
    try:
        return loopback.step(schedules, rows_of(0), target=rows_of(1)), schedules, modules
    except Exception as error:
        error.modules = modules  # type: ignore[attr-defined]
        raise


MERGED: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": lambda y: Output(y, y.mean()),
    "UserDict": lambda y: UserDict(logits=y, more=[y + 1]),
    "dict subclass": lambda y: Bag(logits=y),
    "dict subclass with attributes": lambda y: AttributeDict(logits=y),
    "list subclass": lambda y: Images([y, y + 1], (3, 8, 8)),
    "registered pytree": lambda y: Graph(y, "graph"),
    "namedtuple and deque": lambda y: Pair(deque([y]), None),
    "numpy array": lambda y: (y, y.detach().numpy(), np.array(1.0)),
    "one in a tuple": lambda y: (y,),
}


@pytest.mark.parametrize("kind", MERGED)
def test_outputs_are_put_together(kind: str) -> None:
    """All tensors of all microbatches are there in order, without a graph."""
    wrap = MERGED[kind]
    merged, _, modules = run(wrap)
    assert type(merged) is type(wrap(torch.zeros(2, 4)))
    with torch.no_grad():
        value = rows_of(0)
        each = []
        for x in value.chunk(M):
            for module in modules:
                x = module(x)
            each.append(x)
        expected = [list(leaves_of(x)) for x in each]
    for i, leaf in enumerate(leaves_of(merged)):
        column = [leaves[i] for leaves in expected]
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            join = torch.stack if leaf.ndim == 0 or column[0].ndim == 0 else torch.cat
            assert torch.equal(torch.as_tensor(leaf), join([torch.as_tensor(one) for one in column]))
            assert not torch.as_tensor(leaf).requires_grad
        else:
            assert leaf == column[0]


def test_under_every_schedule() -> None:
    expected = run(MERGED["dataclass"])[0]
    for name, schedule in SCHEDULES.items():
        merged = run(MERGED["dataclass"], schedule)[0]
        assert torch.equal(merged.logits, expected.logits), name
        assert torch.equal(merged.loss, expected.loss), name


SINGLE = [(TensorChunkSpec(0),), [TensorChunkSpec(0)], {"logits": TensorChunkSpec(0)}, (TensorChunkSpec(1),)]


@pytest.mark.parametrize("spec", SINGLE)
def test_one_spec_in_a_nest_puts_a_single_output_into_that_nest_as_torch_does(spec: Any) -> None:
    merged, *_ = run(lambda y: y, output_merge_spec=spec)
    parts = list(run(lambda y: y)[0].chunk(M))
    theirs = merge_chunks(parts, spec)
    assert type(merged) is type(theirs)
    for ours, expected in zip(tree_leaves(merged), tree_leaves(theirs), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("wrap", "spec"),
    [
        (lambda y: (y, {"twice": 2 * y}), (TensorChunkSpec(0), TensorChunkSpec(1))),
        (lambda y: {"y": y, "twice": 2 * y}, (TensorChunkSpec(0), sum_reducer)),
        (lambda y: (y, 2 * y), {"first": TensorChunkSpec(1), "second": [TensorChunkSpec(0)]}),
    ],
)
def test_a_result_is_nested_like_specs_that_are_nested_in_another_way_as_in_torch(wrap: Callable[..., Any], spec: Any) -> None:
    merged, *_ = run(wrap, output_merge_spec=spec)
    theirs = merge_chunks([wrap(part) for part in run(lambda y: y)[0].chunk(M)], spec)
    assert tree_structure(merged) == tree_structure(theirs)
    assert all(torch.equal(one, other) for one, other in zip(tree_leaves(merged), tree_leaves(theirs), strict=True))


def test_specs_for_the_fields_of_an_object() -> None:
    columns = run(lambda y: y, output_merge_spec=TensorChunkSpec(1))[0]
    for spec in (
        {"logits": TensorChunkSpec(1), "loss": sum_reducer, "note": None},
        (TensorChunkSpec(1), sum_reducer, None),
        Output(TensorChunkSpec(1), sum_reducer, None),  # type: ignore[arg-type]
    ):
        merged, *_ = run(MERGED["dataclass"], output_merge_spec=spec)
        assert torch.equal(merged.logits, columns)
        assert merged.loss.ndim == 0


def with_attribute(y: torch.Tensor) -> Any:
    bag = Images([y], (1, 1, 1))
    bag.unknown = Unknown(y)  # type: ignore[attr-defined]
    return bag


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "object": (Unknown, "a Unknown cannot be put together"),
    "object in a pytree": (lambda y: {"logits": y, "cache": (y, Unknown(y))}, r"output\['cache'\]\[1\]: a Unknown cannot"),
    "object in a dataclass": (lambda y: Output(y, note=Unknown(y)), r"output\.note: a Unknown cannot"),  # type: ignore[arg-type]
    "object in an attribute": (with_attribute, r"output\.unknown: a Unknown cannot"),
    "complex": (lambda y: (y, 1j), r"output\[1\]: a complex cannot"),
    "csr": (lambda y: (y, y.detach().to_sparse_csr()), r"output\[1\]: tensors of layout torch.sparse_csr cannot"),
    "PackedSequence": (lambda y: torch.nn.utils.rnn.pack_sequence([y]), "a PackedSequence cannot be put together"),
    "iterator": (lambda y: [y, iter([y])], r"output\[1\]: a list_iterator cannot be put together"),
}


def refused(error: pytest.ExceptionInfo[Any]) -> None:
    """No gradient was added anywhere."""
    assert all(parameter.grad is None for module in error.value.modules for parameter in module.parameters())


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_at_the_first_forward(kind: str) -> None:
    wrap, message = REFUSED[kind]
    with pytest.raises(StageError, match=rf"{message}.*pass return_outputs=False") as error:
        run(wrap)
    refused(error)


def test_specs_that_do_not_fit_are_refused_at_the_first_forward() -> None:
    pair = (TensorChunkSpec(0), TensorChunkSpec(0))
    for wrap, spec in ((lambda y: y, pair), (MERGED["dataclass"], pair), (MERGED["UserDict"], {"logits": None})):
        with pytest.raises(ConfigurationError, match=r"the output: .* has the spec .*: give one for each value") as error:
            run(wrap, output_merge_spec=spec)
        refused(error)
    with pytest.raises(StageError, match="it has no dimension 2") as raised:
        run(lambda y: y, output_merge_spec=TensorChunkSpec(2))
    refused(raised)


@pytest.mark.parametrize("name", ["args_chunk_spec", "kwargs_chunk_spec", "target_chunk_spec", "output_merge_spec"])
@pytest.mark.parametrize("spec", [0, (0,), {"x": 1}, (TensorChunkSpec(0), "x"), [TensorChunkSpec(None)], Output(torch.ones(1))])
def test_what_is_no_spec_is_refused_by_the_constructor(name: str, spec: Any) -> None:
    """A bare number among them, which said nothing, so that the whole batch went to every microbatch."""
    loopback = bpipe.Loopback(1)
    stage = bpipe.PipelineStage(Layer(), 0, 1, "cpu", loopback.rank(0))
    with pytest.raises(ConfigurationError, match=rf"^{name} contains a \w+, .*: give TensorChunkSpec\(dim\)"):
        bpipe.OneFOneB(stage, M, **nested({name: spec}))
    bpipe.OneFOneB(stage, M, **nested({name: (TensorChunkSpec(0), None, _Replicate, _Replicate())}))


def test_nested_outputs_of_an_evaluation() -> None:
    """Jagged ones, of which no two microbatches have the same sizes."""
    loopback = bpipe.Loopback(1)

    class Doubling(Layer):
        def forward(self, batch: Any) -> Any:
            return batch * 2

    schedule = bpipe.OneFOneB(bpipe.PipelineStage(Doubling(), 0, 1, "cpu", loopback.rank(0)), M)
    x = rows_of(0)
    for one, other in zip(schedule.eval(jagged(x)).unbind(), jagged(x).unbind(), strict=True):
        assert torch.equal(one, other * 2)


# Outputs that do not fit together, which nobody knows before the last stage has run them all

LENGTHS = [3, 5, 3, 4, 1, 2, 3, 6]


class ByNumber(Layer):
    """Wraps the output of each microbatch in another way, by how many rows it has seen."""

    def __init__(self, wrap: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__()
        self.wrap, self.number = wrap, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.number += 1
        return self.wrap(super().forward(x), (self.number - 1) % M)


UNEQUAL: dict[str, tuple[Callable[[torch.Tensor, int], Any], dict[str, Any]]] = {
    "lengths": (lambda y, i: y[:, : 1 + i % 4], {}),
    "another number of dimensions": (lambda y, i: y if i % 2 else y[..., None], {}),
    "a key more": (lambda y, i: {"y": y} if i else {"y": y, "first": y}, {}),
    "an entry more": (lambda y, i: (y,) * (1 + i % 2), {}),
    "nothing for some": (lambda y, i: (y, None if i == 2 else y), {}),
    "another type": (lambda y, i: [y] if i == M - 1 else (y,), {}),
    "a reducer over lengths": (lambda y, i: y[:, : 1 + i % 4], {"output_merge_spec": sum_reducer}),
    "lengths beside a spec": (lambda y, i: y[:1] if i == 3 else y, {"output_merge_spec": TensorChunkSpec(1)}),
}


def alone(modules: list[Any], xs: list[torch.Tensor], loss_fn: Callable[..., torch.Tensor]) -> list[Any]:
    """The outputs of the microbatches in a single process, which trains, too."""
    outputs = []
    for x in xs:
        for module in modules:
            x = module(x)
        (loss_fn(x, x) / M).backward()
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("kind", UNEQUAL)
@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.GPipe])
def test_outputs_that_do_not_fit_together_are_a_list(kind: str, schedule: Any) -> None:
    """One for each microbatch, and the step counts: gradients are those of a single process, and the next step runs."""
    wrap, options = UNEQUAL[kind]
    make = lambda: [*(Layer() for _ in range(NUM_STAGES - 1)), ByNumber(wrap)]  # noqa: E731
    loss_fn = lambda output, target: tensor_in(output).square().mean()  # noqa: E731
    torch.manual_seed(0)
    modules = make()
    torch.manual_seed(0)
    others = make()
    loopback, schedules = pipeline(schedule, modules, loss_fn)
    schedules = [schedule(list(one.session.context.stages.values()), M, loss_fn=loss_fn, **options) for one in schedules]
    for step in range(2):
        found = loopback.step(schedules, rows_of(step), target=rows_of(step))
        expected = alone(others, list(rows_of(step).chunk(M)), loss_fn)
        assert type(found) is list
        assert len(found) == M
        for one, other in zip(found, expected, strict=True):
            assert tree_structure(one) == tree_structure(other)
            assert all(map(torch.equal, leaves_of_tensors(one), leaves_of_tensors(other)))
            assert not any(leaf.requires_grad for leaf in leaves_of_tensors(one))
    for module, other in zip(modules, others, strict=True):
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), other.parameters(), strict=True))


def leaves_of_tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("is_training", [True, False])
def test_microbatches_of_several_lengths_return_theirs(is_training: bool) -> None:
    """In an evaluation, too; and a batch of one length comes back as one tensor in the next step."""
    modules = [Layer() for _ in range(NUM_STAGES)]
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, F.mse_loss)
    xs = [torch.randn(1, length, 4) for length in LENGTHS]
    run_it = loopback.step if is_training else loopback.eval
    found = run_it(schedules, arg_mbs=[(x,) for x in xs], target_mbs=xs)
    assert [one.shape for one in found] == [x.shape for x in xs]
    assert loopback.step(schedules, rows_of(0), target=rows_of(1)).shape == rows_of(0).shape
