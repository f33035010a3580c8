"""Announcements: the typed, bounded, signed and expiring record of a peer about itself.

A record vouches for itself: the peer id inside it contains the key that signed it. Nothing here
knows where records are kept.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, Field, FiniteFloat, TypeAdapter, ValidationError

from .. import limits
from ..endpoints import (
    Endpoint,
    Libp2pEndpoint,
    Relay,
    check_endpoint,
    check_local_endpoint,
)
from ..errors import LocalProtocolError, RemoteProtocolError
from ..identity import SIGNATURE_BYTES, Identity, public_key_of, verify
from ..ids import MODEL_ID_CHARACTERS, AdapterId, ModelId, PeerId
from ..spans import Span
from .coordinates import Coordinate

_Item = TypeVar("_Item")

MAX_ADAPTERS = 16
MAX_RTTS = 16
MAX_RELAYS = 4
MAX_PARKED_AT = 8
MAX_NAME_CHARACTERS = 96
MAX_DEVICE_CHARACTERS = 48
MAX_LOSS = 1e6
_ADAPTER_CHARACTERS = 16
_ENDING_CHARACTERS = 8  # of a peer id: 47 bits

# A record is one byte of version, the signature, and the body: JSON in raw DEFLATE (RFC 1951) with
# a preset dictionary, since thousands of records travel and most of their bytes are names. The
# signed bytes travel as they are, so no canonical form is needed. The context keeps a signature
# from being worth anything elsewhere.
_VERSION = b"\x02"
_CONTEXT = b"shoal announcement 2\0"
_HEADER_BYTES = len(_VERSION) + SIGNATURE_BYTES
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?"
"""A Hub id, or how a folder is called: it is shown in commands that people copy."""

_MAX_COUNT = 2**53 - 1  # the largest whole number that every JSON reader keeps exactly

# Changing a byte of it changes the format: records of old and new peers are not the same
# then. What is frequent stands at the end, where references to it are short.
_DICTIONARY = (
    b'"state":"joining","state":"draining","state":"offline","weights":"bf16","weights":"nf4",'
    b'"weights":"fp32","compute_dtype":"bf16","compute_dtype":"fp16","adapters":["relays":[{"host":"'
    b'","port":31337,"peer_id":"12D3KooW"}],"parked_at":["192.168.10.127.0.0.1:'
    b'"kernels":"native int8 with avx512_vnni, torch attention, cuda triton"'
    b'{"peer_id":"12D3KooW","model_id":"","num_blocks":32,"span":{"start":0,"stop":16},'
    b'"state":"online","endpoints":[{"host":"1","port":4,"fingerprint":""}],"min_version":3,'
    b'"max_version":4,"weights":"int8","compute_dtype":"fp32","sequence":179,"issued_at":179,'
    b'"expires_at":179,"free_kv_tokens":1,"decode_steps_per_second":1,"prefill_tokens_per_second":1'
    b',"loaded_decode_steps_per_second":1,"queue_seconds":0.0,"rtts":[["12D3KooW",0.0],["12D3KooW"'
    b',0.0]],"coordinate":{"x":0.0,"y":-0.0,"z":0.0,"height":0.0,"error":0.1},"software":"shoal '
    b'0.1.0","kernels":"","relay_port":'
)
_RAW = -zlib.MAX_WBITS
_LEVEL = 9


class PeerState(StrEnum):
    """The state of a peer. Only ONLINE peers take new sessions."""

    JOINING = "joining"
    ONLINE = "online"
    DRAINING = "draining"
    OFFLINE = "offline"


def _check_peer_id(peer_id: PeerId) -> PeerId:
    try:
        public_key_of(peer_id)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from error  # what pydantic collects
    return peer_id


def _check_text(text: str) -> str:
    if not text.isprintable():  # control characters, and those that turn the line around
        raise ValueError("only characters that can be printed are allowed")
    return text


def _check_relay(relay: Relay) -> Relay:
    check_endpoint(Endpoint(relay.host, relay.port))
    _check_peer_id(relay.peer_id)
    return relay


_PeerId = Annotated[PeerId, AfterValidator(_check_peer_id)]
_ModelId = Annotated[ModelId, Field(pattern=rf"^[0-9a-f]{{{MODEL_ID_CHARACTERS}}}$")]
_Endpoint = Annotated[Endpoint, AfterValidator(check_endpoint)]
_LocalEndpoint = Annotated[Endpoint, AfterValidator(check_local_endpoint)]
_Ending = Annotated[str, Field(pattern=rf"^[1-9A-HJ-NP-Za-km-z]{{{_ENDING_CHARACTERS}}}$")]
_Relay = Annotated[Relay, AfterValidator(_check_relay)]
_ModelName = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS, pattern=rf"^({_NAME})?$")]
_PeerName = Annotated[
    str, Field(max_length=limits.MAX_PEER_NAME_CHARACTERS), AfterValidator(_check_text)
]
_DeviceName = Annotated[str, Field(max_length=MAX_DEVICE_CHARACTERS), AfterValidator(_check_text)]
_Words = Annotated[str, Field(max_length=64), AfterValidator(_check_text)]
_AdapterHash = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{_ADAPTER_CHARACTERS}}}$")]
_Version = Annotated[int, Field(ge=0, lt=2**16)]
_Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
_Amount = Annotated[FiniteFloat, Field(ge=0, le=1e12)]
_Loss = Annotated[FiniteFloat, Field(ge=0, le=MAX_LOSS)]

WeightsFormat = Literal["int8", "bf16", "fp32", "nf4"]
ComputeDtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training run has come, as one of its peers knows it."""

    update: _Count
    """Updates that are applied at the peer."""
    num_updates: _Count
    """Updates of the whole run."""
    loss: _Loss
    """Mean loss of the last update, in nats per token; 0 before the first one."""
    held_out_loss: _Loss | None = None
    """Loss on the held-out text, where it was measured last; None: it was not yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """One peer's statement about one model, true to the best of its knowledge when issued.

    The annotations are the schema that `read_announcement` enforces on strangers; a local
    mistake is found by `sign_announcement`. Speeds are rows or tokens through the whole span.
    """

    peer_id: _PeerId
    model_id: _ModelId
    num_blocks: Annotated[int, Field(ge=1, le=limits.MAX_BLOCKS)]
    """Blocks of the whole model, not of the span."""
    span: Span
    state: PeerState
    endpoints: Annotated[tuple[_Endpoint, ...], Field(max_length=limits.MAX_ENDPOINTS)]
    """Endpoints to dial, best first."""
    min_version: _Version
    """Lowest protocol version that the peer speaks."""
    max_version: _Version
    """Highest protocol version that the peer speaks."""
    weights: WeightsFormat
    """How the peer keeps its weights."""
    compute_dtype: ComputeDtype
    """The dtype of the peer's activations."""
    sequence: _Count
    """Grows with every announcement of a peer, also across restarts: start at wall milliseconds."""
    issued_at: _Amount
    """Wall seconds of the issuer."""
    expires_at: _Amount
    """Wall seconds; must grow with the sequence, or a replicated directory keeps the older one."""
    adapters: Annotated[tuple[_AdapterHash, ...], Field(max_length=MAX_ADAPTERS)] = ()
    """How the digests of published adapters begin that the peer holds for others, newest last; as
    many as fit."""
    free_kv_tokens: _Count = 0
    """Tokens of one row that the KV cache could take now."""
    decode_steps_per_second: _Amount | None = None
    """Measured with one session alone; None when not measured yet."""
    prefill_tokens_per_second: _Amount | None = None
    """Measured with one session alone; None when not measured yet."""
    loaded_decode_steps_per_second: _Amount | None = None
    """Decode steps per second of one session under present load; None when not measured yet."""
    queue_seconds: _Amount = 0.0
    """Seconds that a step waits at present before it is computed."""
    takes_passes: bool = True
    """Whether it has memory for fine-tuning passes."""
    pass_queue_seconds: _Amount = 0.0
    """Seconds that a fine-tuning pass waits at present."""
    rtts: Annotated[tuple[tuple[_PeerId, _Amount], ...], Field(max_length=MAX_RTTS)] = ()
    """Measured round-trip times in seconds to likely neighbours."""
    coordinate: Coordinate | None = None
    """The network coordinate of the peer; None while it has measured nothing."""
    software: _Words = ""
    """Name and version of the software, for people to read."""
    kernels: _Words = ""
    """The kernels that the peer found fastest, for people to read."""
    relays: Annotated[tuple[_Relay, ...], Field(max_length=MAX_RELAYS)] = ()
    """Relays that carry streams to a peer that cannot be dialled, best first."""
    relay_port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Port of libp2p at its endpoints, where the peer is a relay of others; 0: it is none."""
    parked_at: Annotated[tuple[_Ending, ...], Field(max_length=MAX_PARKED_AT)] = ()
    """How the ids of the peers end that hold connections which this one has opened, to push over
    them: it cannot be dialled. A whole id is no use; who finds another with the same end gains
    nothing by it."""
    model_name: _ModelName = ""
    """What the peer's owner calls the model, for people to read: a Hub id, or the last part of a
    path. Anybody can say anything; what counts is the model id."""
    directory_port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Port of libp2p at its endpoints, where others can join through the peer; 0: none."""
    local_endpoints: Annotated[
        tuple[_LocalEndpoint, ...], Field(max_length=limits.MAX_LOCAL_ENDPOINTS)
    ] = ()
    """Where those in its own network dial a peer that others cannot dial."""
    name: _PeerName = ""
    """What the peer's owner calls it, for people to read. Anybody can say anything."""
    device: _DeviceName = ""
    """What computes, for people to read."""
    num_sessions: _Count = 0
    """Sessions that it holds."""
    block_bytes: _Count = 0
    """Memory that the largest block of the model takes in the peer's format; 0: unknown."""
    training: TrainingProgress | None = None
    """How far the training run has come whose stage the peer holds; None: it does not train."""

    def __post_init__(self) -> None:
        if self.span.stop > self.num_blocks:
            raise ValueError(f"span {self.span} is beyond the {self.num_blocks} blocks")
        if self.min_version > self.max_version:
            raise ValueError(f"the version range {self.min_version}..{self.max_version} is empty")
        lifetime_seconds = self.expires_at - self.issued_at
        if not 0 < lifetime_seconds <= limits.MAX_ANNOUNCEMENT_LIFETIME_SECONDS:
            raise ValueError(f"a lifetime of {lifetime_seconds:.1f} seconds is not allowed")

    def is_parked_at(self, peer_id: PeerId) -> bool:
        """Return whether another peer can push here over a connection that this one has opened."""
        return shorten(peer_id) in self.parked_at

    @property
    def all_endpoints(self) -> tuple[Endpoint, ...]:
        """Every way to dial the peer, best first: its own endpoints, then those behind relays."""
        behind = (Libp2pEndpoint.behind(relay, self.peer_id) for relay in self.relays)
        return (*self.endpoints, *behind)

    @property
    def marks(self) -> tuple[str, str]:
        """Which machine answers, by its TLS key and its first address; the peer id for none.

        Anybody can announce those of another peer: see `draw_by_address`.
        """
        endpoints = (*self.endpoints, *self.local_endpoints)
        keys = (endpoint.fingerprint for endpoint in endpoints if endpoint.fingerprint)
        first = f"{self.endpoints[0].host} {self.endpoints[0].port}" if self.endpoints else ""
        return next(keys, self.peer_id), first or self.peer_id

    @property
    def as_relays(self) -> tuple[Relay, ...]:
        """The peer as a relay of others, at each of its hosts, best first; none when it is none."""
        return self._locate(self.relay_port)

    @property
    def as_nodes(self) -> tuple[Relay, ...]:
        """Where others can join through the peer, best first; none where they cannot."""
        return self._locate(self.directory_port or self.relay_port)

    def _locate(self, port: int) -> tuple[Relay, ...]:
        hosts = dict.fromkeys(endpoint.host for endpoint in self.endpoints) if port else {}
        return tuple(Relay(host, port, self.peer_id) for host in hosts)


class KnownRecord(NamedTuple):
    """An announcement, and the bytes in which other members of the swarm take it."""

    announcement: Announcement
    value: bytes
    digest: bytes
    """The short name that questions give it, see `digest_record`."""


def is_model_name(text: str) -> bool:
    """Return whether a model can be announced under a name.

    >>> is_model_name("org/model"), is_model_name("story"), is_model_name("$(rm -r ~)")
    (True, True, False)
    """
    return len(text) <= MAX_NAME_CHARACTERS and re.fullmatch(_NAME, text) is not None


def shorten(peer_id: PeerId) -> str:
    """Return how a peer id ends: enough to find it among those that are known."""
    return peer_id[-_ENDING_CHARACTERS:]


def shorten_adapter(name: AdapterId) -> str:
    """Return how the digest of an adapter begins: enough to find who holds it.

    >>> shorten_adapter(AdapterId(b"published adapter, digest of 32 "))
    '7075626c69736865'
    """
    return name.hex()[:_ADAPTER_CHARACTERS]


_SCHEMA = TypeAdapter(Announcement)


def sign_announcement(identity: Identity, announcement: Announcement) -> bytes:
    """Return the signed record of an announcement, ready for a directory.

    Raises LocalProtocolError when it speaks for someone else, breaks the schema or is larger
    than `limits.MAX_ANNOUNCEMENT_BYTES`.
    """
    if announcement.peer_id != identity.peer_id:
        raise LocalProtocolError(f"{identity.peer_id} cannot speak for {announcement.peer_id}")
    # A value of the wrong type is no reason to warn: reading it back below decides.
    body = pack(_SCHEMA.dump_json(announcement, exclude_defaults=True, warnings=False))
    record = _VERSION + identity.sign(_CONTEXT + body) + body
    try:
        survived = verify_announcement(record)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"this announcement cannot be published: {error}") from error
    if survived != announcement:
        raise LocalProtocolError("this announcement has values that JSON cannot carry")
    return record


@lru_cache(maxsize=32)
def verify_announcement(record: bytes) -> Announcement:
    """Return the announcement in a record, checked in everything that does not depend on time.

    Raises RemoteProtocolError, and nothing else, for whatever bytes. The last records that were
    valid are remembered: a peer reads its own when it signs and when it announces it, and peers and
    clients of one process read the same ones.
    """
    if len(record) > limits.MAX_ANNOUNCEMENT_BYTES:
        raise RemoteProtocolError(f"an announcement of {len(record)} bytes is too large")
    if len(record) <= _HEADER_BYTES:
        raise RemoteProtocolError("the announcement is cut short")
    if not record.startswith(_VERSION):
        raise RemoteProtocolError(f"announcements of version {record[0]} are unknown")
    signature, body = record[len(_VERSION) : _HEADER_BYTES], record[_HEADER_BYTES:]
    text = unpack(body, limits.MAX_ANNOUNCEMENT_TEXT_BYTES)
    try:
        announcement = _SCHEMA.validate_json(text, strict=True)
    except ValidationError as error:
        raise RemoteProtocolError(f"the announcement is malformed: {_reason(error)}") from error
    if not verify(announcement.peer_id, _CONTEXT + body, signature):
        raise RemoteProtocolError("the announcement was not signed by the peer that it names")
    return announcement


def check_is_current(announcement: Announcement, now: float) -> None:
    """Raise RemoteProtocolError unless the announcement holds at `now`, in wall seconds."""
    if announcement.expires_at <= now:
        raise RemoteProtocolError(
            f"the announcement expired {now - announcement.expires_at:.1f} seconds ago"
        )
    if announcement.issued_at > now + limits.MAX_CLOCK_SKEW_SECONDS:
        raise RemoteProtocolError(
            f"the announcement is dated {announcement.issued_at - now:.1f} seconds in the future"
        )


def read_announcement(record: bytes, now: float) -> Announcement:
    """Return the announcement in a record, if it is genuine, well formed and holds at `now`.

    Raises RemoteProtocolError with the reason, and nothing else, for whatever bytes. Fields that
    are not known are ignored, so that we understand those who know more.
    """
    announcement = verify_announcement(record)
    check_is_current(announcement, now)
    return announcement


def _reason(error: ValidationError) -> str:
    """Return the first complaint in one short line, without what the stranger sent."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:64]
    return f"{where}: {first['msg'][:160]}" if where else first["msg"][:160]


def pack(text: bytes) -> bytes:
    """Return the JSON of an announcement in fewer bytes.

    >>> text = b'{"peer_id":"12D3KooW","state":"online","weights":"int8"}'
    >>> len(pack(text)) < len(text) / 2
    True
    """
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, zdict=_DICTIONARY)
    return packer.compress(text) + packer.flush()


def unpack(packed: bytes, max_bytes: int) -> bytes:
    """Return the text again; raises RemoteProtocolError for anything else, and for longer ones."""
    unpacker = zlib.decompressobj(_RAW, zdict=_DICTIONARY)
    try:
        text = unpacker.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise RemoteProtocolError(f"the packed text is damaged: {error}") from error
    if len(text) > max_bytes or not unpacker.eof or unpacker.unused_data:
        raise RemoteProtocolError(f"the packed text is cut short, or longer than {max_bytes} bytes")
    return text


def draw_by_address(peers: Iterable[Announcement], rng: random.Random) -> Iterator[Announcement]:
    """Yield peers in any order, one of each TLS key, and of these one of each address.

    So made-up announcements that name another peer have it dialled no more often than any other.
    Those with its key may give its address in many ways, as names for instance; at its address,
    those with other keys only fail, which `DialRules` bounds.
    """
    for number in range(2):
        groups = defaultdict[str, list[Announcement]](list)
        for peer in peers:
            groups[peer.marks[number]].append(peer)
        peers = [group[0] if len(group) == 1 else rng.choice(group) for group in groups.values()]
    yield from draw(list(peers), rng)


def draw(items: list[_Item], rng: random.Random) -> Iterator[_Item]:
    """Yield items in any order, which mixes up the list; few of many cost little."""
    for num_left in range(len(items), 0, -1):
        index = int(rng.random() * num_left)
        items[index], items[num_left - 1] = items[num_left - 1], items[index]
        yield items[num_left - 1]
