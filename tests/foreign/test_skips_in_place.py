"""Skips, outputs and what their users do with them: the model of a single process under every placement, or refused under each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import BPipeError
from tests.ranks import run_ranks

W, B, M = 4, 8, 4


def _with_data(value: torch.Tensor) -> torch.Tensor:
    value.data.mul_(2)
    return value


def _detached(value: torch.Tensor) -> torch.Tensor:
    value.detach().mul_(2)
    return value


def _rows(value: torch.Tensor) -> torch.Tensor:
    value[:1] = 0
    return value


def _column_of_a_view(value: torch.Tensor) -> torch.Tensor:
    value.view(-1)[::2].add_(1)
    return value


def _out(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.mul(value, 2, out=value)
    return value


def _foreach(value: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([value], 2.0)
    return value


def _set(value: torch.Tensor) -> torch.Tensor:
    value.set_(torch.ones_like(value))
    return value


def _numpy(value: torch.Tensor) -> torch.Tensor:
    value.detach().numpy()[...] *= 2
    return value


def _masked(value: torch.Tensor) -> torch.Tensor:
    return value.masked_fill_(value > 0, 0.0)


def _by_index(value: torch.Tensor) -> torch.Tensor:
    return value.index_copy_(0, torch.tensor([0]), torch.zeros(1, W))


def _resized(value: torch.Tensor) -> torch.Tensor:
    return value.transpose_(0, 1).t()


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ReLU(inplace=True)": nn.ReLU(inplace=True),
    "dropout in place": lambda value: F.dropout(value, 0.5, training=True, inplace=True),
    "iadd": lambda value: value.add_(1.0),
    "rows that are assigned": _rows,
    "a column of a view": _column_of_a_view,
    "an out argument under no_grad": _out,
    "a foreach function": _foreach,
    "masked_fill_": _masked,
    "index_copy_": _by_index,
    "detach().mul_": _detached,
    "strides in place": _resized,
}
UNSEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"through .data": _with_data, "through numpy": _numpy}


class Part(nn.Module):
    """Stage 0 makes the skip for stages 1 and 3; the stage `who` changes it."""

    def __init__(self, index: int, change: Callable[[torch.Tensor], torch.Tensor] | None, *, is_leaf: bool) -> None:
        super().__init__()
        self.linear, self.index, self.change, self.is_leaf = nn.Linear(W, W), index, change, is_leaf

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> Any:
        y = self.linear(x)
        if self.index == 0:
            made = x.detach() * 2 if self.is_leaf else torch.sin(y)
            return y, {"skip": made}
        if skip is not None:
            skip = self.change(skip) if self.change else skip
            y = y + skip
        return y


PLACES: dict[str, tuple[int, list[list[int]]]] = {
    "four ranks": (4, [[0], [1], [2], [3]]),
    "two ranks, in turns": (2, [[0, 2], [1, 3]]),
    "two ranks, in a V": (2, [[0, 3], [1, 2]]),
    "one rank": (1, [[0, 1, 2, 3]]),
}


def _step(who: int, change: Callable[[torch.Tensor], torch.Tensor], place: str, *, is_leaf: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    num_ranks, held = PLACES[place]
    modules = [Part(i, change if i == who else None, is_leaf=is_leaf) for i in range(4)]
    loopback = bpipe.Loopback(num_ranks, own_random_state=False)
    of_rank = [
        [bpipe.PipelineStage(modules[s], s, 4, "cpu", loopback.rank(r), skips={"skip": (0, 1, 3)}) for s in some]
        for r, some in enumerate(held)
    ]
    kind: Any = {"four ranks": bpipe.OneFOneB, "two ranks, in a V": bpipe.ZBV}.get(place, bpipe.Interleaved1F1B)
    ranks = [
        bpipe.OneFOneB(some, M, loss_fn=F.mse_loss) if num_ranks == 4 else kind(some, M, loss_fn=F.mse_loss) for some in of_rank
    ]
    x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
    loopback.step(ranks, x, target=x)
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def _single(who: int, change: Callable[[torch.Tensor], torch.Tensor], *, is_leaf: bool) -> list[torch.Tensor] | None:
    """What one process computes; None where torch itself refuses."""
    torch.manual_seed(0)
    modules = [Part(i, change if i == who else None, is_leaf=is_leaf) for i in range(4)]
    x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
    try:
        for rows in x.chunk(M):
            y, made = modules[0](rows)
            y = modules[2](modules[1](y, made["skip"]))
            (F.mse_loss(modules[3](y, made["skip"]), rows) / M).backward()
    except RuntimeError:
        return None
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def _outcome(who: int, change: Callable[[torch.Tensor], torch.Tensor], place: str, *, is_leaf: bool) -> str:
    try:
        got = _step(who, change, place, is_leaf=is_leaf)
    except (BPipeError, RuntimeError) as error:
        return (
            "refused"
            if "skip" in str(error) or "in place" in str(error) or "in-place" in str(error) or "inplace" in str(error)
            else str(error)
        )
    right = _single(who, change, is_leaf=is_leaf)
    same = right is not None and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, right, strict=True))
    return "same" if same else "another model"


@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_first_user_that_changes_a_skip_in_place_is_refused_wherever_the_second_is(name: str, is_leaf: bool) -> None:
    """A later user would see the change in one process, and not on another rank: one answer under all placements."""
    outcomes = {place: _outcome(1, CHANGES[name], place, is_leaf=is_leaf) for place in PLACES}
    assert set(outcomes.values()) <= {"same", "refused"}, outcomes
    assert "refused" in outcomes.values() or set(outcomes.values()) == {"same"}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_change_that_no_version_tells_of_is_not_seen(name: str) -> None:
    """`.data` and numpy write past autograd, too: docs/skips.md says that users on other ranks get the value unchanged."""
    assert _outcome(1, UNSEEN[name], "one rank", is_leaf=False) == "same"
    assert _outcome(1, UNSEEN[name], "four ranks", is_leaf=False) == "another model"


@pytest.mark.parametrize("name", [one for one in CHANGES if one != "dropout in place"])
def test_a_last_user_may_change_what_nobody_uses_after_it(name: str) -> None:
    """Stage 3 is the last user: where torch allows the change in one process, all placements give its gradients or refuse."""
    outcomes = {place: _outcome(3, CHANGES[name], place, is_leaf=True) for place in PLACES}
    assert set(outcomes.values()) <= {"same", "refused"}, outcomes
    assert outcomes["four ranks"] == "same" or _single(3, CHANGES[name], is_leaf=True) is None, outcomes


class Both(nn.Module):
    """Its output is its skip, in one of several ways, and the next stage changes what it gets."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(W, W), how

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x) + 0.5
        made = {
            "itself": lambda: (y, y),
            "a view of it": lambda: (y, y.view(-1, W)),
            "a part of it": lambda: (y, y[:, :2]),
            "it is a part": lambda: (y[:, :W], y),
            "a transposed view": lambda: (y, y.t()),
            "inside of a tuple": lambda: (y, (y, y.sum())),
            "a copy": lambda: (y, y.clone()),
            "expanded": lambda: (y, y[:, :1].expand(-1, W)),
        }[self.how]()
        return made[0], {"skip": made[1]}


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(2)) + x  # type: ignore[no-any-return]


class Uses(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(W, W), how

    def forward(self, x: torch.Tensor, skip: Any) -> torch.Tensor:
        value = skip[0] if isinstance(skip, tuple) else skip.t() if self.how == "a transposed view" else skip
        return self.linear(x) + value.sum(-1, keepdim=True)  # type: ignore[no-any-return]


OUTPUTS = ["itself", "a view of it", "a part of it", "it is a part", "a transposed view", "inside of a tuple", "a copy", "expanded"]
BOTH_PLACES: dict[str, list[list[int]]] = {"three ranks": [[0], [1], [2]], "one rank": [[0, 1, 2]]}


@pytest.mark.parametrize("how", OUTPUTS)
def test_an_output_that_is_a_skip_and_is_changed_is_one_model_or_refused(how: str) -> None:
    """In one process the skip's user sees what the next stage has done to the output: all placements do, or refuse."""
    outcomes = {}
    for place, held in BOTH_PLACES.items():
        torch.manual_seed(0)
        modules = [Both(how), Changes(), Uses(how)]
        right = [Both(how), Changes(), Uses(how)]
        for ours, theirs in zip(modules, right):
            theirs.load_state_dict(ours.state_dict())
        loopback = bpipe.Loopback(len(held))
        ranks = []
        for r, some in enumerate(held):
            stages = [bpipe.PipelineStage(modules[s], s, 3, "cpu", loopback.rank(r), skips={"skip": (0, 2)}) for s in some]
            make: Any = bpipe.OneFOneB if len(held) == 3 else bpipe.Interleaved1F1B
            ranks.append(make(stages if len(some) > 1 else stages[0], M, loss_fn=F.mse_loss))
        x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
        try:
            loopback.step(ranks, x, target=x)
        except (BPipeError, RuntimeError) as error:
            outcomes[place] = "refused" if "place" in str(error) else str(error)
            continue
        try:
            for rows in x.chunk(M):
                y, made = right[0](rows)
                (F.mse_loss(right[2](right[1](y), made["skip"]), rows) / M).backward()
        except RuntimeError:
            outcomes[place] = "torch refuses"
            continue
        pairs = zip([p for m in modules for p in m.parameters()], [p for m in right for p in m.parameters()])
        outcomes[place] = "same" if all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs) else "another model"  # type: ignore[arg-type]
    assert set(outcomes.values()) <= {"same", "refused"}, outcomes


def _in_processes(rank: int) -> dict[str, str]:
    """The same over four processes, for a first user (1) and a last one (3) that change what they get."""
    found = {}
    for who in (1, 3):
        for name, change in CHANGES.items():
            if "dropout" in name:
                continue
            torch.manual_seed(0)
            modules = [Part(i, change if i == who else None, is_leaf=True) for i in range(4)]
            stage = bpipe.PipelineStage(modules[rank], rank, 4, "cpu", skips={"skip": (0, 1, 3)})
            schedule = bpipe.OneFOneB(stage, M, loss_fn=F.mse_loss)
            x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
            try:
                schedule.step(x, target=x)
            except (BPipeError, RuntimeError) as error:
                found[f"{name}, stage {who}"] = "refused" if "place" in str(error) else str(error)
            else:
                got = [p.grad for p in modules[rank].parameters()]
                right = _single(who, change, is_leaf=True)
                mine = None if right is None else right[2 * rank : 2 * rank + 2]
                same = mine is not None and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, mine, strict=True))  # type: ignore[arg-type]
                found[f"{name}, stage {who}"] = "same" if same else "another model"
            schedule.close()
    return found


def test_processes_answer_as_a_loopback_does() -> None:
    """A first user's change is refused on all ranks; a last user's gives the gradients of one process."""
    ranks = run_ranks(_in_processes, 4)
    for name in ranks[0]:
        assert {rank[name] for rank in ranks} == {"refused" if name.endswith("1") else "same"}, (name, [r[name] for r in ranks])
