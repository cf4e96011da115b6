"""Bytes of any length from every rank to every rank, over a transport that exchanges records of one length."""

from __future__ import annotations

import struct

from bpipe.comm.agreement import GATHERS, RECORD
from bpipe.comm.transport import Transport
from bpipe.errors import AgreementError

__all__: list[str] = []

LENGTH = struct.Struct("<6sQ")


def exchange(transport: Transport, data: bytes) -> list[bytes]:
    """Collective over the pipeline: give every rank's bytes to all ranks. Blocks.

    Returns:
        One bytes object a rank, by rank of the group.

    Raises:
        AgreementError: another rank does something else.
        CommError: the exchange failed.
    """
    lengths = []
    for rank, record in enumerate(transport.agree(LENGTH.pack(GATHERS, len(data)).ljust(RECORD.size, b"\0"))):
        magic, length = LENGTH.unpack_from(record)
        if magic != GATHERS:
            doing = "runs a step or starts a trace while this one makes a plan or gathers a trace"
            raise AgreementError(f"rank {rank} {doing}: do the same on all ranks")
        lengths.append(length)
    gathered = transport.agree(data.ljust(max(1, *lengths), b"\0"))
    return [padded[:length] for padded, length in zip(gathered, lengths)]
