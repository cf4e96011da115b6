"""A network that goes and comes back within `timeout_s` ends nothing, whatever it interrupts; one that stays away ends in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.comm.health.driver import ConnectedControlPlane
from bpipe.comm.transport import c10d
from bpipe.errors import AgreementError, RankLostError, TransferTimeoutError
from tests.faults.network import Cable, Ended, Play, played
from tests.patience import until

OUTAGE_S, TIMEOUT_S = 17.0, 100.0  # longer than what a kernel was given before: 15 s
SHORT_S = 4.0
M, ROWS, STEPS = 4, 2, 3
LARGE = 500  # rows that do not fit into a message on a connection: they travel over gloo
Values = list[torch.Tensor]


class Layer(nn.Linear):
    """A linear layer that does something else before one of its forwards."""

    at, does = -1, staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at -= 1
        if self.at == 0:
            self.does()
        return super().forward(x)


def layers() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer(256, 256) for _ in range(2)]


def data(rows: int) -> torch.Tensor:
    return torch.linspace(-1, 1, M * rows * 256).reshape(M * rows, 256)


def alone(rows: int = ROWS) -> Values:
    """The weights' gradients after all steps, in one process and a plain loop."""
    model, x = nn.Sequential(*layers()), data(rows)
    for _ in range(STEPS):
        for part in x.chunk(M):
            (F.mse_loss(model(part), part) / M).backward()
    return [layer.weight.grad for layer in model]


class Trained:
    """A rank that trains, of which something is cut off in its second step."""

    def __init__(self, rank: int, rows: int = ROWS, timeout_s: float = TIMEOUT_S) -> None:
        self.layer, self.x = layers()[rank], data(rows)
        stage = bpipe.PipelineStage(self.layer, rank, 2, "cpu")
        self.schedule = bpipe.OneFOneB(stage, M, loss_fn=F.mse_loss, options=bpipe.Options(timeout_s=timeout_s))

    def steps(self, number: int = 1) -> torch.Tensor:
        for _ in range(number):
            self.schedule.step(self.x, target=self.x)
        return self.layer.weight.grad

    @property
    def control(self) -> ConnectedControlPlane:
        control = self.schedule.session.context.transport.control
        assert isinstance(control, ConnectedControlPlane)
        return control


def between_steps(rank: int, cable: Cable) -> torch.Tensor:
    """Nothing is on its way, so that only the kernel's own probes could find out."""
    trained = Trained(rank)
    trained.steps()
    cable.cut_for(OUTAGE_S)
    time.sleep(OUTAGE_S)
    return trained.steps(STEPS - 1)


def before_a_step(rank: int, cable: Cable) -> torch.Tensor:
    """Control messages are on their way."""
    trained = Trained(rank)
    trained.steps()
    cable.cut_for(OUTAGE_S)
    return trained.steps(STEPS - 1)


def in_a_step(rank: int, cable: Cable, rows: int = ROWS) -> torch.Tensor:
    """Small tensors are on their way, in both directions, on connections of bpipe."""
    trained = Trained(rank, rows)
    trained.steps()
    if rank == 0:
        trained.layer.at, trained.layer.does = 3, lambda: cable.cut_for(OUTAGE_S, both=False)
    return trained.steps(STEPS - 1)


def in_a_step_of_large_tensors(rank: int, cable: Cable) -> torch.Tensor:
    """They are on their way over gloo, and its headers on connections of bpipe."""
    return in_a_step(rank, cable, LARGE)


def while_ranks_meet(rank: int, cable: Cable) -> torch.Tensor:
    """The store has the addresses, and neither rank has connected yet."""
    make = c10d.meet_peers
    c10d.meet_peers = lambda *args, **kwargs: (cable.cut_for(OUTAGE_S), make(*args, **kwargs))[1]  # type: ignore[assignment]
    return Trained(rank).steps(STEPS)


def while_channels_open(rank: int, cable: Cable) -> torch.Tensor:
    """The ranks have met, and call each other for the channels; before, they gave up after 10 s."""
    make = c10d.open_connections
    c10d.open_connections = lambda *args: (cable.cut_for(OUTAGE_S), make(*args))[1]  # type: ignore[assignment]
    return Trained(rank).steps(STEPS)


def in_a_stream(rank: int, cable: Cable) -> torch.Tensor:
    layer = layers()[rank]
    stream = bpipe.Stream(bpipe.PipelineStage(layer, rank, 2, "cpu"), None, options=bpipe.Options(timeout_s=TIMEOUT_S))
    outputs = [stream.push(data(ROWS))]
    cable.cut_for(OUTAGE_S)
    outputs += [stream.push(data(ROWS)) for _ in range(2)]
    return outputs[-1] if rank else torch.zeros(0)


def while_one_closes(rank: int, cable: Cable) -> str:
    """The word of it must come, or the other one takes it for lost."""
    trained = Trained(rank)
    trained.steps()
    cable.cut_for(OUTAGE_S)
    if rank == 1:
        trained.schedule.close()
        return ""
    until(lambda: trained.control._members._left, "the other rank's word comes")
    with pytest.raises(AgreementError, match="rank 1 closed this pipeline after 1 steps") as caught:
        trained.steps()
    return str(caught.value)


def for_good_between_steps(rank: int, cable: Cable) -> str:
    """A rank that does not wait learns of it, too."""
    trained = Trained(rank, timeout_s=SHORT_S)
    trained.steps()
    cable.cut_for(1000.0)
    began = time.monotonic()
    until(lambda: trained.control.failure, "the loss of the other machine is noticed")
    assert time.monotonic() - began > SHORT_S / 2
    with pytest.raises(RankLostError, match=f"rank {1 - rank} was lost") as caught:
        trained.steps()
    return str(caught.value)


def for_good_in_a_step(rank: int, cable: Cable) -> str:
    trained = Trained(rank, timeout_s=SHORT_S)
    trained.steps()
    if rank == 0:
        trained.layer.at, trained.layer.does = 3, lambda: cable.cut_for(1000.0, both=False)
    with pytest.raises((RankLostError, TransferTimeoutError), match=r"was lost|cut off from the network") as caught:
        trained.steps()
    return str(caught.value)


PASSING: dict[Play, Callable[[], Values]] = {
    between_steps: alone,
    before_a_step: alone,
    in_a_step: alone,
    in_a_step_of_large_tensors: lambda: alone(LARGE),
    while_ranks_meet: alone,
    while_channels_open: alone,
    in_a_stream: lambda: [torch.zeros(0), nn.Sequential(*layers())(data(ROWS)).detach()],
}
ENDING: list[Play] = [while_one_closes, for_good_between_steps, for_good_in_a_step]


@pytest.fixture(scope="module")
def ended() -> dict[Play, Ended]:
    """How all of them end, which sit out one outage side by side."""
    plays = [*PASSING, *ENDING]
    return dict(zip(plays, played(plays), strict=True))


def found(ended: Ended) -> tuple[Any, Any]:
    if ended.unable:
        pytest.skip(ended.unable)
    assert not any(isinstance(one, BaseException) for one in ended.found), ended.found
    return ended.found


@pytest.mark.parametrize("play", PASSING, ids=lambda play: play.__name__)
def test_an_outage_shorter_than_the_timeout_changes_nothing(play: Play, ended: dict[Play, Ended]) -> None:
    assert all(map(torch.equal, found(ended[play]), PASSING[play]()))


@pytest.mark.parametrize("play", ENDING, ids=lambda play: play.__name__)
def test_what_ends_says_so(play: Play, ended: dict[Play, Ended]) -> None:
    assert all(isinstance(one, str) for one in found(ended[play]))
