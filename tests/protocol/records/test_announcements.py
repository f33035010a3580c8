"""Signed records: what survives the trip, and everything that must not be believed."""

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from shoal.peer.announcing.round_trip_times import MAX_ANNOUNCED_RTTS
from shoal.protocol import limits
from shoal.protocol.endpoints import Endpoint, Libp2pEndpoint, Relay
from shoal.protocol.errors import LocalProtocolError, RemoteProtocolError
from shoal.protocol.identity import Identity
from shoal.protocol.records.announcements import (
    MAX_ADAPTERS,
    MAX_RELAYS,
    MAX_RTTS,
    Announcement,
    PeerState,
    pack,
    read_announcement,
    sign_announcement,
    unpack,
)
from shoal.protocol.records.coordinates import Coordinate
from shoal.protocol.spans import Span

Announce = Callable[..., Announcement]
IdentityOf = Callable[[int], Identity]
HEADER_BYTES = 65
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
CONTEXT = b"shoal announcement 2\0"


def sign_body(identity: Identity, body: bytes) -> bytes:
    """Sign whatever a dishonest peer may want to say."""
    packed = pack(body)
    return b"\x02" + identity.sign(CONTEXT + packed) + packed


def read_body(record: bytes) -> Any:
    return json.loads(unpack(record[HEADER_BYTES:], limits.MAX_ANNOUNCEMENT_TEXT_BYTES))


def make_full(announce: Announce, identity_of: IdentityOf) -> Announcement:
    return announce(
        endpoints=(Endpoint("peer-1.example.org", 1, "0" * 64), Endpoint("2001:db8::1", 65535)),
        weights="nf4",
        compute_dtype="fp32",
        state=PeerState.DRAINING,
        sequence=2**53 - 1,
        adapters=("0123456789abcdef",),
        free_kv_tokens=12_345,
        decode_steps_per_second=17.25,
        prefill_tokens_per_second=1e-9,
        loaded_decode_steps_per_second=0.1,
        queue_seconds=0.25,
        rtts=((identity_of(2).peer_id, 0.012345678901234567),),
        coordinate=Coordinate(0.1, -0.2, 0.0, 0.003, 0.25),
        software="shoal 0.1",
        relays=(Relay("192.0.2.7", 4001, identity_of(2).peer_id),),
    )


def test_record_carries_every_field_exactly(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    full = make_full(announce, identity_of)

    record = sign_announcement(identity_of(1), full)

    assert read_announcement(record, now) == full


def test_unknown_fields_of_newer_writers_are_ignored(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    plain = announce()
    body = read_body(sign_announcement(identity_of(1), plain))
    body |= {"colour": "green", "nested": {"deep": [1, 2]}}
    body["span"]["step"] = 2
    body["endpoints"][0]["protocol"] = "quic"

    record = sign_body(identity_of(1), json.dumps(body).encode())

    assert read_announcement(record, now) == plain


def test_nobody_speaks_for_another_peer(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    packed = sign_announcement(identity_of(1), announce(1))[HEADER_BYTES:]
    body = unpack(packed, limits.MAX_ANNOUNCEMENT_TEXT_BYTES)

    with pytest.raises(RemoteProtocolError, match="not signed by the peer"):
        read_announcement(sign_body(identity_of(2), body), now)
    with pytest.raises(LocalProtocolError, match="cannot speak for"):
        sign_announcement(identity_of(2), announce(1))


def test_signature_made_for_another_purpose_is_refused(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    body = sign_announcement(identity_of(1), announce())[HEADER_BYTES:]

    with pytest.raises(RemoteProtocolError, match="not signed"):
        read_announcement(b"\x02" + identity_of(1).sign(body) + body, now)


def test_announcement_holds_from_issue_to_expiry(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    record = sign_announcement(identity_of(1), announce(expires_at=now + 90))

    read_announcement(record, now - limits.MAX_CLOCK_SKEW_SECONDS)
    read_announcement(record, now + 89.9)
    with pytest.raises(RemoteProtocolError, match="in the future"):
        read_announcement(record, now - limits.MAX_CLOCK_SKEW_SECONDS - 0.1)
    with pytest.raises(RemoteProtocolError, match="expired"):
        read_announcement(record, now + 90)


NOT_A_NUMBER = float("nan")
BAD_FIELDS = [
    ("peer_id", "12D3KooW"),
    ("peer_id", None),
    ("model_id", "A" * 32),
    ("model_id", "a" * 32 + "\n"),
    ("num_blocks", 0),
    ("num_blocks", limits.MAX_BLOCKS + 1),
    ("num_blocks", True),
    ("num_blocks", "8"),
    ("num_blocks", 8.0),
    ("num_blocks", 10**40),
    ("span", {"start": 4, "stop": 4}),
    ("span", {"start": -1, "stop": 4}),
    ("span", {"start": 0, "stop": 9}),
    ("span", {"start": 0.0, "stop": 4}),
    ("span", {"start": 0}),
    ("span", [0, 4]),
    ("state", "asleep"),
    ("state", 1),
    ("endpoints", "127.0.0.1:80"),
    ("endpoints", [{"host": "127.0.0.1", "port": 80}] * (limits.MAX_ENDPOINTS + 1)),
    ("endpoints", [{"host": "", "port": 80}]),
    ("endpoints", [{"host": "a" * 254, "port": 80}]),
    ("endpoints", [{"host": "a b", "port": 80}]),
    ("endpoints", [{"host": "a\n", "port": 80}]),
    ("endpoints", [{"host": "a", "port": 0}]),
    ("endpoints", [{"host": "a", "port": 65536}]),
    ("endpoints", [{"host": "a", "port": "80"}]),
    ("endpoints", [{"host": "a", "port": 80, "fingerprint": "C" * 64}]),
    ("endpoints", [{"host": "a", "port": 80, "fingerprint": "c" * 63}]),
    ("min_version", 3),
    ("min_version", -1),
    ("max_version", 65536),
    ("weights", "int7"),
    ("weights", ["int8"]),
    ("compute_dtype", "float32"),
    ("sequence", -1),
    ("sequence", 2**53),
    ("issued_at", NOT_A_NUMBER),
    ("expires_at", float("inf")),
    ("expires_at", -1),
    ("expires_at", "soon"),
    ("adapters", ["0123456789abcdef"] * (MAX_ADAPTERS + 1)),
    ("adapters", ["../../etc"]),
    ("free_kv_tokens", -1),
    ("free_kv_tokens", 1.5),
    ("decode_steps_per_second", -0.1),
    ("decode_steps_per_second", NOT_A_NUMBER),
    ("prefill_tokens_per_second", float("inf")),
    ("loaded_decode_steps_per_second", "fast"),
    ("queue_seconds", None),
    ("rtts", [["nobody", 0.1]]),
    ("rtts", [[0.1]]),
    ("rtts", {}),
    ("rtts", [[Identity(bytes(32)).peer_id, NOT_A_NUMBER]]),
    ("rtts", [[Identity(bytes(32)).peer_id, -0.1]]),
    ("coordinate", {"x": NOT_A_NUMBER}),
    ("coordinate", {"y": float("inf")}),
    ("coordinate", {"z": -1e300}),
    ("coordinate", {"height": -0.001}),
    ("coordinate", {"error": 1.5}),
    ("coordinate", [0.0, 0.0, 0.0]),
    ("relays", [{"host": "192.0.2.7", "port": 4001, "peer_id": "nobody"}]),
    ("relays", [{"host": "192.0.2.7", "port": 4001}]),
    ("relays", [{"host": "a/p2p/b", "port": 4001, "peer_id": Identity(bytes(32)).peer_id}]),
    ("relays", [{"host": "192.0.2.7", "port": 0, "peer_id": Identity(bytes(32)).peer_id}]),
    (
        "relays",
        [{"host": "a", "port": 1, "peer_id": Identity(bytes(32)).peer_id}] * (MAX_RELAYS + 1),
    ),
    ("software", "x" * 65),
    ("software", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_bad_field_is_refused_although_well_signed(
    announce: Announce, identity_of: IdentityOf, now: float, field: str, value: Any
) -> None:
    body = read_body(sign_announcement(identity_of(1), announce()))
    body[field] = value

    with pytest.raises(RemoteProtocolError) as caught:
        read_announcement(sign_body(identity_of(1), json.dumps(body).encode()), now)

    assert len(str(caught.value)) < limits.MAX_TEXT_CHARACTERS


def test_peer_is_dialled_itself_first_and_then_through_its_relays(
    announce: Announce, identity_of: IdentityOf
) -> None:
    own = Endpoint("192.0.2.1", 7000, "0" * 64)
    relay = Relay("192.0.2.7", 4001, identity_of(2).peer_id)

    found = announce(endpoints=(own,), relays=(relay,)).all_endpoints

    assert found[0] == own
    assert found[1] == Libp2pEndpoint(
        "192.0.2.7", 4001, peer_id=identity_of(1).peer_id, relay_id=identity_of(2).peer_id
    )


def test_reader_that_knows_no_relays_reads_the_rest(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    """Relays are no kind of endpoint: who does not know them would refuse the whole record."""
    record = sign_announcement(identity_of(1), make_full(announce, identity_of))

    body = read_body(record)

    assert {key for endpoint in body["endpoints"] for key in endpoint} == {
        "host",
        "port",
        "fingerprint",
    }
    assert len(body["relays"]) == 1


def test_too_many_rtts_are_refused(announce: Announce, identity_of: IdentityOf, now: float) -> None:
    body = read_body(sign_announcement(identity_of(1), announce()))
    body["rtts"] = [[identity_of(2).peer_id, 0.1]] * (MAX_RTTS + 1)

    with pytest.raises(RemoteProtocolError, match="rtts"):
        read_announcement(sign_body(identity_of(1), json.dumps(body).encode()), now)


@pytest.mark.parametrize("field", ["peer_id", "span", "state", "weights", "expires_at"])
def test_missing_field_is_named(
    announce: Announce, identity_of: IdentityOf, now: float, field: str
) -> None:
    body = read_body(sign_announcement(identity_of(1), announce()))
    del body[field]

    with pytest.raises(RemoteProtocolError, match=field):
        read_announcement(sign_body(identity_of(1), json.dumps(body).encode()), now)


@pytest.mark.parametrize("lifetime_seconds", [0, -1, limits.MAX_ANNOUNCEMENT_LIFETIME_SECONDS + 1])
def test_lifetime_is_bounded(
    announce: Announce, identity_of: IdentityOf, now: float, lifetime_seconds: float
) -> None:
    body = read_body(sign_announcement(identity_of(1), announce()))
    body["expires_at"] = now + lifetime_seconds

    with pytest.raises(RemoteProtocolError, match="lifetime"):
        read_announcement(sign_body(identity_of(1), json.dumps(body).encode()), now)
    with pytest.raises(ValueError, match="lifetime"):
        announce(expires_at=now + lifetime_seconds)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b"[" * 3000,
        b'{"a":' * 700,
        b"\xff\xfe",
        b'{"peer_id": "\\ud800"}',
        b"9" * 3000,
        b'"' + b"x" * 3000,
        b"NaN",
    ],
)
def test_signed_nonsense_is_refused(identity_of: IdentityOf, now: float, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_announcement(sign_body(identity_of(1), body), now)


def test_size_is_checked_before_anything_else(now: float) -> None:
    with pytest.raises(RemoteProtocolError, match="too large"):
        read_announcement(bytes(limits.MAX_ANNOUNCEMENT_BYTES + 1), now)


def test_unknown_version_is_refused(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    record = sign_announcement(identity_of(1), announce())

    with pytest.raises(RemoteProtocolError, match="version 1"):
        read_announcement(b"\x01" + record[1:], now)


@pytest.mark.parametrize(
    "changes",
    [
        {"queue_seconds": NOT_A_NUMBER},
        {"decode_steps_per_second": float("inf")},
        {"free_kv_tokens": -1},
        {"weights": "int7"},
        {"sequence": "1"},
        {"endpoints": (Endpoint("a" * 250, 80, "c" * 64),) * (limits.MAX_ENDPOINTS + 1)},
        {"software": "x" * 65},
    ],
)
def test_our_own_mistake_is_found_before_it_is_published(
    announce: Announce, identity_of: IdentityOf, changes: dict[str, Any]
) -> None:
    with pytest.raises(LocalProtocolError):
        sign_announcement(identity_of(1), announce(**changes))


def test_our_own_announcement_beyond_the_limit_is_found(
    announce: Announce, identity_of: IdentityOf
) -> None:
    huge = announce(
        endpoints=tuple(
            Endpoint("".join(random.Random(n).choices(LETTERS, k=250)), 80, "c" * 64)
            for n in range(limits.MAX_ENDPOINTS)
        ),
        rtts=tuple((identity_of(n).peer_id, 0.1) for n in range(MAX_RTTS)),
    )

    with pytest.raises(LocalProtocolError, match="too large"):
        sign_announcement(identity_of(1), huge)


def test_inconsistent_announcement_cannot_be_made(announce: Announce) -> None:
    with pytest.raises(ValueError, match="beyond"):
        announce(span=Span(4, 9))
    with pytest.raises(ValueError, match="version"):
        announce(min_version=3)


def test_mutated_records_are_only_ever_refused(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    seed = 20260108
    print(f"seed {seed}")
    generator = random.Random(seed)
    record = sign_announcement(identity_of(1), make_full(announce, identity_of))
    assert read_announcement(record, now)

    for _ in range(1000):
        with pytest.raises(RemoteProtocolError):
            read_announcement(mutate(record, generator), now)
        # The same behind a good signature: it may be valid, but nothing else may come out.
        resigned = sign_body(identity_of(1), mutate(record[HEADER_BYTES:], generator))
        with contextlib.suppress(RemoteProtocolError):
            read_announcement(resigned, now)


def mutate(data: bytes, generator: random.Random) -> bytes:
    """Return other bytes: flipped, cut, doubled, or with JSON's own words put in."""
    words = [b"null", b"-1", b"NaN", b"1e999", b"[", b"}", b'"', b"\\ud800", b"\0", b"true"]
    mutated = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        start = generator.randrange(len(mutated))
        stop = min(len(mutated), start + generator.randint(0, 12))
        new = [
            bytes([generator.randrange(256)]),
            generator.choice(words),
            bytes(mutated[start:stop]) * 2,
            b"",
        ][generator.randrange(4)]
        mutated[start:stop] = new
        if not mutated:
            break
    return bytes(mutated) if bytes(mutated) != data else data + b"\0"


def test_thousand_announcements_are_no_more_than_a_megabyte(
    announce: Announce, identity_of: IdentityOf
) -> None:
    """With all that a peer says of itself and its neighbours; a client reads them all."""
    usual = announce(
        num_blocks=126,
        span=Span(101, 126),
        endpoints=(Endpoint("203.0.113.177", 40404, "f" * 64),),
        sequence=1_800_000_000_000,
        issued_at=1_800_000_000.123,
        expires_at=1_800_000_090.123,
        free_kv_tokens=123_456,
        decode_steps_per_second=12.35,
        prefill_tokens_per_second=1235.0,
        queue_seconds=0.01235,
        rtts=((identity_of(2).peer_id, 0.1235),) * MAX_ANNOUNCED_RTTS,
        coordinate=Coordinate(-0.1235, -0.1235, -0.1235, 0.0123, 0.12),
        software="shoal 0.1.0",
        kernels="int8 avx512-vnni, attention avx512",
    )

    assert len(sign_announcement(identity_of(1), usual)) <= 1000
