"""bpipe with one ordering removed: the checker has to report it."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from inspect import CO_OPTIMIZED, unwrap
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple


class Mutation(NamedTuple):
    """A change of one place in bpipe's source.

    Args:
        name: what is removed.
        module: where.
        old: the text, which is there once.
        new: what stands there instead.
        schedule: of `work.RULES`, or `composed.SCHEDULES`, one that does what was changed.
        harmless: why nothing needs it there; empty: the checker has to report it.
        fails: whether the order is that of a step that fails.
        at_once: how many transfers may be in flight; 0: as many as by default.
    """

    name: str
    module: str
    old: str
    new: str = "pass"
    schedule: str = "balanced_1f1b"
    harmless: str = ""
    fails: bool = False
    at_once: int = 0


def without_waiting(op: str, harmless: str = "") -> Mutation:
    """Go on before a transfer is over."""
    wait = "self.timed(completion.op, transfers[start].transfer.wait)"
    new = f"note = None if completion.op is Op.{op} else {wait}"
    return Mutation(f"without {op}", "bpipe.engine.traffic", f"note = {wait}", new, harmless=harmless)


SENDS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_EVICT", "WAIT_RETURN")
RECEIVES = ("WAIT_RECV_F", "WAIT_RECV_B", "WAIT_LOAD", "WAIT_ACCEPT")
JOINED = Mutation("free what a failed step still uses", "bpipe.session.guard", "self._transport.streams.join()", fails=True)
IN_ORDER = "what is on one stream is in order: one more is for speed"
THE_EVICTOR_WAITS = "the evictor waits for the same copy, before it asks for what was copied and before it sends what comes next"
A_THREAD_WAITS = "then a thread waits, unless the process ends, which no checker sees"
IN_LOOPBACK = [
    *map(without_waiting, (*SENDS[:3], *RECEIVES[:3])),
    without_waiting("WAIT_ACCEPT", harmless=THE_EVICTOR_WAITS),
    without_waiting("WAIT_RETURN", harmless=THE_EVICTOR_WAITS),
    Mutation("copy before the sender is ready", "bpipe.comm.transport.in_process", "stream.wait_event(sent.ready)"),
    Mutation("copy before the receiver's memory is free", "bpipe.comm.transport.in_process", "stream.wait_event(received.ready)"),
    Mutation(
        "use before the copy is made", "bpipe.comm.transport.in_process", "current_stream(self._device).wait_event(self.copied)"
    ),
    Mutation("copy on whichever stream is current", "bpipe.comm.transport.in_process", "with on_stream(stream):", "if True:"),
    Mutation(
        "be ready at once",
        "bpipe.comm.transport.in_process",
        "else reached(self._device)",
        "else torch.get_device_module(self._device).Event()",
    ),
    Mutation(
        "be over before the copy",
        "bpipe.comm.transport.in_process",
        "self._copy_tensors(sent, received)\n                sent.copied = received.copied = stream.record_event()",
        "sent.copied = received.copied = stream.record_event()\n                self._copy_tensors(sent, received)",
    ),
    Mutation(
        "start before the caller's work",
        "bpipe.api.loopback",
        "self._stream(run, evictor).wait_stream(current_stream(run.device))",
    ),
    Mutation(
        "return before the ranks' work",
        "bpipe.api.loopback",
        "current_stream(run.device).wait_stream(self._stream(run, evictor))",
    ),
    Mutation(
        "serve on the stream that computes",
        "bpipe.api.loopback",
        "run.device), self._on_stream(run, evictor):",
        "run.device), self._on_stream(run, None):",
        harmless=IN_ORDER,
    ),
    Mutation("free what a failed step still uses", "bpipe.api.loopback", "self.wires.streams.join()", fails=True),
    Mutation(
        "copy to the host before it is computed",
        "bpipe.memory.side_copies",
        "stream.wait_stream(current_stream(device))",
        schedule="host",
    ),
    Mutation(
        "free or use before the host's copy is made",
        "bpipe.memory.side_copies",
        "current_stream(self._device).wait_event(self._event)",
        schedule="host",
    ),
    Mutation(
        "copy to the host on the stream that computes",
        "bpipe.memory.side_copies",
        "with on_stream(stream):",
        "if True:",
        harmless=IN_ORDER,
        schedule="host",
    ),
    Mutation(
        "unpin while a copy is under way",
        "bpipe.device.pinned",
        "    done = stream.record_event()",
        "    return",
        schedule="host",
        fails=True,
    ),
]
OVER_GLOO = [
    *map(without_waiting, (*SENDS, *RECEIVES)),
    Mutation(
        "copy to pinned memory before it is computed",
        "bpipe.comm.transport.staging",
        "stream.wait_stream(current_stream(self._device))",
    ),
    Mutation(
        "copy to pinned memory on the stream that computes",
        "bpipe.comm.transport.staging",
        "with on_stream(stream):\n            copies",
        "if True:\n            copies",
        harmless=IN_ORDER,
    ),
    Mutation("send pinned memory before it is copied", "bpipe.comm.transport.staging", "copied.synchronize()"),
    Mutation(
        "write what arrived before its memory is free",
        "bpipe.comm.transport.staging",
        "current_stream(self._device).wait_event(allocated)",
    ),
    Mutation(
        "write what arrived on the thread's own stream",
        "bpipe.comm.transport.staging",
        "with on_stream(stream):\n                current",
        "if True:\n                current",
        harmless="the thread's own stream is the default one, on which these ranks compute; " + IN_ORDER,
    ),
    Mutation(
        "use what arrived before it is copied", "bpipe.comm.transport.staging", "current_stream(self._device).wait_event(copied)"
    ),
    Mutation(
        "serve on the thread's own stream",
        "bpipe.engine.acceptor",
        "with on_stream(self._stream):",
        "if True:",
        harmless="the thread's own stream is the default one, on which these ranks compute; " + IN_ORDER,
    ),
    JOINED,
]
OVER_NCCL = [
    *map(without_waiting, (*SENDS, *RECEIVES)),
    Mutation(
        "use what is received before it has arrived", "bpipe.comm.transport.works", "            wait_for(work)", "            pass"
    ),
    Mutation("post before it is computed", "bpipe.comm.transport.in_flight", "reached(self._device).wait(stream)", at_once=1),
    Mutation(
        "wait for no room",
        "bpipe.comm.transport.in_flight",
        "                before.work.wait()",
        "                pass",
        at_once=1,
        harmless="it is about room on the device (test_few_queues), not about memory",
    ),
    Mutation(
        "serve on the stream that computes",
        "bpipe.engine.lanes",
        "with on_stream(self._side_stream(run.rank, action.peer)):",
        "if True:",
        harmless=IN_ORDER,
    ),
    Mutation("free what is aborted while it ends", "bpipe.comm.transport.c10d", "self._communicators.join()", fails=True),
]
BESIDE = "bpipe.memory.side_copies"
LENT = "bpipe.memory.device_buffers"
INTO_LENT_MEMORY = [
    without_waiting("WAIT_EVICT")._replace(schedule="bytes"),
    without_waiting("WAIT_LOAD")._replace(schedule="bytes"),
    Mutation("copy before it is computed", BESIDE, "stream.wait_stream(current_stream(device))", schedule="bytes"),
    Mutation(
        "free or use before the copy is made", BESIDE, "current_stream(self._device).wait_event(self._event)", schedule="bytes"
    ),
    Mutation(
        "copy on a stream whose end nobody waits for",
        BESIDE,
        "with on_stream(stream):",
        "if stream := torch.get_device_module(device).Stream():\n        stream.wait_stream(current_stream(device))\n"
        "    with on_stream(stream):",
        schedule="bytes",
    ),
    Mutation("lend what is still written", "bpipe.device.handles", "current_stream(memory.device).synchronize()", schedule="bytes"),
    Mutation("give back what is still read", LENT, "self._stream.synchronize()", schedule="bytes", fails=True),
    Mutation("free what is lent", LENT, "word = self._lease.recv(1)", "word = b'1'", schedule="bytes"),
    Mutation(
        "do not wait for what was lent",
        "bpipe.session.session",
        "memory.reclaim(transport)",
        schedule="bytes",
        harmless=A_THREAD_WAITS,
    ),
]
RING = "bpipe.comm.transport.device_ring"
BY_COPIES = [
    Mutation("copy a message before it is computed", RING, "self._stream.wait_stream(current_stream(self._device))"),
    Mutation("use a message before it is copied", RING, "current_stream(self._device).wait_event(self._end)"),
    Mutation("copy a message on whichever stream is current", RING, "with on_stream(self._stream):", "if True:"),
]
IN_FSDP = [
    Mutation(
        "gather into memory that a gathering which was dropped still writes",
        "bpipe.parallel.fsdp",
        "streams.all_gather_copy_in_stream.wait_stream(streams.all_gather_stream)",
        schedule="slots",
    ),
]


def apply(mutation: Mutation) -> None:
    """Let this process run bpipe with the change made, in the function that it has: to import all anew takes a rank 0.5 s."""
    module: Any = import_module(mutation.module)
    source = Path(module.__file__).read_text()
    assert source.count(mutation.old) == 1, f"{mutation} is not in {module.__file__} once"
    old, new = (_functions(compile(text, module.__file__, "exec")) for text in (source, source.replace(mutation.old, mutation.new)))
    line = source[: source.index(mutation.old)].count("\n") + 1
    at = max(index for index, code in enumerate(old) if code.co_firstlineno <= line)
    assert len(old) == len(new) and old[at] != new[at], f"{mutation} is in no function"
    function = unwrap(reduce(getattr, old[at].co_qualname.split("."), module))
    assert function.__code__ == old[at], f"{function} is not what {module.__file__} says"
    function.__code__ = new[at]


def _functions(code: CodeType) -> list[CodeType]:
    """List the functions and methods that a module's code, or a class's, defines, in their order."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [each for one in inner for each in ([one] if one.co_flags & CO_OPTIMIZED else _functions(one))]
