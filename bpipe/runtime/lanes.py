"""A rank's lanes while a step runs: the computations in the caller's thread, and a server for each rank whose guests it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from bpipe.comm.control import Control
from bpipe.runtime.run import Run
from bpipe.runtime.serve import Server
from bpipe.schedules import Action

__all__: list[str] = []


class Lanes:
    """Runs steps of one rank.

    Args:
        device: of its stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._servers: list[Server] = []
        self._side_streams: dict[int, torch.cuda.Stream] = {}

    def drive(self, run: Run, control: Control, group_ranks: Sequence[int]) -> None:
        """Do all actions of a step; `group_ranks` are those of the group, by rank of the plan.

        Raises:
            BaseException: whatever one of them raised, or the reason why another rank cannot go on.
        """
        chains, activity = run.plan.chains(run.rank), control.activity
        activity.begin(run.plan, run.rank, run.step, group_ranks, chains)
        for peer, chain in chains.items():
            self._servers.append(Server(run.execute, chain, self._side_stream(peer), control))
        lane = iter(enumerate(run.plan.actions[run.rank]))

        def advance(piece: Action) -> None:
            for activity.position, action in takewhile(lambda one: one[1] != piece, lane):
                run.execute(action)
            activity.position += 1  # at the piece

        with run.advancing(advance):
            for activity.position, action in lane:
                if control.failure is not None:
                    control.check()
                run.execute(action)
        activity.position += 1
        self.join()
        control.check()

    def join(self, most_s: float | None = None) -> None:
        """Wait until nothing is served any more, or some seconds for each server."""
        for server in self._servers:
            server.join(most_s)
        self._servers = []

    def _side_stream(self, evictor: int) -> torch.cuda.Stream | None:
        """The stream on which an evictor's rooms live and its transfers run; the same in every step."""
        if self._device.type == "cuda" and evictor not in self._side_streams:
            self._side_streams[evictor] = torch.cuda.Stream(self._device)
        return self._side_streams.get(evictor)
