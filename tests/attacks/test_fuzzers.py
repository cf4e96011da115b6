"""Inputs that a peer could have made up: each is read as what it is, or refused as a CommError; nothing else ever happens."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bpipe.comm.health.activity import State, Status
from bpipe.comm.health.agreement import StepRecord
from bpipe.comm.health.clocks import Reading
from bpipe.comm.health.collective import Collective
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.gather import most_in_part
from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.meeting import Hello
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import HEAD, ONLY_HELLO, Frame, FrameReader, Kind
from bpipe.comm.wire.header import Subject, pack_eviction, pack_spec, unpack_eviction, unpack_spec
from bpipe.comm.wire.message import MessageSpec, TensorMeta
from bpipe.errors import CommError
from bpipe.model.cut import Cut
from bpipe.slices.slicing import SliceLengths
from tests.comm.meetings import together
from tests.comm.test_driver import planes

SUBJECT = Subject(1, 2, 3)
SPEC = MessageSpec('["T",{"a":"T"}]', (TensorMeta((2, 3), (3, 1), torch.float32, False), None))
RECORDS = [
    Endpoint((("127.0.0.1", 1), ("::1", 2)), "host", b"n" * 16, b"f" * 16),
    Hello(1, 2, b"n" * 16, b"t" * 16, b"p" * 16, b"o" * 16, b"r" * 32),
    Failure(Cause.RAISED, 1, 2, "stage 1", "ValueError: boom", "a traceback"),
    Status(State.RUNNING, 1, 2, 3, 4.5, ((1, 2), (3, 4))),
    StepRecord("0.1", "1F1B", "f" * 32, True, 1, 4, 4, 8, 1, b"s" * 16, (1, 2), rooms=(Cut(b"c" * 16), SliceLengths((1, 2)))),
    Reading(b"t" * 16, "f" * 32, 1, 2, 3),
]
FRAMES = [Frame(kind, 5, b"\1" + b"body" * 5) for kind in Kind]
INTERESTING = [b"\0", b"\xff", b"\x7f", b"[", b"]", b'"', b"-1", b"1e999", b"null", b"NaN", b"[" * 500, b"9" * 400, b"\xff" * 8]


def mutated(random: random.Random, data: bytes) -> bytes:
    """Some bytes of a sound input flipped, cut out, repeated, or replaced by such as break readers."""
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.choice([0, 1, 1, 2, 4, 8, 50]))
        piece = random.choice([b"", random.randbytes(end - start), data[start:end] * 2, random.choice(INTERESTING)])
        data = data[:start] + piece + data[end:]
    return data


def read_frames(max_bodies: Any = None) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        reader = FrameReader(most_of_call=lambda _, call: most_in_part(call, 4)) if max_bodies is None else FrameReader(max_bodies)
        found = list(reader.feed(data))
        assert len(reader._data) <= len(data) and reader.num_missing > -(2**33)
        return found

    return read


READERS: dict[str, tuple[list[bytes], Callable[[bytes], Any]]] = {
    "frames": ([b"".join(frame.pack() for frame in FRAMES[:index]) for index in range(1, 9)], read_frames()),
    "hello": ([Frame(Kind.HELLO, 0, encode(RECORDS[1])).pack()], read_frames(ONLY_HELLO)),
    **{type(one).__name__: ([encode(one)], lambda data, one=one: decode(type(one), data, "record")) for one in RECORDS},
    "step record": ([encode(RECORDS[4])], StepRecord.unpack),
    "failure": ([encode(RECORDS[2])], lambda data: Failure.unpack(data, 4)),
    "status": ([encode(RECORDS[3])], Status.unpack),
    "header of a message": ([pack_spec(SUBJECT, SPEC)], lambda data: unpack_spec(data, SUBJECT)),
    "header of an eviction": ([pack_eviction(SUBJECT, 0, [1, 2, 3])], lambda data: unpack_eviction(data, SUBJECT, 0)),
}


@pytest.mark.parametrize("count", [1500, 20_000])
@pytest.mark.parametrize("name", READERS)
def test_what_was_made_up_is_read_or_refused(name: str, count: int) -> None:
    samples, read = READERS[name]
    generator, outcomes, slowest_s = random.Random(name), Counter[str](), 0.0
    for _ in range(count):
        data = mutated(generator, generator.choice(samples))
        began = time.thread_time()
        try:
            read(data)
            outcomes["read"] += 1
        except CommError:
            outcomes["refused"] += 1
        slowest_s = max(slowest_s, time.thread_time() - began)
    print(f"{name}: {dict(outcomes)}, slowest {1000 * slowest_s:.2f} ms")
    assert outcomes["refused"] > count / 10 and slowest_s < 5  # seconds of CPU: none hangs


@pytest.mark.parametrize("count", [15, 150])
def test_a_malformed_peer_breaks_its_pipeline_on_all_ranks_or_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 sends made-up frames over a true connection; ranks 0 and 1 then agree on who is to blame, or go on."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    generator, outcomes = random.Random(5), Counter[str]()
    stream = b"".join(frame.pack() for frame in FRAMES)
    for _ in range(count):
        with planes(dist.HashStore(), 3) as made:
            made[2].peers[0].connection.sendall(mutated(generator, stream) + bytes(HEAD.size))
            found = together([lambda plane=plane: plane.exchange(Collective.STEP, b"") for plane in made[:2]])
            assert all(isinstance(one, CommError) for one in found), found
            outcomes[str(found[0])[:30]] += 1
            assert "rank 2" in str(found[0]) or "rank 1 failed" in str(found[0]), found  # which a frame FAILED may have said
    print(dict(outcomes))
