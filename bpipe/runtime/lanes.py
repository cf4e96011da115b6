"""A rank's lanes while a step runs: the computations in the caller's thread, and a server for each rank whose guests it keeps."""

from __future__ import annotations

from itertools import takewhile

import torch

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
        self._side_streams: dict[int, torch.cuda.Stream] = {}

    def drive(self, run: Run) -> None:
        """Do all actions of a step."""
        chains = run.plan.chains(run.rank)
        servers = [Server(run.execute, chain, self._side_stream(evictor)) for evictor, chain in chains.items()]
        lane = iter(run.plan.actions[run.rank])

        def advance(piece: Action) -> None:
            for action in takewhile(lambda action: action != piece, lane):
                run.execute(action)

        with run.advancing(advance):
            for action in lane:
                run.execute(action)
        for server in servers:
            server.finish()

    def _side_stream(self, evictor: int) -> torch.cuda.Stream | None:
        """The stream on which an evictor's rooms live and its transfers run; the same in every step."""
        if self._device.type == "cuda" and evictor not in self._side_streams:
            self._side_streams[evictor] = torch.cuda.Stream(self._device)
        return self._side_streams.get(evictor)
