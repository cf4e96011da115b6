"""A stage's piece of the graph: entered through aliases, left by its edges, and owning alone what it saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from bpipe.backward.autograd import InputGrads, edges_of, enter, run_backward
from bpipe.memory.saved.storages import owners

T = torch.Tensor


def gradient(module: Callable[[T], T], x: T) -> T:
    x = x.clone().requires_grad_()
    module(x.clone()).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    "module",
    [
        lambda x: x.relu_(),
        lambda x: x.mul_(2).exp_(),
        lambda x: x.view(-1).add_(1).square(),
        lambda x: x.t().tanh(),
        lambda x: x[:1],
    ],
)
def test_gradients_also_if_the_first_operation_is_in_place(module: Callable[[T], T]) -> None:
    x = torch.randn(2, 3)
    (entered,), input_grads = enter([x.clone()], [True])
    output = module(entered)
    run_backward(edges_of([output]), [torch.ones_like(output)])
    assert input_grads.gradients[0] is not None
    assert torch.equal(input_grads.gradients[0], gradient(module, x))


def test_inputs_are_the_same_memory_and_no_views() -> None:
    x = torch.randn(4, 6)[1:, ::2].t()
    (entered,), _ = enter([x], [True])
    assert entered.requires_grad and not entered.is_leaf and entered._base is None
    assert (entered.data_ptr(), entered.shape, entered.stride()) == (x.data_ptr(), x.shape, x.stride())
    assert torch.equal(entered, x)


def test_only_what_needs_a_gradient_has_one() -> None:
    """Unused inputs give None; integer and frozen ones pass untouched, and keep their places."""
    x, ids, frozen, unused = torch.ones(3), torch.tensor([2, 0]), torch.ones(3), torch.ones(3)
    entered, input_grads = enter([x, ids, frozen, unused], [True, False, False, True])
    assert entered[1] is ids and entered[2] is frozen
    assert [tensor.requires_grad for tensor in entered] == [True, False, False, True]
    run_backward(edges_of([(entered[0] * entered[2])[entered[1]]]), [torch.tensor([5.0, 7.0])])
    assert input_grads.gradients[1] is None
    assert input_grads.gradients[0] is not None
    assert input_grads.gradients[0].tolist() == [7, 0, 5]


def test_nothing_needs_a_gradient() -> None:
    ids = torch.tensor([1])
    entered, input_grads = enter([ids], [False])
    assert entered[0] is ids
    assert input_grads.gradients == []
    assert enter([], [])[0] == []


def test_no_gradient_before_the_backward_and_none_without_one() -> None:
    entered, input_grads = enter([torch.ones(2), torch.ones(2)], [True, True])
    run_backward(edges_of([entered[0] * 2]), [None])
    assert input_grads.gradients == [None, None]
    run_backward([], [])


def test_one_tensor_twice() -> None:
    x = torch.ones(2)
    (a, b), input_grads = enter([x, x], [True, True])
    run_backward(edges_of([a * 3 + b * 5]), [torch.ones(2)])
    assert [None if g is None else g.tolist() for g in input_grads.gradients] == [[3, 3], [5, 5]]


def test_edges_of_several_outputs() -> None:
    (entered,), input_grads = enter([torch.ones(2)], [True])
    outputs = [entered * 2, torch.ones(2), entered * 3, entered * 5]
    edges = edges_of(outputs)
    assert len(edges) == 3
    run_backward(edges, [torch.ones(2), None, torch.full((2,), 10.0)])
    assert input_grads.gradients[0] is not None
    assert input_grads.gradients[0].tolist() == [52, 52]


def test_as_many_gradients_as_edges() -> None:
    (entered,), _ = enter([torch.ones(2)], [True])
    with pytest.raises(ValueError, match="shorter"):
        run_backward(edges_of([entered * 2]), [])


def test_what_saved_the_input_owns_it_alone() -> None:
    x = torch.ones(5)
    storage = x.untyped_storage()
    entered, _box = enter([x], [True])
    del x
    edges = edges_of([entered[0].square()])
    assert owners(storage) == 1
    entered.clear()
    assert owners(storage) == 1
    edges.clear()
    assert owners(storage) == 0


def test_an_output_is_freed_though_its_edge_is_kept() -> None:
    (entered,), _box = enter([torch.ones(5)], [True])
    output = entered * 2
    seen = weakref.ref(output)
    edges = edges_of([output])
    del output
    assert edges and seen() is None


def test_nothing_is_left_to_the_cycle_collector() -> None:
    gc.disable()
    try:
        (entered,), input_grads = enter([torch.ones(5)], [True])
        seen: weakref.ref[InputGrads] = weakref.ref(input_grads)
        output = entered.exp()
        run_backward(edges_of([output]), [torch.ones(5)])
        del entered, output, input_grads
        assert seen() is None
    finally:
        gc.enable()


def test_a_backward_to_some_leaves_keeps_the_rest_for_another() -> None:
    weight, (entered,), input_grads = torch.full((2,), 3.0, requires_grad=True), *enter([torch.ones(2)], [True])
    edges, leaf = edges_of([entered * weight]), get_gradient_edge(weight)
    assert input_grads.anchor is not None
    run_backward(edges, [torch.ones(2)], inputs=[get_gradient_edge(input_grads.anchor)], retain_graph=True)
    assert weight.grad is None and input_grads.gradients[0] is not None and input_grads.gradients[0].tolist() == [3, 3]
    run_backward(edges, [torch.ones(2)], inputs=[leaf])
    assert weight.grad is not None and weight.grad.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="a second time"):
        run_backward(edges, [torch.ones(2)])


def test_all_ways_to_the_inputs_end_at_the_anchor() -> None:
    (first, second), input_grads = enter([torch.ones(2), torch.ones(2)], [True, True])
    assert input_grads.anchor is not None and input_grads.anchor.is_leaf and input_grads.anchor.grad is None
    for entered in (first, second):
        assert entered.grad_fn is not None
        assert [node for node, _ in entered.grad_fn.next_functions if node is not None] == [
            get_gradient_edge(input_grads.anchor).node
        ]
    assert enter([torch.ones(2)], [False])[1].anchor is None
