"""Whatever a step was doing, the user's own error comes out of it, and what was cleaned up trains on like new."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.cleanup import keeping, note, noted_on
from bpipe.comm.health.driver import ConnectedControlPlane
from bpipe.comm.health.failure import Failure
from bpipe.errors import RankFailedError, format_error
from bpipe.model.preserve_state import preserved_state
from bpipe.parallel.fsdp import Sharding
from bpipe.parallel.settings import changed
from bpipe.schedules import Destinations
from tests.edge_cases.case import SCHEDULES, pipeline
from tests.models import WIDTH, Block, batch_of, held_by
from tests.over import Over
from tests.ranks import run_ranks
from tests.test_sharding import CASTING, Halves

pytestmark = pytest.mark.usefixtures("one_thread")

M = 4


class StrangeError(RuntimeError):
    """Made of two arguments, and its text cannot be made."""

    def __init__(self, one: int, other: int) -> None:
        self.both = one, other

    def __str__(self) -> str:
        raise ValueError("no text")


ERRORS: list[Callable[[], BaseException]] = [
    lambda: KeyError("mine"),
    lambda: StrangeError(1, 2),
    lambda: KeyboardInterrupt("mine"),
    lambda: StopIteration("mine"),
    lambda: AttributeError("mine"),
    lambda: RuntimeError("mine"),
]
HOOKS = ["pre hook", "forward", "pack", "hook", "loss", "tensor hook", "backward hook", "unpack", "backward"]


class _Spot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: Fails) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.fails.reach("backward")
        return gradients[0], None


class Fails(nn.Module):
    """Raises at a place, the first time or later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.place, self.after, self.error = "", 0, ERRORS[0]
        self.register_forward_pre_hook(lambda *_: self.reach("pre hook"))
        self.register_forward_hook(lambda *_: self.reach("hook"))
        self.register_full_backward_hook(lambda *_: self.reach("backward hook"))

    def reach(self, place: str, value: Any = None) -> Any:
        if place == self.place:
            self.after -= 1
            if self.after < 0:
                self.place = ""
                raise self.error()
        return value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reach("forward")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: self.reach("pack", t), lambda t: self.reach("unpack", t)):
            y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda _: self.reach("tensor hook"))
        return _Spot.apply(y, self)  # type: ignore[no-any-return, no-untyped-call]


def modules_of(num_stages: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(dropout=0.0), Fails(), Block(dropout=0.0)) for _ in range(num_stages)]


def loss_of(fails: Fails) -> Callable[..., torch.Tensor]:
    return lambda output, target: fails.reach("loss", F.mse_loss(output.float(), target))


class Rank:
    """One rank of a pipeline, with the data parallelism of its stages, whose pipeline is made again after each failure."""

    def __init__(self, rank: int, how: str, schedule: Any, *, p: int, reshard: bool = True, policy: Any = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (2 // p, p), mesh_dim_names=("replica", "rank"))
        self.rank, self.group, self._make = mesh.get_local_rank("rank"), mesh.get_group("rank"), schedule
        self.num_stages = 4 if schedule in (Halves, bpipe.BreadthFirst) else 2
        held = held_by(schedule, p, self.num_stages)[self.rank]
        whole = modules_of(self.num_stages)
        self.fails = {i: whole[i][1] for i in held}
        self.modules: dict[int, nn.Module] = {i: whole[i] for i in held}
        for i, module in self.modules.items():
            if how == "ddp":
                self.modules[i] = nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("replica"))
            if how == "fsdp":
                options = {"mesh": mesh["replica"], "mp_policy": MixedPrecisionPolicy(**policy or {})}
                for part in [*module, module]:
                    fully_shard(part, reshard_after_forward=reshard, **options)
        self.schedule = self._new()

    def _new(self) -> Any:
        stages = [bpipe.PipelineStage(module, i, self.num_stages, "cpu", self.group) for i, module in self.modules.items()]
        return self._make(stages, M, loss_fn=loss_of(self.fails[max(self.fails)]))

    def step(self) -> list[torch.Tensor]:
        x, y = batch_of("quiet", M)
        for module in self.modules.values():
            module.zero_grad()
        self.schedule.step(x, target=y, return_outputs=False)
        gradients = [p.grad for module in self.modules.values() for p in module.parameters()]
        return [getattr(g, "full_tensor", lambda g=g: g)().clone() for g in gradients]

    def fail(self, stage: int, place: str, after: int, error: Callable[[], BaseException]) -> BaseException | None:
        """What a step raises that fails in a stage, maybe another rank's; then the pipeline is made again."""
        if stage in self.fails:
            self.fails[stage].place, self.fails[stage].after, self.fails[stage].error = place, after, error
        found = None
        try:
            self.step()
            if stage not in self.fails:  # this rank may have been through before the other one failed: it hears of it now
                self.step()
        except BaseException as raised:
            found = raised
        self.schedule.close()
        self.schedule = self._new()
        return found


def failures(rank: int, places: list[str], how: str, schedule: Any, p: int, num_steps: int, **more: Any) -> list[str]:
    """What is wrong after failures at each place in turn, at the first microbatch or the last one."""
    one = Rank(rank, how, schedule, p=p, **more)
    expected, wrong = Rank(rank, how, schedule, p=p, **more).step(), []
    for index, place in ((HOOKS.index(place), place) for place in places):
        stage = one.num_stages - 1 if place == "loss" else index % one.num_stages
        error = ERRORS[index % len(ERRORS)]
        for _ in range(num_steps):
            one.step()
        found = one.fail(stage, place, (0, M - 1)[index // 2 % 2], error)
        if stage in one.fails:
            is_right = type(found) is type(error()) and format_error(found) == format_error(error())
        else:
            is_right = isinstance(found, RankFailedError) and found.error == format_error(error())
        notes = [text for text in getattr(found, "__notes__", ()) if "cleaning up" in text]
        if not is_right or notes:
            wrong.append(f"stage {stage}, {place}: {None if found is None else format_error(found)} {notes}")
        if not all(map(torch.equal, one.step(), expected)):
            wrong.append(f"gradients after {place}")
    return wrong


PARTS = Over(bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(parts=4), "to": Destinations(host="only")})
RECOMPUTED = Over(bpipe.OneFOneB, {"budget": None, "by": "recompute"})
SETUPS: dict[str, tuple[Any, ...]] = {
    "casting": ("fsdp", bpipe.OneFOneB, 2, 0, {"policy": CASTING}),
    "casting, kept": ("fsdp", bpipe.OneFOneB, 2, 0, {"policy": CASTING, "reshard": False}),
    "halves": ("fsdp", Halves, 2, 0, {"policy": CASTING}),
    "breadth first": ("fsdp", bpipe.BreadthFirst, 2, 0, {"policy": CASTING}),
    "halves not in the plan": ("fsdp", bpipe.ZBH1, 2, 1, {"reshard": False}),
    "sharded": ("fsdp", bpipe.Interleaved1F1B, 1, 0, {"policy": CASTING}),
    "parts": ("fsdp", PARTS, 2, 2, {"policy": CASTING}),
    "recomputed": ("fsdp", RECOMPUTED, 2, 0, {"policy": CASTING}),
    "ddp": ("ddp", bpipe.OneFOneB, 2, 0, {}),
    "plain": ("", bpipe.ZBH1, 2, 0, {}),
    "plain parts": ("", PARTS, 2, 2, {}),
}


def failures_in(rank: int, name: str) -> list[str]:
    """All places in the first setup, and about half of them in each of the others."""
    index, setup = list(SETUPS).index(name), SETUPS[name]
    return failures(rank, HOOKS[index % 2 :: 2] if index else HOOKS, *setup[:4], **setup[4])


@pytest.mark.parametrize("name", SETUPS)
def test_the_users_error_comes_out_and_the_modules_train_on(name: str) -> None:
    assert run_ranks(failures_in, 2, name) == [[], []]


class Layered(nn.Module):
    """Two blocks sharded by themselves, of which the second is used from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.uses_both = Block(dropout=0.0), Block(dropout=0.0), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.uses_both else x


def skipped(rank: int, schedule: Any) -> list[list[bool]]:
    """Which parameters have the gradients of unsharded modules, in a step that skips a block, and in the next one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy, found, results = MixedPrecisionPolicy(reduce_dtype=torch.float64), [], []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        module, mesh = Layered(), init_device_mesh("cpu", (1,))
        for part in (module.first, module.second, module) if is_sharded else ():
            fully_shard(part, mesh=mesh, mp_policy=policy)
        one = schedule(bpipe.PipelineStage(module, 0, 1, "cpu"), M, loss_fn=F.mse_loss)
        for uses_both in (False, True):
            module.uses_both = uses_both
            module.zero_grad()
            x, y = batch_of("quiet", M)
            one.step(x, target=y)
            found.append([None if p.grad is None else getattr(p.grad, "full_tensor", p.grad.clone)() for p in module.parameters()])
        one.close()
    for sharded, plain in zip(found[:2], found[2:]):
        pairs = zip(sharded, plain, strict=True)
        results.append([a is b if a is None or b is None else bool(torch.allclose(a, b, atol=1e-6)) for a, b in pairs])
    return results


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.ZBH1])
def test_a_block_under_fsdp_that_no_microbatch_needs(schedule: Any) -> None:
    (results,) = run_ranks(skipped, 1, schedule)
    assert all(all(of_step) for of_step in results)


# In one process


def in_loopback(name: str) -> tuple[bpipe.Loopback, list[Any], list[nn.Sequential]]:
    modules = modules_of(4)
    loopback, schedules = pipeline(SCHEDULES[name], modules, loss_of(modules[-1][1]))  # type: ignore[arg-type]
    return loopback, schedules, modules


@pytest.mark.parametrize("name", ["1f1b", "recompute", "zb_h1"])
@pytest.mark.parametrize("place", HOOKS)
def test_the_users_own_error_in_a_loopback(name: str, place: str) -> None:
    loopback, schedules, modules = in_loopback(name)
    x, y = batch_of("quiet", 8)
    loopback.step(schedules, x, target=y, return_outputs=False)
    fails, error = modules[3 if place == "loss" else 0][1], StrangeError(1, 2)
    fails.place, fails.after, fails.error = place, 3, lambda: error
    with pytest.raises(StrangeError) as caught:
        loopback.step(schedules, x, target=y, return_outputs=False)
    assert caught.value is error
    assert not any("cleaning up" in text for text in error.__notes__)


def test_an_error_while_an_error_is_handled_is_the_one_that_the_module_raises() -> None:
    loopback, schedules, modules = in_loopback("1f1b")
    x, y = batch_of("quiet", 8)
    forward = modules[2].forward

    def handled(*args: Any) -> Any:
        try:
            forward(*args)
            raise KeyError("first")
        except KeyError:
            raise OSError("while it was handled") from None

    modules[2].forward = handled
    with pytest.raises(OSError, match="while it was handled"):
        loopback.step(schedules, x, target=y, return_outputs=False)


class FrozenError(Exception):
    """Takes no note."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__notes__":
            raise AttributeError("frozen")
        super().__setattr__(name, value)


def test_what_goes_wrong_in_cleaning_up_is_a_note(caplog: pytest.LogCaptureFixture) -> None:
    for failure in (ValueError("late"), KeyboardInterrupt(), StrangeError(1, 2)):
        error = KeyError("mine")
        with noted_on(error):
            raise failure
        assert error.__notes__ == [f"bpipe: cleaning up after this error failed as well: {format_error(failure)}"]
    with pytest.raises(ValueError, match="late"), noted_on(None):
        raise ValueError("late")
    note(FrozenError("mine"), "a note")
    assert "FrozenError: mine: a note" in caplog.text


@contextmanager
def failing_at_its_end() -> Iterator[int]:
    try:
        yield 1
    finally:
        raise ValueError("late")


def test_a_context_keeps_the_error_and_calls_every_callback() -> None:
    called: list[int] = []
    after = ExitStack()
    after.callback(called.append, 1)
    after.callback([].pop)
    after.callback(called.append, 2)
    with pytest.raises(KeyError) as caught, keeping(failing_at_its_end()), keeping(after):
        raise KeyError("mine")
    assert called == [2, 1] and "IndexError" in caught.value.__notes__[0] and "ValueError: late" in caught.value.__notes__[1]
    with keeping(nullcontext(1)) as value:
        assert value == 1
    with pytest.raises(ValueError, match="late"), keeping(failing_at_its_end()):
        pass


class Stuck:
    """Has a setting that cannot be set back."""

    def __init__(self) -> None:
        self.free, self.stuck = 1, 1

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stuck" and getattr(self, "stuck", 1) == 2:
            raise ValueError("stuck")
        super().__setattr__(name, value)


def test_settings_that_cannot_be_set_back() -> None:
    one = Stuck()
    with pytest.raises(KeyError) as caught, changed([(one, "free", 2), (one, "stuck", 2)]):
        raise KeyError("mine")
    assert one.free == 1 and "ValueError: stuck" in caught.value.__notes__[0]


def test_a_module_that_cannot_be_put_back() -> None:
    """A buffer that the forward has made smaller, and gradients and other buffers that come back all the same."""
    module = nn.BatchNorm1d(4)
    module.weight.grad = gradient = torch.ones(4)
    module.register_buffer("other", torch.ones(4))

    def forward() -> None:
        module.running_mean.resize_(2)  # type: ignore[union-attr]
        module.other.zero_()  # type: ignore[operator, union-attr]
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught, preserved_state([module]):
        forward()
    assert module.weight.grad is gradient and bool((module.other == 1).all()) and caught.value.__notes__  # type: ignore[operator]


def test_a_wakeup_descriptor_that_the_user_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def set_wakeup_fd(fd: int, **_: Any) -> int:
        calls.append(fd)
        if len(calls) == 3:
            raise ValueError("closed")
        return 77

    monkeypatch.setattr(signal, "set_wakeup_fd", set_wakeup_fd)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    with pytest.raises(KeyError) as caught, ConnectedControlPlane.interruptible(None):  # type: ignore[arg-type]
        raise KeyError("mine")
    assert "ValueError: closed" in caught.value.__notes__[0]


def no_such_thing(stage: Any) -> None:
    raise AttributeError("no such thing")


def test_an_error_in_letting_go_of_what_was_gathered() -> None:
    assert run_ranks(letting_go, 1) == [["KeyError", True]]


def letting_go(rank: int) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    import bpipe.parallel.fsdp as module
    from bpipe.schedules import Action, Op

    stage = bpipe.PipelineStage(fully_shard(nn.Linear(4, 4)), 0, 1, "cpu")
    module.ShardedStage.collect = no_such_thing  # type: ignore[method-assign]
    try:
        with Sharding({0: stage.parts()}, [Action(Op.B, 0, 0)]).in_charge():
            raise KeyError("mine")
    except BaseException as error:
        return [type(error).__name__, "no such thing" in error.__notes__[0]]


def test_a_rank_that_cannot_begin_says_why_although_it_cannot_tell_the_others() -> None:
    assert run_ranks(cannot_begin, 1) == ["KeyError"]


def cannot_begin(rank: int) -> str:
    one = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu"), M, loss_fn=F.mse_loss)

    def refuse(why: str) -> None:
        raise OSError("no connection")

    def broke(*_: Any) -> None:
        raise MemoryError

    transport = one.session.context.transport
    transport.refuse, transport.control.broke = refuse, broke  # type: ignore[assignment, method-assign]
    session = one.session
    session.begin = lambda call, is_training: {}["mine"]  # type: ignore[method-assign, assignment]
    try:
        one.step(torch.ones(M, 4), target=torch.ones(M, 4))
    except BaseException as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("error", [StrangeError(1, 2), UnicodeError("\ud800"), type("Odd", (Exception,), {"__module__": None})()])
def test_any_error_can_be_told(error: BaseException) -> None:
    failure = Failure.raised(error, 0, 0, "")
    assert Failure.unpack(failure.pack(), 1).error.startswith(type(error).__name__)
