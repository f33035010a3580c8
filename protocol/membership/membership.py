"""Membership: what a process can prove of its swarm, and what it can check of others.

A swarm is public, and then its id is all there is to know; or private, and then one secret makes
all that follows, each by a hash of the one before:

    owner secret ─► owner key: signs who is revoked
         └► serve secret ─► serve key: certifies peers that may serve
                 └► use secret ─► opens records, proves membership to whoever is dialled

Each secret yields those below it, and the public halves of the keys above.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import RemoteProtocolError, UsageError
from ..identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    make_peer_id,
    public_key_of,
    verify_by_key,
)
from ..ids import PeerId

SWARM_ID_BYTES = 16
SECRET_BYTES = 16
NONCE_BYTES = 12
GREETING_NONCE_BYTES = 32

_PROOF_BYTES = 32
_GREETING_BYTES = 1 + SWARM_ID_BYTES + _PROOF_BYTES
_IS_PUBLIC, _IS_PRIVATE = b"\x00", b"\x01"
_HIDDEN_ID = bytes(SWARM_ID_BYTES)

MAX_REVOKED = 100
"""As many as fit into a record of the directory beside everything else in it."""

_LIST_VERSION = b"\x01"
_LIST_CONTEXT = b"shoal revocations 1\0"
_SEQUENCE_BYTES = 8
_LIST_HEAD_BYTES = len(_LIST_VERSION) + SIGNATURE_BYTES


class Role(StrEnum):
    """The rights of a member of a private swarm; each role includes those before it."""

    USE = "use"
    SERVE = "serve"
    OWN = "own"


@dataclass(frozen=True)
class Membership:
    """The knowledge of one process of its swarm. Secrets and keys are empty where it has none.

    Made by `make_public`, `begin_public`, `make_owner`, `make_server` and `make_user`, which see
    to it that the parts fit together. `repr` shows nothing secret.
    """

    swarm_id: bytes
    use_secret: bytes = field(default=b"", repr=False)
    """The secret that every member knows; empty in a public swarm."""
    serve_key: bytes = field(default=b"", repr=False)
    """Public key that certifies peers that may serve."""
    owner_key: bytes = field(default=b"", repr=False)
    """Public key that signs revocations."""
    serve_secret: bytes = field(default=b"", repr=False)
    owner_secret: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return f"{'private' if self.is_private else 'public'} swarm {self.swarm_id.hex()[:8]}"

    @property
    def is_private(self) -> bool:
        """Whether it takes a secret to belong to the swarm."""
        return bool(self.use_secret)

    @property
    def role(self) -> Role:
        """The highest role of this process. In a public swarm every process may serve."""
        if self.owner_secret:
            return Role.OWN
        return Role.SERVE if self.serve_secret or not self.is_private else Role.USE

    def as_role(self, role: Role) -> Membership:
        """Return the membership for a holder of that role; UsageError when we cannot make it."""
        if not self.is_private or role is self.role:
            return self
        if role is Role.USE:
            return make_user(self.use_secret, self.serve_key, self.owner_key)
        if role is Role.SERVE and self.serve_secret:
            return make_server(self.serve_secret, self.owner_key)
        raise UsageError(
            f"only a code that may {role} this swarm can make such a code; this one may only "
            f"{self.role}"
        )

    def check_may_serve(self) -> None:
        """Raise UsageError when this process may only use the swarm."""
        if self.role is Role.USE:
            raise UsageError(
                "this join code only allows using the swarm; ask its owner for one that may serve"
            )

    # Proof of the right to serve.

    def certify(self, peer_id: PeerId) -> bytes:
        """Return the proof that a peer may serve; empty in a public swarm, where all may."""
        self.check_may_serve()
        return self._serve_identity.sign(self._certified(peer_id)) if self.is_private else b""

    def is_certified(self, peer_id: PeerId, certificate: bytes) -> bool:
        """Return whether a member that may serve let this peer serve."""
        if not self.is_private:
            return not certificate
        return verify_by_key(self.serve_key, self._certified(peer_id), certificate)

    @property
    def certificate_bytes(self) -> int:
        """How long a certificate of this swarm is."""
        return SIGNATURE_BYTES if self.is_private else 0

    def _certified(self, peer_id: PeerId) -> bytes:
        return b"shoal serve 1\0" + self.swarm_id + peer_id.encode()

    @cached_property
    def _serve_identity(self) -> Identity:
        return _make_key(self.serve_secret, "serve")

    # Proof of membership.

    def prove_to(self, fingerprint: str) -> bytes:
        """Return the proof of membership to the holder of this TLS key; worth nothing elsewhere.

        Empty in a public swarm.
        """
        return self._authenticate("stream", fingerprint.encode()) if self.is_private else b""

    def accepts(self, fingerprint: str, proof: bytes) -> bool:
        """Return whether a proof was made for our TLS key by a member. Takes constant time."""
        return not self.is_private or hmac.compare_digest(self.prove_to(fingerprint), proof)

    def answer_greeting(self, nonce: bytes, peer_id: PeerId) -> bytes:
        """Return the answer of a peer about its swarm to this nonce.

        Outsiders learn the id of a public swarm, and of a private one only that it is private.
        """
        proof = self._authenticate("greeting", nonce + peer_id.encode())
        if self.is_private:
            return _IS_PRIVATE + _HIDDEN_ID + proof
        return _IS_PUBLIC + self.swarm_id + proof

    def is_same_swarm(self, answer: bytes, nonce: bytes, peer_id: PeerId) -> bool:
        """Return whether the peer that gave this answer belongs to our swarm."""
        return hmac.compare_digest(self.answer_greeting(nonce, peer_id), answer)

    # Records that only members can read.

    def seal(self, content: bytes, nonce: bytes) -> bytes:
        """Encrypt for members; `nonce` is NONCE_BYTES random ones. In public nothing changes."""
        if not self.is_private:
            return content
        return nonce + self._cipher.encrypt(nonce, content, self.swarm_id)

    def open(self, sealed: bytes) -> bytes:
        """Undo `seal`; raises RemoteProtocolError for what no member sealed."""
        if not self.is_private:
            return sealed
        nonce, encrypted = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, encrypted, self.swarm_id)
        except (InvalidTag, ValueError) as error:
            raise RemoteProtocolError("the record was not sealed by a member") from error

    @cached_property
    def _cipher(self) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(_derive(self.use_secret, "directory", 32))

    # Revoked peers.

    def sign_as_owner(self, message: bytes) -> bytes:
        """Return the owner's signature; UsageError when we are not the owner."""
        if not self.owner_secret:
            raise UsageError(
                "only the owner's code allows this: the one that `shoal swarm-new` made first"
            )
        return _make_key(self.owner_secret, "owner").sign(self.swarm_id + message)

    def is_signed_by_owner(self, message: bytes, signature: bytes) -> bool:
        """Return whether the owner signed; a public swarm has none."""
        return self.is_private and verify_by_key(self.owner_key, self.swarm_id + message, signature)

    def _authenticate(self, purpose: str, message: bytes) -> bytes:
        key = _derive(self.use_secret + self.swarm_id, purpose, 32)
        return hmac.digest(key, message, "sha256")


def make_public(swarm_id: bytes) -> Membership:
    """Return membership in a public swarm."""
    _check_length("the id of a swarm", swarm_id, SWARM_ID_BYTES)
    return Membership(swarm_id)


NO_MEMBERSHIP = Membership(bytes(SWARM_ID_BYTES))
"""The membership of a client that was given no swarm; it treats any swarm as public."""


def begin_public(first_peer: PeerId) -> Membership:
    """Return membership in the public swarm that a peer begins.

    The same one each time, so that codes of it survive a restart of that peer.
    """
    digest = hashlib.sha256(b"shoal public swarm 1\0" + first_peer.encode()).digest()
    return make_public(digest[:SWARM_ID_BYTES])


def make_owner(owner_secret: bytes) -> Membership:
    """Return what the owner of a private swarm knows; a fresh secret is a new swarm.

    >>> make_owner(bytes(16)).as_role(Role.USE).role
    <Role.USE: 'use'>
    """
    _check_length("an owner's secret", owner_secret, SECRET_BYTES)
    serve_secret = _derive(owner_secret, "serve secret", SECRET_BYTES)
    server = make_server(serve_secret, _make_key(owner_secret, "owner").public_key)
    return replace(server, owner_secret=owner_secret)


def make_server(serve_secret: bytes, owner_key: bytes) -> Membership:
    """Return what a member knows that may serve."""
    _check_length("a serve secret", serve_secret, SECRET_BYTES)
    use_secret = _derive(serve_secret, "use secret", SECRET_BYTES)
    user = make_user(use_secret, _make_key(serve_secret, "serve").public_key, owner_key)
    return replace(user, serve_secret=serve_secret)


def make_user(use_secret: bytes, serve_key: bytes, owner_key: bytes) -> Membership:
    """Return what a member knows that may only use the swarm."""
    _check_length("a use secret", use_secret, SECRET_BYTES)
    _check_length("the key of those who serve", serve_key, PUBLIC_KEY_BYTES)
    _check_length("the key of the owner", owner_key, PUBLIC_KEY_BYTES)
    # The id commits to the keys: nobody can pass off others under the same id.
    digest = hashlib.sha256(b"shoal swarm 1\0" + serve_key + owner_key).digest()
    return Membership(digest[:SWARM_ID_BYTES], use_secret, serve_key, owner_key)


def read_public_greeting(answer: bytes, nonce: bytes, peer_id: PeerId) -> Membership | None:
    """Return the public swarm that a peer named, None when its swarm is private.

    Raises RemoteProtocolError for any other answer.
    """
    if len(answer) != _GREETING_BYTES or answer[:1] not in (_IS_PUBLIC, _IS_PRIVATE):
        raise RemoteProtocolError("the answer to the swarm question is malformed")
    if answer.startswith(_IS_PRIVATE):
        return None
    membership = make_public(answer[1 : 1 + SWARM_ID_BYTES])
    if not membership.is_same_swarm(answer, nonce, peer_id):
        raise RemoteProtocolError("the answer contradicts itself")
    return membership


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
    return _LIST_VERSION + owner.sign_as_owner(_LIST_CONTEXT + body) + body


def read_revocations(membership: Membership, record: bytes) -> Revocations:
    """Return the list in a record; RemoteProtocolError, and nothing else, for whatever bytes."""
    num_key_bytes = len(record) - _LIST_HEAD_BYTES - _SEQUENCE_BYTES
    if (
        num_key_bytes < 0
        or num_key_bytes % PUBLIC_KEY_BYTES
        or not record.startswith(_LIST_VERSION)
    ):
        raise RemoteProtocolError("the revocation list is malformed")
    if num_key_bytes > MAX_REVOKED * PUBLIC_KEY_BYTES:
        raise RemoteProtocolError("the revocation list is too long")
    signature, body = record[len(_LIST_VERSION) : _LIST_HEAD_BYTES], record[_LIST_HEAD_BYTES:]
    if not membership.is_signed_by_owner(_LIST_CONTEXT + body, signature):
        raise RemoteProtocolError("the revocation list was not signed by the owner of this swarm")
    keys = body[_SEQUENCE_BYTES:]
    peer_ids = (
        make_peer_id(keys[start : start + PUBLIC_KEY_BYTES])
        for start in range(0, len(keys), PUBLIC_KEY_BYTES)
    )
    return Revocations(int.from_bytes(body[:_SEQUENCE_BYTES], "big"), frozenset(peer_ids))


def _make_key(secret: bytes, purpose: str) -> Identity:
    return Identity(_derive(secret, f"{purpose} key", 32))


def _derive(secret: bytes, purpose: str, num_bytes: int) -> bytes:
    info = f"shoal swarm {purpose}".encode()
    return HKDF(hashes.SHA256(), num_bytes, salt=None, info=info).derive(secret)


def _check_length(name: str, value: bytes, num_bytes: int) -> None:
    if len(value) != num_bytes:
        raise UsageError(f"{name} has {num_bytes} bytes, not {len(value)}")
