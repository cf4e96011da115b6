"""Channels over torch.distributed process groups: NCCL, gloo, and gloo through pinned memory for tensors on CUDA.

A pipeline makes its own groups over the user's store, under a token that only its ranks know. So nothing from an earlier
pipeline, not even one that failed, can be mistaken for a message of this one. `torch.distributed.new_group` is not used,
because it would depend on which groups each rank happens to have closed (a name used twice never connects).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bpipe.comm.health.activity import place_of
from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane, Meanwhile, NullControlPlane
from bpipe.comm.health.driver import ConnectedControlPlane
from bpipe.comm.health.links import links
from bpipe.comm.health.watchdog import SLOW_S, Timeouts
from bpipe.comm.rendezvous.addresses import own_addresses
from bpipe.comm.rendezvous.farewell import say_farewell
from bpipe.comm.rendezvous.interruptible import Interruptible
from bpipe.comm.rendezvous.local_door import open_local_links
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.comm.rendezvous.meeting import OtherPipelineError, meet_peers, refuse
from bpipe.comm.rendezvous.peers import Peers
from bpipe.comm.rendezvous.shortage import naming_shortage
from bpipe.comm.rendezvous.store import using_store
from bpipe.comm.rendezvous.store_keys import WrittenKeys
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.transport.base import T, Transfer, Transport
from bpipe.comm.transport.communicators import Communicators, maker_of
from bpipe.comm.transport.connect import open_connections
from bpipe.comm.transport.device_ring import DeviceRing, open_ring, why_no_ring
from bpipe.comm.transport.device_watchdog import DeviceWatchdog
from bpipe.comm.transport.in_flight import TRANSFERS_AT_ONCE, InFlight
from bpipe.comm.transport.process_group import backends_of, count_pipelines, is_fake
from bpipe.comm.transport.ring import Ring
from bpipe.comm.transport.socket_channel import SMALL, Receiver, Sender, SocketChannel
from bpipe.comm.transport.staging import Staging
from bpipe.comm.transport.works import Noted, Works, transferring
from bpipe.comm.wire.header import MOST_BYTES
from bpipe.device import Streams, is_asynchronous
from bpipe.device.handles import why_no_handles
from bpipe.environment import copies_messages, gloo_connects_late, may_share_memory, shared_secret
from bpipe.errors import AgreementError, ConfigurationError, TransferTimeoutError
from bpipe.logs import LOG, warn_not_shared
from bpipe.memory.reach import find_reached
from bpipe.memory.shared_file import SharedFile, why_not_shared
from bpipe.schedules import Channel, Purpose
from bpipe.torch_private.distributed import timeout_of

__all__: list[str] = []

TAGS = {purpose: tag for tag, purpose in enumerate(Purpose, start=1)}
ID_KEY = "0"  # of the first communicator that NCCL makes over a store
EVICTIONS = (Purpose.EVICT, Purpose.RETURN)
NO_TAG, GREETING = len(Purpose) + 1, len(Purpose) + 2  # tags that no message has
AT_ONCE = timedelta(milliseconds=1)
POLL_S = 0.001
MARGIN_S = 60.0  # timeouts of gloo and of the kernel are this much later than ours, because our error says more
DEVICE_MARGIN = 10  # NCCL counts from when the host, maybe steps ahead, issued a transfer; and it ends the process
LEAST_DEVICE_S = 3600.0
REMOVED_S = 1.0  # how long closing waits for the store to remove this rank's keys


class C10dTransport(Transport):
    """One rank's end of a pipeline over a process group.

    Each channel has its own connection for headers, and on CPU for small messages. Large messages travel through memory that both
    processes map, if they are on one host, and else over gloo, in a group of the two ranks. With NCCL each channel has a
    communicator of two ranks, unless one device reaches the other one's memory: then it copies there. So no order between channels
    can be wrong.

    Args:
        group: the pipeline's process group; None for the default one.
        device: the device of the stage.
        timeout_s: seconds after which a single wait fails; default: the group's timeout.
        slow_s: seconds in a single wait after which the rank logs what all ranks are doing.
        transfers_at_once: how many transfers may be in flight on a device, over NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        timeout_s: float | None = None,
        slow_s: float = SLOW_S,
        transfers_at_once: int = TRANSFERS_AT_ONCE,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group (under torchrun) first, "
                "or give the stages group=Loopback(n).rank(i) to run all ranks in this process"
            )
        if is_fake(group, device):
            raise ConfigurationError(
                "a fake process group has no other ranks: the schedules of bpipe do a step of one rank there, and everything else "
                "needs ranks that run, as processes or in a bpipe.Loopback"
            )
        self.device = device
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.control: ControlPlane = NullControlPlane()
        self._timeouts = Timeouts(_timeout_of(self.group).total_seconds() if timeout_s is None else timeout_s, slow_s)
        self._group_ranks: Sequence[int] = ()
        self._opened: set[Channel] = set()
        self._written = WrittenKeys()
        self._secret = shared_secret()
        self._senders: dict[Channel, Sender] = {}
        self._receivers: dict[Channel, Receiver] = {}
        self._gloo: dict[Channel, Any] = {}  # groups of two ranks, for large tensors between hosts
        self._links: dict[Channel, LocalLink] = {}  # of channels whose first end reaches memory of the other one
        self._files: dict[Channel, SharedFile] = {}  # likewise, of messages between stages on devices
        self._lends = False
        self.streams = Streams()
        self._make = maker_of(backends_of(self.group).get(device.type, "gloo")) if is_asynchronous(device) else None
        self.waits_on_device = self._make is not None
        in_flight = InFlight(device, transfers_at_once, self.streams)
        self._communicators = None if self._make is None else Communicators(device, in_flight)
        self._staging = Staging(device, self.streams) if is_asynchronous(device) and self._make is None else None
        self._is_open, self._token = False, b""

    def enlist(self) -> None:
        self.identity = count_pipelines(self.group, 1)

    def exchange(self, call: Collective, data: bytes, meanwhile: Meanwhile | None = None) -> list[bytes]:
        self._open()
        given = self.control.exchange(call, data, meanwhile)
        self._written.remove(REMOVED_S)  # all ranks have come, and so have read them
        return given

    def refuse(self, why: str) -> None:
        self._open()
        self.control.refuse(why)

    def _open(self) -> None:
        """Meet the other ranks, on the first call."""
        if self._is_open or self.size == 1:
            return
        store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        opening = self._interruptible()
        peers = self._meet(opening, store)
        self._reached = peers.reached()
        name = f"pipeline {self.identity} of its group"
        try:
            with naming_shortage():
                control = ConnectedControlPlane(peers.connections, self.rank, self.size, self._release, self._timeouts, name)
        except BaseException as error:
            refuse(peers.connections, error)
            raise
        self.control = control
        self._watch_device(control)
        self._is_open = True
        self._token = control.exchange(Collective.CONNECT, peers.name)[0]  # only these ranks know it
        self._store: Any = dist.PrefixStore(f"bpipe/{self._token.hex()}", store)

    def _watch_device(self, control: ConnectedControlPlane) -> None:
        if self._communicators is not None:
            in_flight, step = self._communicators.in_flight, lambda: control.activity.step
            watch = DeviceWatchdog(self.rank, in_flight, self._timeouts, control.fail, step, control.shows_waits)
            control.looks.append(watch.tick)

    def _interruptible(self) -> Interruptible:
        """Make an `Interruptible` for work that waits for other ranks, for no longer than this rank's timeout."""
        began, has_warned = time.monotonic(), False

        def look() -> None:
            nonlocal has_warned
            self.control.check()
            seconds = time.monotonic() - began
            text = f"rank {self.rank} has waited {seconds:.1f} s to connect to the other ranks: {opening.note}"
            if seconds > self._timeouts.timeout_s:
                raise TransferTimeoutError(f"{text}: longer than timeout_s={self._timeouts.timeout_s:g}")
            if seconds > self._timeouts.slow_s and not has_warned:
                has_warned = True
                LOG.warning("%s", text)

        opening = Interruptible(look)
        return opening

    def _meet(self, opening: Interruptible, store: Any) -> Peers:
        key = f"bpipe/peers/{getattr(self.group, 'group_name', '')}"
        self._written.add(store, f"{key}/{self.rank}")
        opening.note = "it looks for its own addresses, and writes them to the process group's store"
        to = links(self.rank, self.size)
        try:
            return opening.run(
                lambda: meet_peers(
                    store, key, self.rank, self.size, opening.check, links=to, pipeline=self.identity, secret=self._secret
                )
            )
        except BaseException as error:
            if not opening.has_begun:  # no thread can start
                say_farewell(store, key, self.rank, dict.fromkeys(to, False), str(error))
            self._written.remove(REMOVED_S)
            if not isinstance(error, OtherPipelineError):
                raise
            count_pipelines(self.group, max(0, error.theirs - count_pipelines(self.group, 0)))  # so that both count the next alike
            raise AgreementError(str(error)) from None

    def _connect_gloo(self, channels: Sequence[Channel]) -> None:
        """Make gloo's connections of channels whose large tensors travel by it, one group of two ranks for each."""
        timeout = timedelta(seconds=self._timeouts.timeout_s + MARGIN_S)
        for channel in channels:
            opening = self._interruptible()
            opening.note = f"gloo's connection for {self.named(channel)} is being made"
            own, end = dist.PrefixStore(_place_of(channel), self._store), self._ends(channel).index(self.rank)
            self._written.add_gloo(own, end)
            with using_store():
                self._gloo[channel] = opening.run(partial(dist.ProcessGroupGloo, own, end, 2, timeout))
        if not gloo_connects_late():
            for channel in channels:
                opening = self._interruptible()
                opening.note = f"gloo's connection for {self.named(channel)} is there, but its other rank does not greet"
                opening.run(partial(_greet, self._gloo[channel], self._other_end(channel)))
        self._written.remove()  # who greets has read them

    def _release(self) -> None:
        """End all transfers, and all waits for one.

        A gloo wait that runs into its timeout closes the connection of its group, and so ends all other waits.
        """
        for end in [*self._senders.values(), *self._receivers.values()]:
            end.end()
        for link in list(self._links.values()):
            link.end()
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for channel, gloo in list(self._gloo.items()):
            with suppress(RuntimeError):
                gloo.recv([nothing], self._other_end(channel), NO_TAG).wait(AT_ONCE)
        if self._communicators is not None:
            self._communicators.abort()

    @transferring
    def connect(self, channels: Sequence[Channel], group_ranks: Sequence[int], *, are_sized: bool = False) -> None:
        self._group_ranks, self._lends = group_ranks, are_sized or not is_asynchronous(self.device)
        if self.size == 1:
            return
        if new := [channel for channel in channels if channel not in self._opened]:
            self._open_socket_channels(new)
            self._opened.update(new)
        beside = [channel for channel in channels if self.rank in self._ends(channel) and not self._is_local(channel)]
        if self._communicators is not None:
            self._connect_devices(self._communicators, [one for one in beside if one not in self._communicators])
        else:
            self._connect_gloo([one for one in beside if one not in self._gloo])

    def connection_bytes(self) -> int:
        return 0 if self._communicators is None else self._communicators.bytes_of_one

    def shared_message_bytes(self) -> int:
        on_device = 0 if self._communicators is None else self._communicators.shared_bytes()
        return on_device + sum(sender.num_bytes for sender in self._senders.values())

    def _connect_devices(self, communicators: Communicators, channels: Sequence[Channel]) -> None:
        """Make a communicator for each channel."""
        assert self._make is not None
        timeout = timedelta(seconds=max(DEVICE_MARGIN * self._timeouts.timeout_s, LEAST_DEVICE_S))
        opening = self._interruptible()
        opening.note = "it connects to the process group's store once more"
        store = opening.run(self._store.clone)  # a wait for another rank holds up all other requests on the same connection
        for channel in channels:
            end, opening = self._ends(channel).index(self.rank), self._interruptible()
            if channel in self._files:
                opening.note = f"the other rank does not copy {self.named(channel)} yet"
                make: Callable[[], Any] = partial(self._ring, channel, sends=end == 0)
            else:
                opening.note = f"a communicator for {self.named(channel)} is being made"
                own = dist.PrefixStore(_place_of(channel), store)
                if end == 0:
                    self._written.add(own, ID_KEY)
                make = partial(self._make, own, end, timeout)
            opening.run(partial(communicators.connect, channel, end, make))

    def _ring(self, channel: Channel, *, sends: bool) -> DeviceRing:
        stream, activity = self.streams.of(("ring", channel), self.device), self.control.activity
        return open_ring(self._links[channel], self._files[channel], self.device, stream, activity, sends=sends)

    def _is_local(self, channel: Channel) -> bool:
        """Return whether both ends are on this host, and large tensors pass through memory that they share, if any pass at all."""
        if not is_asynchronous(self.device):
            return (self._senders.get(channel) or self._receivers[channel]).has_ring
        eviction = channel if channel.purpose is Purpose.EVICT else Channel(Purpose.EVICT, channel.dst, channel.src)
        return channel.purpose in EVICTIONS and self.link_of(eviction) is not None

    def named(self, channel: Channel) -> str:
        sender, receiver = self._ends(channel)
        return f"{channel.purpose.value} messages from rank {sender} to {receiver}"

    def _ends(self, channel: Channel) -> tuple[int, int]:
        return self._group_ranks[channel.src], self._group_ranks[channel.dst]

    def _other_end(self, channel: Channel) -> int:
        """Return the number of the other rank in a channel's group of two."""
        return 1 - self._ends(channel).index(self.rank)

    def _open_socket_channels(self, channels: Sequence[Channel]) -> None:
        ends, addresses = [self._ends(channel) for channel in channels], own_addresses(self._store)
        look = self._interruptible().look
        connections = open_connections(ends, self.rank, addresses, self._token, self.control, look, self._reached, self._secret)
        self.control.channel_sockets += connections.values()
        rings = {} if is_asynchronous(self.device) else self._share_memory(channels, connections)
        for index, connection in connections.items():
            prepare(connection, self._timeouts.timeout_s + MARGIN_S)
            channel = channels[index]
            if ends[index][0] == self.rank:
                self._senders[channel] = Sender(connection, self.named(channel), rings.get(index))
            else:
                self._receivers[channel] = Receiver(connection, self.named(channel), rings.get(index))
        self.control.check()  # a failure before this line has not ended these
        if is_asynchronous(self.device) and (tried := [one for one in channels if self._may_reach(one)]):
            self._find_reached(tried)

    def _may_reach(self, channel: Channel) -> bool:
        """Return whether the first end of a channel would use memory of the other one's device, if it reaches that."""
        return channel.purpose is Purpose.EVICT or (channel.purpose not in EVICTIONS and self._communicators is not None)

    def _share_memory(self, channels: Sequence[Channel], connections: Mapping[int, socket.socket]) -> dict[int, Ring]:
        """Share memory with processes of this host, and return the rings of their channels, by index."""
        say_why = partial(warn_not_shared, self.rank)
        if (why := why_not_shared()) and may_share_memory():
            say_why(why)
        files = self._open_links(channels, say_why, is_able=not why)
        return {index: Ring(file, connections[index], say_why) for index, file in files.items()}

    def _open_links(self, channels: Sequence[Channel], say_why: Callable[[str], None], *, is_able: bool) -> dict[int, SharedFile]:
        """Open links between processes of one host, keep those that will be needed, and return each channel's file, by index."""
        ends, is_able = [self._ends(channel) for channel in channels], is_able and may_share_memory()
        opened = open_local_links(ends, self.rank, self._token, self.control, say_why, can_share=is_able, secret=self._secret)
        for index, (link, _) in opened.items():
            if channels[index].purpose is Purpose.EVICT or is_asynchronous(self.device):
                self._links[channels[index]] = link
                self.control.channel_sockets.append(link.connection)
            else:
                link.close()
        return {index: file for index, (_, file) in opened.items()}

    def _find_reached(self, channels: Sequence[Channel]) -> None:
        """Open links between processes of one host, and keep those whose first end reaches the memory of the other one's device."""
        if (why := why_no_handles(self.device)) and may_share_memory():
            LOG.info("rank %d: tensors do not go straight to another device's memory: %s", self.rank, why)
        say_why = partial(LOG.warning, "rank %d: tensors do not go straight to another device's memory: %s", self.rank)
        files = self._open_links(channels, say_why, is_able=not why)
        self._files |= {channels[index]: file for index, file in files.items() if channels[index].purpose not in EVICTIONS}
        self.control.check()  # a failure before this line has not ended them
        links = {one: (self._links[one], self._ends(one)[0] == self.rank) for one in channels if one in self._links}
        opening = self._interruptible()
        opening.note = "it tries whether ranks of this host reach the memory of each other's devices"
        refused = self._refused([one for one in links if one in self._files])
        for channel, reason in find_reached(links, self.device, opening.run, refused).items():
            if channel not in refused:
                LOG.warning(
                    "rank %d: %s do not go straight to the other device's memory: %s", self.rank, self.named(channel), reason
                )
            self._links.pop(channel).close()
            if channel in self._files:
                self._files.pop(channel).close()

    def _refused(self, messages: Sequence[Channel]) -> dict[Channel, str]:
        """Return the channels of messages that this rank's device does not copy, each with why: all of them or none."""
        if not messages or not (why := why_no_ring(self.device, self.streams.of("ring trial", self.device))):
            return {}
        say = LOG.warning if copies_messages() else LOG.info
        say("rank %d: messages between stages are not copied from device to device: %s", self.rank, why)
        return dict.fromkeys(messages, why)

    def can_lend(self) -> bool:
        return is_asynchronous(self.device) and any(channel.purpose is Purpose.EVICT for channel in self._links)

    def link_of(self, channel: Channel) -> LocalLink | None:
        return self._links.get(channel) if self._lends else None

    def wait_for(self, what: str, call: Callable[[], T]) -> T:
        opening = self._interruptible()
        opening.note = what
        return opening.run(call)

    @transferring
    def send(
        self,
        channel: Channel,
        tensors: Sequence[torch.Tensor],
        header: bytes | None = None,
        note: bytes | None = None,
        *,
        may_have_note: bool = False,
    ) -> Transfer:
        filled = [tensor for tensor in tensors if tensor.numel()]
        if self._is_for_socket(self._senders[channel], filled):
            return self._senders[channel].send(header, filled, note)
        works = self._send_beside(channel, header, note, may_have_note=may_have_note)
        if self._communicators is not None:
            return self._post(self._communicators, channel, filled, sends=True, beside=works)
        gloo, peer, tag = self._gloo[channel], self._other_end(channel), TAGS[channel.purpose]
        if self._staging is not None:
            return self._staging.send(channel, filled, works, lambda tensor: gloo.send([tensor], peer, tag))
        return Works(works + [gloo.send([tensor], peer, tag) for tensor in filled], filled)

    def _send_beside(self, channel: Channel, header: bytes | None, note: bytes | None, *, may_have_note: bool) -> list[Any]:
        """Send what goes over the connection beside large tensors: a header, and a message that is empty or has the note."""
        sender = self._senders[channel]
        if header is not None or note is not None:
            return [sender.send(header, [] if may_have_note else None, note)]
        rest = sender.send_empty() if may_have_note else None
        return [] if rest is None else [rest]

    @transferring
    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], *, may_have_note: bool = False) -> Transfer:
        filled = [tensor for tensor in tensors if tensor.numel()]
        if self._is_for_socket(self._receivers[channel], filled):
            return self._receivers[channel].receive(filled)
        transfer = self._receive_large(channel, filled)
        return Noted(transfer, self._receivers[channel].receive([])) if may_have_note else transfer

    def _receive_large(self, channel: Channel, filled: Sequence[torch.Tensor]) -> Transfer:
        if self._communicators is not None:
            return self._post(self._communicators, channel, filled, sends=False, beside=[])
        gloo, peer, tag = self._gloo[channel], self._other_end(channel), TAGS[channel.purpose]
        if self._staging is not None:
            return self._staging.receive(channel, filled, lambda tensor: gloo.recv([tensor], peer, tag))
        return Works([gloo.recv([tensor], peer, tag) for tensor in filled], filled)

    def _post(
        self, communicators: Communicators, channel: Channel, tensors: Sequence[torch.Tensor], *, sends: bool, beside: list[Any]
    ) -> Transfer:
        """Post a transfer of tensors between devices, and return it together with the works beside it."""
        step, action = self.control.activity.step, self.control.activity.action()

        def what() -> str:
            return f"{self.named(channel)}, step {step}" + ("" if action is None else f", {place_of(action)}")

        works = [communicators.post(channel, tensors, sends=sends, what=what)] if tensors else []
        return Works([*beside, *works], tensors, is_told=True)

    def _is_for_socket(self, channel: SocketChannel, tensors: Sequence[torch.Tensor]) -> bool:
        return self.device.type == "cpu" and (channel.has_ring or sum(tensor.nbytes for tensor in tensors) <= SMALL)

    def receive_header(self, channel: Channel) -> bytes:
        return self._receivers[channel].read_header(MOST_BYTES)

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._written.remove_all()
        is_whole = self.control.failure is None
        if self._communicators is not None and is_whole:
            self._let_arrive(self._communicators.in_flight)
        self.control.close()
        if self._communicators is not None:
            self._communicators.close(is_whole)
        for channel in [*self._senders.values(), *self._receivers.values()]:
            channel.close()
        self._senders.clear()
        self._receivers.clear()
        self._gloo.clear()
        for link in self._links.values():
            link.close()
        self._links.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._written.wait(REMOVED_S)
        if not self._token and self.identity:  # the ranks have not come together in it: not to be counted
            count_pipelines(self.group, -1)
            self.identity = 0

    def settle(self, most_s: float) -> None:
        if self._staging is not None:
            self._staging.settle(most_s)
        if self._communicators is not None:
            self._communicators.join()

    def _let_arrive(self, in_flight: InFlight) -> None:
        """Wait for what was posted, as long as the other ranks are there, because a finalizer may be what closes the pipeline."""
        until = time.monotonic() + self._timeouts.timeout_s
        while (number := in_flight.number()) and self.control.failure is None:
            if time.monotonic() > until:
                LOG.warning("rank %d closes a pipeline with %d transfers that never completed", self.rank, number)
                return
            time.sleep(POLL_S)


def _place_of(channel: Channel) -> str:
    """Return what a channel's two ranks find each other by in the store."""
    return f"{channel.purpose.value}/{channel.src}/{channel.dst}"


def _greet(gloo: Any, other: int) -> None:
    """Exchange a byte with the other rank of a group of two, which can send its own only once it is connected, too."""
    mine, theirs = (torch.zeros(1, dtype=torch.uint8, device="cpu") for _ in range(2))
    sent = gloo.send([mine], other, GREETING)
    gloo.recv([theirs], other, GREETING).wait()
    sent.wait()


def _timeout_of(group: Any) -> timedelta:
    """Return the timeout that the user gave the process group."""
    backends = backends_of(group)
    return timeout_of(group, torch.device("cpu" if "cpu" in backends else next(iter(backends)))) or timedelta(minutes=30)
