"""Flows: what each shape adds, that shapes combine, and that a flow which cannot run is told apart."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.flow import shapes
from bpipe.flow.flow import Edge, Flow, Kind, Node, Shape
from bpipe.flow.shaping import shaped

RANKS = (0, 1, 2, 1, 0)  # of five stages in a V: two of them share a rank with others
SHAPES = {
    "directions": ("alternatives", (*RANKS, *(2 - rank for rank in RANKS)), ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)), True),
    "paths": ("alternatives", tuple(range(10)), ((0, 6, 2, 3, 4), (0, 1, 7, 8, 4), (5, 6, 7, 3, 9), (0, 1, 2, 3, 4)), False),
    "slices": ("slices", 3),
    "skips": ("skips", ((0, 2, 3, 4), (1, 4))),
    "local": ("local",),
}


def chain(num_microbatches: int = 4, *, has_backward: bool = True) -> Flow:
    return shaped(None, "chain", RANKS, num_microbatches, has_backward)


def with_shapes(*names: str) -> Flow:
    flow = chain()
    for name in names:
        flow = shaped(flow, *SHAPES[name])
    return flow


def combined() -> Iterator[tuple[str, ...]]:
    for size in range(5):
        yield from (names for names in combinations(SHAPES, size) if not {"directions", "paths"} <= {*names})


@pytest.mark.parametrize("names", list(combined()), ids="-".join)
def test_shapes_combine(names: tuple[str, ...]) -> None:
    """All that is needed is given, by a computation that runs before; each unit runs each part once."""
    flow = with_shapes(*names)
    assert flow.problem == ""
    ran: set[tuple[str, int, int]] = set()
    for unit in (flow.units * i + s for i in range(4) for s in range(flow.units)):
        turn = flow.turn_of(unit)
        for op in "FB":
            for part in range(5)[:: 1 if op == "F" else -1]:
                stage = flow.stage_of(part, turn)
                for end in flow.needs(op, stage, turn):
                    assert (end.op, end.stage, unit) in ran
                    assert any((back.op, back.stage, back.name) == (op, stage, end.name) for back in flow.gives(*end[:2], turn))
                assert flow.turns_of(stage).count(turn) == 1
                ran.add((op, stage, unit))
    assert len(ran) == 2 * 5 * flow.num_units


@pytest.mark.parametrize("names", list(combined()), ids="-".join)
def test_both_ends_of_a_message_see_it_alike(names: tuple[str, ...]) -> None:
    flow = with_shapes(*names)
    for turn in range(flow.period):
        for op in "FB":
            for stage in (flow.stage_of(part, turn) for part in range(5)):
                for sent in flow.sent(op, stage, turn):
                    found = [one for one in flow.received(*sent[:2], turn) if one[:2] == (op, stage)]
                    assert [one[3:] for one in found] == [sent[3:]]
                    assert sent.rank == flow.stage_ranks[sent.stage] != flow.stage_ranks[stage]


def test_a_rank_gets_a_skip_once() -> None:
    flow = with_shapes("skips")
    from_0 = [(end.stage, end.name) for end in flow.gives("F", 0, 0) if end.name]
    assert from_0 == [(2, "0-2-3-4"), (3, "0-2-3-4"), (4, "0-2-3-4")]  # on ranks 2, 1, and 0 itself
    assert [one.stage for one in flow.sent("F", 0, 0)] == [1, 2, 3]
    shared = shaped(shaped(None, "chain", (0, 1, 1), 1), "skips", ((0, 1, 2),))
    assert [end.stage for end in shared.gives("F", 0, 0) if end.name] == [1]
    assert [end.stage for end in shared.gives("F", 1, 0) if end.name] == [2]
    assert [end.stage for end in shared.needs("B", 1, 0) if end.name] == [2]
    assert [(one.stage, one.is_aside) for one in shared.sent("F", 0, 0)] == [(1, False)]  # in the message to the next stage


def test_a_skip_hands_on_where_a_path_puts_both_users_on_one_rank() -> None:
    flow = shaped(shaped(None, "chain", (0, 1, 2), 2), "alternatives", (0, 1, 2, 0, 1, 1), ((0, 1, 2), (3, 4, 5)), False)
    flow = shaped(flow, "skips", ((0, 1, 2),))
    assert flow.problem == ""
    assert [end.stage for end in flow.gives("F", 0, 0) if end.name] == [1, 2]
    assert [end.stage for end in flow.gives("F", 3, 1) if end.name] == [4]
    assert [end.stage for end in flow.gives("F", 4, 1) if end.name] == [5]


def test_what_is_used_first_is_sent_first() -> None:
    flow = shaped(shaped(None, "chain", (0, 1, 2, 3), 1), "skips", ((0, 2), (0, 3), (1, 3)))
    assert [one.stage for one in flow.sent("F", 0, 0)] == [1, 2, 3]
    assert [one.stage for one in flow.sent("B", 3, 0)] == [2, 1, 0]


def test_local_learning_sends_no_gradient() -> None:
    for names in (("local",), ("skips", "local"), ("local", "skips")):
        flow = with_shapes(*names)
        assert not any(flow.sent("B", stage, 0) for stage in range(5))
        assert not any(one.returns for stage in range(5) for one in flow.sent("F", stage, 0))


def test_twins_on_one_rank_add_nothing_up() -> None:
    assert with_shapes("directions").sums == ((0, 5), (2, 7), (4, 9))
    exchanges = with_shapes("directions").exchanges
    assert {stage: (part, other) for (stage, part), (other, _) in exchanges.items()} == {
        **{0: (0, 5), 5: (0, 0), 2: (0, 7), 7: (0, 2), 4: (0, 9), 9: (0, 4)}
    }
    assert not with_shapes("paths").sums


def test_evaluation_has_forwards_only() -> None:
    flow = shaped(shaped(chain(has_backward=False), "slices", 2), "skips", ((0, 2),))
    assert not flow.has_backward
    assert {node.op for node in flow.nodes} == {"F"}
    assert flow.problem == ""


@given(st.sampled_from(["F", "B"]), st.sampled_from(list(combined())))
def test_units_are_in_the_order_in_which_a_stage_takes_them(op: str, names: tuple[str, ...]) -> None:
    flow = with_shapes(*names)
    for stage in range(len(flow.stage_ranks)):
        units = list(flow.units_of(op, stage))
        assert [unit // flow.units for unit in units] == sorted(unit // flow.units for unit in units)
        for earlier, later in pairwise(units):
            assert flow.previous(op, stage)[later] == earlier
            assert earlier // flow.units < later // flow.units or (earlier < later) is (op == "F")
        assert sorted(units) == [unit for unit in range(flow.num_units) if flow.turn_of(unit) in flow.turns_of(stage)]


def test_what_another_source_comes_after_is_not_waited_for() -> None:
    latest = with_shapes("skips").latest_sources
    assert latest[Node("F", 3)] == (Node("F", 2),)
    assert latest[Node("B", 2)] == (Node("B", 3),)
    assert latest[Node("B", 4)] == (Node("F", 4),)
    assert with_shapes("local").latest_sources[Node("B", 2)] == (Node("F", 2),)


def test_a_flow_of_thousands_of_stages_is_small() -> None:
    flow = shaped(shaped(None, "chain", tuple(range(2000)), 10_000), "slices", 4)
    assert len(flow.edges) < 5 * 2000 + 2 * 2000
    assert flow.latest_sources[Node("B", 0)] == (Node("B", 1),)


WRONG = {
    "with its twin and with others": lambda flow: replace(with_shapes("directions"), sums=((0, 5), (0, 2))),
    "leads to a node that is not there": lambda flow: replace(flow, nodes=flow.nodes[1:]),
    "it stays on its stage": lambda flow: replace(flow, edges=(*flow.edges, Edge(Node("F", 0), Node("B", 1), Kind.SAVED))),
    "only state leads to other slices": lambda flow: replace(flow, edges=(Edge(Node("F", 0), Node("F", 0), Kind.VALUE),)),
    "gradients do not come back": lambda flow: replace(flow, edges=tuple(e for e in flow.edges if e.kind is not Kind.GRADIENT)),
    "goes to several parts": lambda flow: replace(flow, edges=(*flow.edges, Edge(Node("F", 0), Node("F", 2), Kind.DETACHED))),
    "but are not on two ranks": lambda flow: replace(flow, stage_ranks=(0, 0, 1, 2, 1), sums=((0, 1),)),
    "expected some of 5 stages, in ascending order": lambda flow: replace(flow, sums=((1, 0),)),
    "wait for each other": lambda flow: replace(
        flow, edges=(*flow.edges, Edge(Node("F", 3), Node("F", 1), Kind.DETACHED, "back"))
    ),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_flow_that_cannot_run_is_told_apart(problem: str) -> None:
    assert problem in WRONG[problem](chain()).problem


def test_slices_cannot_run_one_way_forward_and_need_the_other() -> None:
    """A forward that waited for a backward of its slice would wait for those of all later slices."""
    flow = shaped(chain(), "slices", 2)
    late = Node("F", 5)
    looped = replace(
        flow,
        stage_ranks=(*RANKS, 0),
        parts=(*flow.parts, 5),
        routes=(*flow.routes, (5,)),
        nodes=(*flow.nodes, late),
        edges=(*flow.edges, Edge(Node("B", 0), late, Kind.DETACHED), Edge(late, late, Kind.STATE)),
    )
    assert "wait for each other" in replace(looped, edges=(*looped.edges, Edge(late, Node("B", 4), Kind.DETACHED))).problem
    assert looped.problem == ""


def test_what_is_wrong_is_found_at_once_however_many_slices_there_are() -> None:
    assert shaped(shaped(None, "chain", (0, 1), 2), "slices", 10**9).problem == ""


def test_a_flow_goes_to_other_processes() -> None:
    """Hashes of text are of one process alone."""
    flow = with_shapes("slices", "skips")
    assert hash(flow) and flow.latest_sources
    other = pickle.loads(pickle.dumps(flow))
    assert other == flow and set(vars(other)) == {field.name for field in fields(Flow)}


SHAPES_THAT_ARE_NONE = [
    (None, ("slices", 2), "slices begins no flow"),
    (None, ("local",), "local begins no flow"),
    (None, ("__init__",), "no shape '__init__'"),
    (chain(), ("chain", (0, 1), 2), "chain follows no other shape"),
    (chain(), ("skips", {}), "skips {}: expected a tuple"),
    (chain(), ("skips", ((0, 2), (0, 2))), "one is there twice"),
    (with_shapes("skips"), ("skips", ((0, 2),)), "past the next one already"),
    (with_shapes("local"), ("local",), "gradients"),
    (chain(), ("alternatives", tuple(range(15)), (tuple(range(5)), tuple(range(5, 10)), tuple(range(10, 15))), True), "two ranks"),
]


@pytest.mark.parametrize(("flow", "shape", "why"), SHAPES_THAT_ARE_NONE, ids=str)
def test_shapes_that_are_none_say_why(flow: Flow | None, shape: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        shaped(flow, *shape)


def test_a_flow_says_what_made_it() -> None:
    assert with_shapes("slices", "local").shapes == (Shape("chain", (RANKS, 4, True)), Shape("slices", (3,)), Shape("local", ()))


def test_the_page_about_flows_names_all_shapes() -> None:
    folder = Path(shapes.__file__).parent
    names = {path.stem for path in folder.glob("[!_]*.py")}
    assert names and names == set(re.findall(r"^\| `(\w+)` \|", (folder.parent / "README.md").read_text(), re.MULTILINE))
