"""Everything that bpipe reads and has not written itself in this process: valid examples, and what reads and uses them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import torch

from bpipe.comm.health.activity import State, Status
from bpipe.comm.health.agreement import StepRecord
from bpipe.comm.health.clocks import Reading
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.rendezvous.addresses import Endpoint, own_addresses, read_endpoint
from bpipe.comm.rendezvous.meeting import Hello
from bpipe.comm.transport.socket_channel import LENGTH, NOTED, Receiver
from bpipe.comm.wire import header
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import Frame, FrameReader, Kind
from bpipe.comm.wire.message import MessageSpec, TensorMeta, flatten_message, unflatten_message
from bpipe.comm.wire.note import read_note, with_note
from bpipe.environment import may_share_memory, port_range, ranks_on_this_node, shared_secret
from bpipe.errors import ConfigurationError
from bpipe.estimate import Measurement, Profile, costs_of
from bpipe.model.cut import Cut
from bpipe.relaxed.tick_messages import NOTE as TICK_NOTE
from bpipe.relaxed.tick_messages import Call, marks_of
from bpipe.schedules import Amount, Costs, Plan, Sizes, StageSizes, Timeline, build, simulate, verify
from bpipe.schedules.torch_csv import from_csv
from bpipe.session.report import Report
from bpipe.simulator.measured import Measured
from bpipe.simulator.timeline import Lane
from bpipe.tools.balancing import balanced
from bpipe.tools.cli import main
from bpipe.tools.summary import data_of
from bpipe.tools.trace_record import Origin, joined, packed, parse
from bpipe.twins.exchange import TwinRecord

SUBJECT = header.Subject(3, 1, 2)
CPU = torch.device("cpu")


class Reader(NamedTuple):
    """What reads some bytes.

    Args:
        examples: valid ones.
        read: reads them, and uses what it has read as bpipe does.
    """

    examples: list[bytes]
    read: Callable[[bytes], object]


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


PLANS = [
    build("balanced_1f1b", 4, 6),
    build("zbv", 4, 4),
    balanced(build("1f1b", 4, 4), Costs(saved_bytes=64, output_bytes=8), "lowest", num_parts=3),
    balanced(build("1f1b", 4, 4), Costs(saved_bytes=64), "lowest", host="only"),
]
UNVERIFIED: list[Callable[[Plan], object]] = [  # what a plan can be asked for
    str,
    Plan.to_text,
    Plan.to_csv,
    Plan.fingerprint,
    Plan.channels,
    lambda plan: plan.peak_slots,
    lambda plan: plan.device_peak_bytes,
    lambda plan: plan.activation_peak_bytes,
    lambda plan: [plan.host_bytes(rank) for rank in range(plan.num_ranks)],
    verify,
]


def read_plan(data: bytes) -> None:
    """Ask an unverified plan for everything: each question may be refused."""
    plan, refusals = Plan.from_text(_text(data)), []
    for ask in UNVERIFIED:
        try:
            ask(plan)
        except ValueError as error:  # which PlanError is
            refusals.append(error)
    for error in refusals:
        if type(error).__module__ != "bpipe.errors":
            raise error
    if not any("breaks" in str(error) for error in refusals):
        assert Plan.from_text(plan.to_text()) == plan
        data_of(simulate(plan, Costs()))


def _trace(timelines: list[Timeline], run: str = "") -> bytes:
    return "".join(packed(timelines, Origin(run=run))).encode()


def _measured(plan: Plan, only: int | None = None) -> Measured:
    """A simulated step as if it had been measured, by one rank alone or by all."""
    step = simulate(plan, Costs(forward_s=1e-3, saved_bytes=64))
    nothing = Lane(begin_s=array("d"), end_s=array("d"))
    kept = [step.actions[rank] if only in (None, rank) else nothing for rank in range(plan.num_ranks)]
    served = [step.served[rank] if only in (None, rank) else nothing for rank in range(plan.num_ranks)]
    return Measured(
        plan=plan,
        actions=tuple(kept),
        served=tuple(served),
        source="measured",
        step=7,
        began_s=0.5,
        device=(nothing,) * plan.num_ranks,
        clock_error_s=(1e-6,) * plan.num_ranks,
    )


def read_trace(data: bytes) -> None:
    for timeline in parse(data, "trace.json").timelines:
        data_of(timeline)
        str(timeline.plan)


def read_folder(data: bytes) -> None:
    """Join a damaged file of rank 0 with a sound one of rank 1."""
    joined([parse(data, "rank-0.json"), parse(RANK_1, "rank-1.json")])


OF_RANK_0, RANK_1 = (_trace([_measured(build("1f1b", 2, 2), rank)] * 2, "run") for rank in (0, 1))

MEASUREMENT = Measurement(
    microbatch_size=1,
    own_bytes=9,
    movable_bytes=8,
    shared_bytes=0,
    output_bytes=2,
    input_gradient_bytes=2,
    forward_s=1.0,
    backward_s=2.0,
)
PROFILE = Profile(
    name="Stage",
    device="cpu",
    num_parameters=4,
    num_trainable=2,
    parameter_bytes=16,
    trainable_bytes=8,
    gradient_bytes=8,
    buffer_bytes=0,
    measurements=(MEASUREMENT,),
)


def read_profile(data: bytes) -> None:
    profile = Profile.from_json(_text(data))
    simulate(build("1f1b", 2, 2), costs_of([profile] * 2, profile.microbatch_sizes[0]))


RECORDS = [
    StepRecord("1.0", "1f1b", "0" * 32, True, 3, 4, 4, 8, 1, bytes(16), (0, 1), rooms=(Cut(bytes(16)), TwinRecord((1, 2)))),
    Failure(Cause.RAISED, 1, 3, "stage 1, microbatch 2, action 1F2", "ValueError: x", "Traceback"),
    Status(State.RUNNING, 1, 3, 17, 0.5, ((0, 1), (2, 3))),
    Reading(bytes(16), "0" * 32, 1, 5, 6),
    Hello(1, 0, bytes(16), bytes(16), bytes(16), bytes(16)),
    Endpoint((("127.0.0.1", 29500), ("::1", 29500)), "host", bytes(16)),
]


def read_record(data: bytes) -> None:
    refused = []
    for read in (
        *(partial(decode, type(record), what="record") for record in RECORDS),
        lambda data: str(Failure.unpack(data, 4).as_error(0, "here")),
        Status.unpack,
        StepRecord.unpack,
        read_endpoint,
    ):
        try:
            read(data=data)
        except RuntimeError as error:  # which CommError is
            refused.append(error)
    for error in refused:
        if type(error).__module__ != "bpipe.errors":
            raise error


TREE, TENSORS = flatten_message({"a": [torch.zeros(2, 3), 1], 2: (torch.zeros(4), None, "text")}, "here")
SPEC = MessageSpec(TREE, tuple(TensorMeta(tuple(t.shape), t.stride(), t.dtype, requires_grad=True) for t in TENSORS))
HEADER = header.pack_spec(SUBJECT, SPEC)
EVICTION = header.pack_eviction(SUBJECT, 2, [16, 0, 5])
AGREED = SPEC._replace(tensors=(SPEC.tensors[0], None))
NOTE = with_note(SUBJECT, AGREED, SPEC, TENSORS, CPU)[1]


def read_header(data: bytes) -> None:
    """Read headers, damaged ones too whose checksum is right."""
    sound = header._pack(data[8] % 4 if len(data) > 8 else 0, SUBJECT, data[10] if len(data) > 10 else 0, data[36:])
    for one in (data, sound):
        with contextlib.suppress(header.CommError):
            header.unpack_eviction(one, SUBJECT, 2)
        with contextlib.suppress(header.CommError):
            spec = header.unpack_spec(one, SUBJECT)
            str(spec)
            unflatten_message(spec.tree, TENSORS)
        with contextlib.suppress(header.CommError):
            read_note(SUBJECT, AGREED, one, [TENSORS[0], None], CPU)


def read_frames(data: bytes) -> None:
    list(FrameReader().feed(data))


def read_channel(data: bytes) -> None:
    """Receive a message that may have a note, and a header."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        receiver = Receiver(theirs, "forward messages from rank 0 to 1")
        receiver.receive([torch.zeros(2)]).wait()
        receiver.read_header(4096)


def read_environment(data: bytes) -> None:
    value = _text(data).replace("\0", "")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "BPIPE_SECRET", "BPIPE_SHARED_MEMORY")
    with patch.dict(os.environ, dict.fromkeys(names, value)):
        shared_secret()
        may_share_memory()
        ranks_on_this_node()
        own_addresses(object())
    with patch.dict(os.environ, {"BPIPE_PORT_RANGE": value}), suppress(ConfigurationError):
        port_range()


# How large a plan is stays as it is: who asks for a large one gets it.
COMMANDS = {
    "show 1f1b -p 4 -m 4": "--slots 2,3,-,4 --from 1 --columns 3",
    "simulate balanced_1f1b -p 2 -m 4": "--forward 20ms,1 --saved 1.5GiB --bandwidth 20GB/s --latency 5us --slowdown 1.5",
    "compare 1f1b gpipe -p 2 -m 4": "--per-rank --backward 1e-3 --static 5",
    "show 1f1b -p 2 -m 2 --parts 4": "--saved 3GiB,2GiB --budget lowest --host last",
    "advise gpt3-96b --device a100-80gb --stages 2 --batch 2 --microbatch-sizes 1": "--efficiency 1=0.33 --link 25GB/s",
}


def read_command(data: bytes) -> None:
    """Run one of the commands, which the number of characters chooses, with these options."""
    commands = list(COMMANDS)
    options = _text(data).split()
    near = [command for command, valid in COMMANDS.items() if set(valid.split()) & set(options)] or commands
    _run([*near[len(data) % len(near)].split(), *options])


def read_file(command: str, suffix: str) -> Callable[[bytes], None]:
    """Return what runs a command on a file."""

    def read(data: bytes) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"file{suffix}"
            path.write_bytes(data)
            _run([*command.split(), str(path)])

    return read


def _run(arguments: list[str]) -> None:
    """Run a command: it ends with one of its codes, and prints nothing that controls a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:  # of --help
            code = end.code
    shown = out.getvalue() + err.getvalue()
    assert code in (0, 1, 2), code
    assert not set(shown) & set("\x1b\x9b\x07\x08\r\u202e"), shown
    shown.encode()


SIZED = Report(
    1, {1: (StageSizes(parts=(3, 4), fixed=1, amounts=(Amount("in", 2), Amount("out", 2))),)}, static=5, budget=100, states=1
)
TEXTS = [plan.to_text().encode() for plan in PLANS]
CSV = [build("1f1b", 4, 4).to_csv().encode(), build("zbv", 4, 4).to_csv().encode()]
TRACES = [_trace([simulate(PLANS[0], Costs(saved_bytes=9))]), _trace([_measured(PLANS[2])] * 2)]
PROFILES = [json.dumps(asdict(PROFILE)).encode()]

TICK = Call(7, drains=False, learns=True)

READERS: dict[str, Reader] = {
    "plan": Reader(TEXTS, read_plan),
    "csv": Reader(CSV, lambda data: verify(from_csv(_text(data)))),
    "trace": Reader(TRACES, read_trace),
    "folder": Reader([OF_RANK_0], read_folder),
    "profile": Reader(PROFILES, read_profile),
    "report": Reader([SIZED.pack()], lambda data: Sizes.of_slices(zip(*Report.unpack(data, 1).stages.values()), static=(0,))),
    "record": Reader([encode(record) for record in RECORDS], read_record),
    "header": Reader([HEADER, EVICTION, NOTE], read_header),
    "tick": Reader([TICK_NOTE.pack(*TICK, True) + bytes([1, 0])], lambda data: marks_of(data, TICK, 1, 2)),
    "frames": Reader([Frame(Kind.CALL, 3, b"body").pack() + Frame(Kind.ASK, 4).pack()], read_frames),
    "channel": Reader([LENGTH.pack(8 | NOTED) + bytes(8) + LENGTH.pack(5) + b"12345" + LENGTH.pack(3) + b"abc"], read_channel),
    "environment": Reader([b"eth0,eth1", b"8"], read_environment),
    "command": Reader([options.encode() for options in COMMANDS.values()], read_command),
    "check": Reader([*TEXTS, *CSV], read_file("check", ".txt")),
    "show": Reader(TEXTS, read_file("show", ".txt")),
    "simulate": Reader(TEXTS, read_file("simulate", ".csv")),
    "trace command": Reader(TRACES, read_file("trace", ".json")),
    "compare": Reader(TRACES, read_file("compare 1f1b -p 4 -m 4", ".json")),
    "advise": Reader(PROFILES, read_file("advise --memory 40GiB --batch 2 --stages 2", ".json")),
}
