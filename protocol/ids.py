"""The identifiers that peers exchange, each a type of its own so that none passes for another."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import NewType

PeerId = NewType("PeerId", str)
"""Base58 multihash of a peer's Ed25519 public key, as libp2p spells it (`12D3KooW…`)."""

MemberId = NewType("MemberId", str)
"""One process in a training run: a peer id, and what tells the process from the ones that the peer
ran before and will run. None ever has the id of another."""

ModelId = NewType("ModelId", str)
"""Hex digest of a model's configuration and revision, 32 characters."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes drawn by the client; knowing them is the right to step the session."""

PassId = NewType("PassId", SessionId)
"""The id of one pass at one peer, which can be refused like a session: 16 random bytes."""

UploadId = NewType("UploadId", SessionId)
"""The id of one upload of an adapter to one peer: 16 random bytes."""

AdapterId = NewType("AdapterId", bytes)
"""Digest of both files of an adapter, 32 bytes, or none."""

ClientToken = NewType("ClientToken", bytes)
"""The name of a client at one peer, so that its sessions can be counted together: 16 bytes,
or none. No proof of anything: knowing it is being it, so each peer is told another one."""

RunId = NewType("RunId", str)
"""The SHA-256 of the record of a training run, which its owner has signed: 64 hexadecimal
digits."""

Capability = NewType("Capability", bytes)
"""The right to push steps into one session: 16 random bytes that the client gives to the peer
before it on the route, or none."""

JOIN_CODE_PREFIX = "shoal:"
"""How a join code begins; no address does."""

NO_CAPABILITY = Capability(b"")
"""Of a session that takes steps from its client only."""

NO_CLIENT = ClientToken(b"")
"""Of a client that has no name."""

NO_ADAPTER = AdapterId(b"")
"""Of rows that no adapter changes."""

SESSION_ID_BYTES = 16
NO_SESSION = SessionId(bytes(SESSION_ID_BYTES))
"""Of a message that speaks of no session."""

CLIENT_TOKEN_BYTES = 16
ADAPTER_ID_BYTES = 32
CAPABILITY_BYTES = 16
OFFER_NONCE_BYTES = 32
MODEL_ID_CHARACTERS = 32

NO_MODEL = ModelId("0" * MODEL_ID_CHARACTERS)
"""In place of a model in a question about the whole swarm: which models it serves, and who is
revoked."""

# Fields that a loader or a save call adds and that do not change what the weights mean.
_VOLATILE_CONFIG_FIELDS = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)


def find_peer_id(member: MemberId) -> PeerId:
    """Return the peer of which a member of a run is one process."""
    return PeerId(member.partition("/")[0])


def parse_adapter_id(text: str) -> AdapterId | None:
    """Return the adapter of a digest, however it was copied; None if the text is no digest.

    >>> parse_adapter_id(f" {'AB' * 32}\\n") == bytes.fromhex("ab" * 32)
    True
    """
    digits = text.strip().lower()
    is_digest = re.fullmatch(f"[0-9a-f]{{{2 * ADAPTER_ID_BYTES}}}", digits) is not None
    return AdapterId(bytes.fromhex(digits)) if is_digest else None


def make_client_token(secret: bytes, peer_id: PeerId) -> ClientToken:
    """Return a client's name at one peer; peers that compare theirs learn nothing.

    >>> len(make_client_token(b"secret", PeerId("12D3KooW"))) == CLIENT_TOKEN_BYTES
    True
    """
    digest = hashlib.blake2b(peer_id.encode(), key=secret, digest_size=CLIENT_TOKEN_BYTES)
    return ClientToken(digest.digest())


def make_adapter_id(config: bytes, tensors: bytes) -> AdapterId:
    """Return the name of an adapter with this `adapter_config.json` and these safetensors.

    >>> len(make_adapter_id(b"{}", b"")) == ADAPTER_ID_BYTES
    True
    """
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    digest.update(tensors)
    return AdapterId(digest.digest())


def make_model_id(config: Mapping[str, object], revision: str) -> ModelId:
    """Return the id of the model with this `config.json` content and revision.

    The revision is a commit of the Hub or a fingerprint of local weight files: two checkpoints
    with one configuration and different weights get different ids.

    >>> a = make_model_id({"hidden_size": 8, "use_cache": True}, "r1")
    >>> a == make_model_id({"hidden_size": 8}, "r1"), a == make_model_id({"hidden_size": 8}, "r2")
    (True, False)
    """
    stable = {key: config[key] for key in sorted(config) if key not in _VOLATILE_CONFIG_FIELDS}
    text = json.dumps([stable, revision], sort_keys=True, separators=(",", ":"))
    return ModelId(hashlib.sha256(text.encode()).hexdigest()[:MODEL_ID_CHARACTERS])
