"""Prove that two ends of a connection have the same secret, by keyed hashes of what both have said. It is never sent itself.

Each end has made a part of what is hashed at random, for this connection alone, so that nobody can prove anything with a proof that
was overheard. The role is hashed as well, so that nobody can send a proof back to where it came from.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence

from bpipe.comm.rendezvous.addresses import Endpoint

__all__: list[str] = []

NONCE_BYTES = FINGERPRINT_BYTES = 16
UNPROVED = "who answers there has not proved that it has the secret in BPIPE_SECRET"


def nonce(secret: bytes) -> bytes:
    """Return random bytes for one connection; none without a secret."""
    return os.urandom(NONCE_BYTES) if secret else b""


def proof(secret: bytes, role: str, *said: bytes) -> bytes:
    """Return the proof of one end of a connection, 32 bytes; none without a secret.

    Args:
        secret: the same on all ranks; empty if there is none.
        role: what this end is, which the other one is not.
        said: what both ends have said, with the random bytes of each.
    """
    if not secret:
        return b""
    parts = [b"bpipe", role.encode(), *said]
    return hmac.digest(secret, b"".join(len(part).to_bytes(8, "little") + part for part in parts), "sha256")


def channel_proof(secret: bytes, role: str, token: bytes, index: int, ends: tuple[int, int], names: Sequence[bytes]) -> bytes:
    """Return what one end of a channel says to the other one: the token, which only the ranks know, unless there is a secret.

    Args:
        secret: the same on all ranks; empty if there is none.
        role: "sender" or "receiver".
        token: of the pipeline.
        index: of the channel, whose two ranks are `ends`.
        names: random bytes of each rank, which it has told the others over connections that are proved already.
    """
    if not secret:
        return token
    sender, receiver = ends
    return proof(secret, f"the {role} of channel {index} from rank {sender} to {receiver}", token, names[sender], names[receiver])


def is_same(one: bytes, other: bytes) -> bool:
    """Compare two proofs, in a time that does not tell how far they are alike."""
    return hmac.compare_digest(one, other)


def fingerprint(secret: bytes, name: bytes) -> bytes:
    """Return what a rank of this name publishes, so that the others can see whether it has the same secret; none without one."""
    return proof(secret, "fingerprint", name)[:FINGERPRINT_BYTES]


def difference(secret: bytes, rank: int, other: int, endpoint: Endpoint) -> str:
    """Say how another rank's secret differs from this rank's; empty if it does not.

    Args:
        secret: this rank's.
        rank: this rank; `other` is the one that has published the endpoint.
    """
    if is_same(endpoint.fingerprint, fingerprint(secret, endpoint.name)):
        return ""
    if secret and endpoint.fingerprint:
        how = f"ranks {min(rank, other)} and {max(rank, other)} have different secrets"
    else:
        having, lacking = (rank, other) if secret else (other, rank)
        how = f"rank {having} has a secret, and rank {lacking} has none"
    return f"{how}: set the environment variable BPIPE_SECRET to the same text on all ranks, or on none"
