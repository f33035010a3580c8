"""Which peers the owner of a private swarm has shut out: one signed list, the newest counts."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RemoteProtocolError, UsageError
from ..identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, make_peer_id, public_key_of
from ..ids import PeerId
from .membership import Membership

MAX_REVOKED = 100
"""As many as fit into a record of the directory beside everything else in it."""

_VERSION = b"\x01"
_CONTEXT = b"shoal revocations 1\0"
_SEQUENCE_BYTES = 8
_HEADER_BYTES = len(_VERSION) + SIGNATURE_BYTES


@dataclass(frozen=True)
class Revocations:
    """The peers that no member deals with. A list replaces every one of a lower sequence."""

    sequence: int = 0
    peer_ids: frozenset[PeerId] = frozenset()


def sign_revocations(owner: Membership, revocations: Revocations) -> bytes:
    """Return the record of a list; UsageError when we are not the owner or it is too long."""
    if len(revocations.peer_ids) > MAX_REVOKED:
        raise UsageError(
            f"at most {MAX_REVOKED} peers can be revoked; begin a new swarm instead "
            "(`shoal swarm-new`)"
        )
    keys = (public_key_of(peer_id) for peer_id in sorted(revocations.peer_ids))
    body = revocations.sequence.to_bytes(_SEQUENCE_BYTES, "big") + b"".join(keys)
    return _VERSION + owner.sign_as_owner(_CONTEXT + body) + body


def read_revocations(membership: Membership, record: bytes) -> Revocations:
    """Return the list in a record; RemoteProtocolError, and nothing else, for whatever bytes."""
    num_key_bytes = len(record) - _HEADER_BYTES - _SEQUENCE_BYTES
    if num_key_bytes < 0 or num_key_bytes % PUBLIC_KEY_BYTES or not record.startswith(_VERSION):
        raise RemoteProtocolError("the revocation list is malformed")
    if num_key_bytes > MAX_REVOKED * PUBLIC_KEY_BYTES:
        raise RemoteProtocolError("the revocation list is too long")
    signature, body = record[len(_VERSION) : _HEADER_BYTES], record[_HEADER_BYTES:]
    if not membership.is_signed_by_owner(_CONTEXT + body, signature):
        raise RemoteProtocolError("the revocation list was not signed by the owner of this swarm")
    keys = body[_SEQUENCE_BYTES:]
    peer_ids = (
        make_peer_id(keys[start : start + PUBLIC_KEY_BYTES])
        for start in range(0, len(keys), PUBLIC_KEY_BYTES)
    )
    return Revocations(int.from_bytes(body[:_SEQUENCE_BYTES], "big"), frozenset(peer_ids))
