"""What is cut along what: right, or refused by name before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe import TensorChunkSpec
from bpipe.errors import BPipeError, ConfigurationError
from tests.over import nested
from tests.ranks import run_ranks

M, T, B, W = 2, 6, 4, 3


class Stage(nn.Module):
    def __init__(self, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear, self.rest = nn.Linear(W, W), forward

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.linear(x)
        return self.rest(y, *args, **kwargs) if self.rest else y


def _pipeline(stages: list[nn.Module], loss_fn: Any = F.mse_loss, **options: Any) -> tuple[bpipe.Loopback, list[bpipe.OneFOneB]]:
    loopback = bpipe.Loopback(len(stages))
    made = [bpipe.PipelineStage(stage, i, len(stages), "cpu", loopback.rank(i)) for i, stage in enumerate(stages)]
    return loopback, [bpipe.OneFOneB(stage, M, loss_fn=loss_fn, **nested(options)) for stage in made]


def _grads(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def _close(got: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(got) == len(right) > 0 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, right))


def _two(forward: Callable[..., Any] | None = None) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Stage(), Stage(forward)]


TIME_FIRST = {"args_chunk_spec": (TensorChunkSpec(1),)}


def _time_first_cases() -> dict[str, tuple[torch.Tensor, Any, dict[str, Any]]]:
    """For inputs of [time, batch, width]: a target, its loss, and options that may be needed."""
    one_hot = torch.randn(B, W)
    return {
        "a target by sample, for the last position": (one_hot, lambda y, t: F.mse_loss(y[-1], t), {}),
        "classes of samples": (torch.randint(W, (B,)), lambda y, t: F.cross_entropy(y[-1], t), {}),
        "a target by position and sample": (torch.randn(T, B, W), F.mse_loss, {}),
        "indices by position and sample": (
            torch.randint(W, (T, B)),
            lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
            {},
        ),
        "a target of samples first, with a spec": (
            torch.randn(B, T, W),
            lambda y, t: F.mse_loss(y, t.transpose(0, 1)),
            {"target_chunk_spec": TensorChunkSpec(0)},
        ),
        "a target of one number for each sample": (torch.randn(B, 1), lambda y, t: F.mse_loss(y[-1].mean(-1, keepdim=True), t), {}),
    }


@pytest.mark.parametrize("name", _time_first_cases())
def test_a_target_of_time_first_inputs_is_cut_along_its_samples(name: str) -> None:
    """Whatever the target looks like, its samples go with those of the inputs: gradients are those of a loop over both."""
    torch.manual_seed(3)
    target, loss_fn, options = _time_first_cases()[name]
    x = torch.randn(T, B, W)
    modules, right = _two(), _two()
    loopback, ranks = _pipeline(modules, loss_fn, output_merge_spec=TensorChunkSpec(1), **TIME_FIRST, **nested(options))
    loopback.step(ranks, x, target=target)
    dim = 1 if target.ndim > 1 and tuple(target.shape[:2]) == (T, B) else 0
    for rows, goal in zip(x.chunk(M, 1), target.chunk(M, dim)):
        (loss_fn(nn.Sequential(*right)(rows), goal) / M).backward()
    assert _close(_grads(modules), _grads(right))


def test_a_square_target_of_time_first_inputs_needs_a_spec() -> None:
    """Where time and batch are as long, both readings are possible: refused before anything runs, and right with a spec."""
    x, target = torch.randn(B, B, W), torch.randn(B, B)
    ran: list[int] = []
    modules = _two(lambda y: ran.append(1) or y)  # type: ignore[func-returns-value]
    loss_fn = lambda y, t: F.mse_loss(y.mean(-1), t)  # noqa: E731
    loopback, ranks = _pipeline(modules, loss_fn, **TIME_FIRST)
    with pytest.raises(BPipeError, match="target_chunk_spec"):
        loopback.step(ranks, x, target=target)
    assert not ran
    loopback, ranks = _pipeline(
        modules, loss_fn, target_chunk_spec=TensorChunkSpec(1), output_merge_spec=TensorChunkSpec(1), **TIME_FIRST
    )
    loopback.step(ranks, x, target=target)
    right = _two()
    for rows, goal in zip(x.chunk(M, 1), target.chunk(M, 1)):
        (loss_fn(nn.Sequential(*right)(rows), goal) / M).backward()
    assert _close(_grads(modules), _grads(right))


MULTIPLES: dict[str, Callable[[], Any]] = {
    "cu_seqlens of packed sequences": lambda: torch.arange(0, 2 * B * 4, 4),
    "frames of videos, flattened": lambda: torch.randn(B * 3, W),
    "negatives, two for each sample": lambda: torch.randn(2 * B, W),
    "a table of relative positions": lambda: torch.randn(2 * B, 2 * B),
    "a queue of a contrastive loss": lambda: torch.randn(8 * B, W),
    "a rotary table of cosines and sines": lambda: (torch.randn(2 * B, W), torch.randn(2 * B, W)),
    "edges of a graph": lambda: torch.randint(B, (2, 2 * B)),
    "half as many": lambda: torch.randn(B // 2, W),
}


@pytest.mark.parametrize("where", ["argument", "keyword", "target"])
@pytest.mark.parametrize("name", MULTIPLES)
def test_what_is_a_multiple_of_the_batch_s_size_is_refused_by_its_place(name: str, where: str) -> None:
    """It may hold samples or not: refused by its place and size before a forward runs."""
    extra, ran = MULTIPLES[name](), []

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ran.append(1)
        return x

    loopback, ranks = _pipeline([Stage(forward)], lambda y, t: y.square().mean())
    args = (torch.randn(B, W), *([extra] if where == "argument" else []))
    kwargs = {"extra": extra} if where == "keyword" else {}
    target = extra if where == "target" else torch.randn(B, W)
    with pytest.raises(ConfigurationError, match="spec"):
        loopback.step(ranks, *args, target=target, **kwargs)
    assert not ran


def test_what_is_repeated_by_a_spec_reaches_each_microbatch_whole() -> None:
    """The way out for a table that all samples share: None in a spec, also for one of two entries of a tuple."""
    cos, flags = torch.randn(2 * B, W), torch.arange(float(B))
    seen: list[Any] = []

    def forward(x: torch.Tensor, rope: Any = None) -> torch.Tensor:
        seen.append((rope[0].shape, rope[1].tolist()))
        return x * rope[1][:, None]

    loopback, ranks = _pipeline([Stage(forward)], kwargs_chunk_spec={"rope": (None, TensorChunkSpec(0))})
    loopback.step(ranks, torch.randn(B, W), rope=(cos, flags), target=torch.randn(B, W))
    assert seen == [(cos.shape, [0.0, 1.0]), (cos.shape, [2.0, 3.0])]


def _ragged(kind: str, y: torch.Tensor, calls: list[int]) -> Any:
    calls.append(1)
    size = len(calls)
    if kind == "a tensor of another length":
        return y[:, :1].expand(-1, size)
    if kind == "of another rank":
        return y if size == 1 else y.flatten()
    if kind == "in a dict with other keys":
        return {"y": y} if size == 1 else {"y": y, "more": y}
    if kind == "kept samples, as a filter leaves them":
        return y[:size]
    if kind == "a tuple that grows":
        return (y,) * size
    if kind == "another dtype":
        return y if size == 1 else y.double()
    raise AssertionError(kind)


RAGGED = [
    "a tensor of another length",
    "of another rank",
    "in a dict with other keys",
    "kept samples, as a filter leaves them",
    "a tuple that grows",
    "another dtype",
]


def _first_tensor(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


@pytest.mark.parametrize("kind", RAGGED)
def test_outputs_that_do_not_fit_together_train_as_in_a_loop(kind: str) -> None:
    """Gradients are added as ever, and the outputs come back one by one where they cannot be joined; none is lost."""
    calls: list[int] = []
    modules = _two(lambda y: _ragged(kind, y, calls))
    loss_fn = lambda y, t: _first_tensor(y).square().mean()  # noqa: E731
    loopback, ranks = _pipeline(modules, loss_fn)
    x = torch.randn(B, W)
    outputs = loopback.step(ranks, x, target=x)
    right, calls_right = _two(), []
    plain = []
    for rows in x.chunk(M):
        y = _ragged(kind, right[1](right[0](rows)), calls_right)  # type: ignore[arg-type]
        plain.append(_first_tensor(y).detach())
        (loss_fn(y, None) / M).backward()
    assert _close(_grads(modules), _grads(right))
    if isinstance(outputs, list):
        assert all(torch.equal(_first_tensor(a), b) for a, b in zip(outputs, plain, strict=True))
    else:
        assert torch.equal(_first_tensor(outputs), torch.cat(plain))


def _shared_graph(kind: str) -> tuple[list[nn.Module], nn.Linear, Callable[[], Any], bool]:
    """Inputs that hang on a graph outside: the stages, what is outside, the step, and whether each microbatch has its own."""
    torch.manual_seed(1)
    outside, x, y = nn.Linear(W, W), torch.randn(B, W), torch.randn(B, W)
    modules = _two()
    loss_fn: Any = F.mse_loss
    if kind == "a temperature that the loss learns":
        scale = outside.weight.exp().mean()

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(output * scale, target)

    if kind == "a default of the loss":
        prior = outside(x[:1])

        def loss_fn(output: torch.Tensor, target: torch.Tensor, prior: torch.Tensor = prior) -> torch.Tensor:
            return F.mse_loss(output + prior, target)

    loopback, ranks = _pipeline(modules, loss_fn)

    def step() -> Any:
        if kind == "an encoder run once for all microbatches":
            return loopback.step(ranks, arg_mbs=[(one,) for one in outside(x).chunk(M)], target_mbs=list(y.chunk(M)))
        if kind == "an encoder run for each microbatch":
            return loopback.step(ranks, arg_mbs=[(outside(one),) for one in x.chunk(M)], target_mbs=list(y.chunk(M)))
        if kind == "targets of a teacher that learns, each its own":
            return loopback.step(ranks, arg_mbs=[(one,) for one in x.chunk(M)], target_mbs=[outside(one) for one in y.chunk(M)])
        if kind == "targets that share a normalisation":
            mean = outside(y).mean()
            return loopback.step(ranks, arg_mbs=[(one,) for one in x.chunk(M)], target_mbs=[one + mean for one in y.chunk(M)])
        if kind == "a weight in loss_kwargs":
            return loopback.step(ranks, x, target=y, loss_kwargs={"weight": outside.weight.exp().mean().expand(B // M, W)})
        if kind == "a whole batch from an encoder":
            return loopback.step(ranks, outside(x), target=y)
        return loopback.step(ranks, x, target=y)

    rights = "an encoder run for each microbatch", "targets of a teacher that learns, each its own"
    return modules, outside, step, kind in rights


GRAPHS = [
    "an encoder run once for all microbatches",
    "an encoder run for each microbatch",
    "targets of a teacher that learns, each its own",
    "targets that share a normalisation",
    "a weight in loss_kwargs",
    "a whole batch from an encoder",
    "a temperature that the loss learns",
    "a default of the loss",
]


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_graph_outside_gets_one_backward_or_is_refused_first(kind: str) -> None:
    """What several backwards would need is refused before one runs; what each microbatch has to itself is trained."""
    modules, outside, step, is_right = _shared_graph(kind)
    if not is_right:
        with pytest.raises(ConfigurationError, match="detach"):
            step()
        assert not _grads([*modules, outside])
        return
    step()
    torch.manual_seed(1)
    right, x, y = nn.Linear(W, W), torch.randn(B, W), torch.randn(B, W)
    whole = _two()
    for rows, goal in zip(x.chunk(M), y.chunk(M)):
        given, goal = (right(rows), goal) if "encoder" in kind else (rows, right(goal))
        (F.mse_loss(nn.Sequential(*whole)(given), goal) / M).backward()
    assert _close(_grads([*modules, outside]), _grads([*whole, right]))


def test_a_graph_outside_that_has_saved_nothing_gets_the_gradients_of_all_microbatches() -> None:
    """A mean over a weight can run backward as often as one likes: torch's loop adds them up, and so does the pipeline."""
    torch.manual_seed(1)
    outside, right, x, y = nn.Linear(W, W), nn.Linear(W, W), torch.randn(B, W), torch.randn(B, W)
    right.load_state_dict(outside.state_dict())
    modules, plain = _two(), _two()
    scale, other = outside.weight.mean(), right.weight.mean()
    loopback, ranks = _pipeline(modules, lambda output, target: F.mse_loss(output * scale, target))
    loopback.step(ranks, x, target=y)
    for rows, goal in zip(x.chunk(M), y.chunk(M)):
        (F.mse_loss(nn.Sequential(*plain)(rows) * other, goal) / M).backward()
    assert _close(_grads([*modules, outside]), _grads([*plain, right]))


def _apart(rank: int) -> dict[str, str]:
    """What comes of inputs that only the first rank gets, and a target that only the last one gets."""
    found = {}
    cases: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any], Any]] = {
        "a target of samples": (torch.randn(T, B, W), torch.randn(B, W), {}, lambda y, t: F.mse_loss(y[-1], t)),
        "a target of time and samples": (torch.randn(T, B, W), torch.randn(T, B, W), {}, F.mse_loss),
        "a square one": (torch.randn(B, B, W), torch.randn(B, B, W), {}, F.mse_loss),
        "a square one with a spec": (
            torch.randn(B, B, W),
            torch.randn(B, B, W),
            {"target_chunk_spec": TensorChunkSpec(1)},
            F.mse_loss,
        ),
        "twice as many samples": (torch.randn(T, B, W), torch.randn(2 * B, W), {}, lambda y, t: y.mean() - t.mean()),
    }
    for name, (x, target, options, loss_fn) in cases.items():
        torch.manual_seed(0)
        module, right = _two()[rank], _two()
        stage = bpipe.PipelineStage(module, rank, 2, "cpu")
        schedule = bpipe.OneFOneB(stage, M, loss_fn=loss_fn, output_merge_spec=TensorChunkSpec(1), **TIME_FIRST, **nested(options))
        torch.manual_seed(4)
        x, target = torch.randn_like(x), torch.randn_like(target)
        dim = 0 if target.ndim == 2 else 1
        try:
            schedule.step(*([x] if rank == 0 else []), target=target if rank else None)
        except BPipeError as error:
            found[name] = f"refused: {error}"
            schedule.close()
            continue
        for rows, goal in zip(x.chunk(M, 1), target.chunk(M, dim)):
            (loss_fn(nn.Sequential(*right)(rows), goal) / M).backward()
        found[name] = "same" if _close(_grads([module]), _grads([right[rank]])) else "another pairing"
        schedule.close()
    return found


def test_a_target_that_the_last_rank_alone_gets_goes_with_the_samples_of_the_first() -> None:
    """Inputs cut along their second dimension on one rank, the target on another one: paired by samples, or refused."""
    for rank in run_ranks(_apart, 2):
        for name, said in rank.items():
            assert said == "same" or (said.startswith("refused") and name != "a square one with a spec"), (name, said)
