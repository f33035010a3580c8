"""Signed records: what survives the trip, and everything that must not be believed."""

import contextlib
import json
import random
from typing import Any

import pytest
from announcements import NOW, identity_of, make_announcement, sign

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
    TrainingProgress,
    draw_by_address,
    pack,
    read_announcement,
    sign_announcement,
    unpack,
    verify_announcement,
)
from shoal.protocol.records.coordinates import Coordinate
from shoal.protocol.spans import Span

HEADER_BYTES = 65
NOT_A_NUMBER = float("nan")
SOMEBODY = identity_of(2).peer_id
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
CONTEXT = b"shoal announcement 2\0"


def sign_body(identity: Identity, body: bytes) -> bytes:
    """Sign whatever a dishonest peer may want to say."""
    packed = pack(body)
    return b"\x02" + identity.sign(CONTEXT + packed) + packed


def read_body(record: bytes) -> Any:
    return json.loads(unpack(record[HEADER_BYTES:], limits.MAX_ANNOUNCEMENT_TEXT_BYTES))


def resign(**changes: Any) -> bytes:
    """Return a record with other values in some fields, well signed."""
    body = read_body(sign(make_announcement())) | changes
    return sign_body(identity_of(1), json.dumps(body).encode())


def make_full() -> Announcement:
    return make_announcement(
        endpoints=(
            Endpoint("peer-1.example.org", 1, "0" * 64),
            Endpoint("2001:db8::1", 65535, "0" * 64),
        ),
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
        rtts=((SOMEBODY, 0.012345678901234567),),
        coordinate=Coordinate(0.1, -0.2, 0.0, 0.003, 0.25),
        software="shoal 0.1",
        relays=(Relay("192.0.2.7", 4001, SOMEBODY),),
        local_endpoints=(Endpoint("192.168.1.7", 4002, "0" * 64),),
        name="Küche, links",
        device="cpu 8 threads",
        num_sessions=3,
        block_bytes=218_112_000,
        training=TrainingProgress(12, 400, 4.0625, 4.125),
    )


def test_record_carries_every_field_exactly() -> None:
    full = make_full()

    record = sign(full)

    assert read_announcement(record, NOW) == full


def test_unknown_fields_of_newer_writers_are_ignored() -> None:
    plain = make_announcement()
    body = read_body(sign(plain))
    body |= {"colour": "green", "nested": {"deep": [1, 2]}}
    body["span"]["step"] = 2
    body["endpoints"][0]["protocol"] = "quic"

    record = sign_body(identity_of(1), json.dumps(body).encode())

    assert read_announcement(record, NOW) == plain


def test_record_is_verified_once_by_all_of_a_process() -> None:
    record = sign(make_announcement())

    assert verify_announcement(record) is verify_announcement(bytes(bytearray(record)))


def test_nobody_speaks_for_another_peer() -> None:
    packed = sign(make_announcement(1))[HEADER_BYTES:]
    body = unpack(packed, limits.MAX_ANNOUNCEMENT_TEXT_BYTES)

    with pytest.raises(RemoteProtocolError, match="not signed by the peer"):
        read_announcement(sign_body(identity_of(2), body), NOW)
    with pytest.raises(LocalProtocolError, match="cannot speak for"):
        sign_announcement(identity_of(2), make_announcement(1))


def test_signature_made_for_another_purpose_is_refused() -> None:
    body = sign(make_announcement())[HEADER_BYTES:]

    with pytest.raises(RemoteProtocolError, match="not signed"):
        read_announcement(b"\x02" + identity_of(1).sign(body) + body, NOW)


def test_announcement_holds_from_issue_to_expiry() -> None:
    record = sign(make_announcement(expires_at=NOW + 90))

    read_announcement(record, NOW - limits.MAX_CLOCK_SKEW_SECONDS)
    read_announcement(record, NOW + 89.9)
    with pytest.raises(RemoteProtocolError, match="in the future"):
        read_announcement(record, NOW - limits.MAX_CLOCK_SKEW_SECONDS - 0.1)
    with pytest.raises(RemoteProtocolError, match="expired"):
        read_announcement(record, NOW + 90)


BAD_FIELDS = [
    ("peer_id", "12D3KooW"),
    ("model_id", "A" * 32),
    ("model_id", "a" * 32 + "\n"),
    ("num_blocks", 0),
    ("num_blocks", limits.MAX_BLOCKS + 1),
    ("num_blocks", True),
    ("num_blocks", "8"),
    ("span", {"start": 4, "stop": 4}),
    ("span", {"start": -1, "stop": 4}),
    ("span", {"start": 0, "stop": 9}),
    ("span", {"start": 0.0, "stop": 4}),
    ("span", {"start": 0}),
    ("state", "asleep"),
    ("endpoints", "127.0.0.1:80"),
    ("endpoints", [{"host": "127.0.0.1", "port": 80}] * (limits.MAX_ENDPOINTS + 1)),
    ("endpoints", [{"host": "", "port": 80}]),
    ("endpoints", [{"host": "a" * 254, "port": 80}]),
    ("endpoints", [{"host": "a\n", "port": 80}]),
    ("endpoints", [{"host": "a", "port": 65536}]),
    ("endpoints", [{"host": "a", "port": 80, "fingerprint": "C" * 64}]),
    ("local_endpoints", [{"host": "10.0.0.7", "port": 80}] * (limits.MAX_LOCAL_ENDPOINTS + 1)),
    ("local_endpoints", [{"host": "10.0.0.7", "port": 0}]),
    ("local_endpoints", [{"host": "8.8.8.8", "port": 80}]),
    ("local_endpoints", [{"host": "127.0.0.1", "port": 80}]),
    ("local_endpoints", [{"host": "::ffff:127.0.0.1", "port": 80}]),
    ("local_endpoints", [{"host": "0.0.0.0", "port": 80}]),
    ("local_endpoints", [{"host": "printer.local", "port": 80}]),
    ("min_version", 3),
    ("max_version", 65536),
    ("weights", "int7"),
    ("weights", ["int8"]),
    ("compute_dtype", "float32"),
    ("sequence", 2**53),
    ("issued_at", NOT_A_NUMBER),
    ("expires_at", "soon"),
    ("adapters", ["0123456789abcdef"] * (MAX_ADAPTERS + 1)),
    ("adapters", ["../../etc"]),
    ("free_kv_tokens", -1),
    ("decode_steps_per_second", -0.1),
    ("prefill_tokens_per_second", float("inf")),
    ("loaded_decode_steps_per_second", "fast"),
    ("queue_seconds", None),
    ("rtts", [["nobody", 0.1]]),
    ("rtts", [[0.1]]),
    ("rtts", [[SOMEBODY, -0.1]]),
    ("rtts", [[SOMEBODY, 0.1]] * (MAX_RTTS + 1)),
    ("coordinate", {"x": NOT_A_NUMBER}),
    ("coordinate", {"z": -1e300}),
    ("coordinate", {"height": -0.001}),
    ("coordinate", {"error": 1.5}),
    ("coordinate", [0.0, 0.0, 0.0]),
    ("relays", [{"host": "192.0.2.7", "port": 4001, "peer_id": "nobody"}]),
    ("relays", [{"host": "192.0.2.7", "port": 4001}]),
    ("relays", [{"host": "a/p2p/b", "port": 4001, "peer_id": SOMEBODY}]),
    ("relays", [{"host": "a", "port": 1, "peer_id": SOMEBODY}] * (MAX_RELAYS + 1)),
    ("software", "x" * 65),
    ("software", "\x1b]52;c;aGVsbG8=\x07"),
    ("kernels", "\x9b2J"),
    ("name", "x" * 33),
    ("name", "x" * 10_240),
    ("name", "two\nlines"),
    ("name", "\x1b[2J"),
    ("name", "turned \u202e around"),
    ("device", "x" * 49),
    ("device", "\x00"),
    ("num_sessions", -1),
    ("block_bytes", 0.5),
    ("training", {"update": 1, "num_updates": 2}),
    ("training", {"update": -1, "num_updates": 2, "loss": 0.0}),
    ("training", {"update": 1, "num_updates": 2, "loss": -0.5}),
    ("training", {"update": 1, "num_updates": 2, "loss": "nan"}),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_bad_field_is_refused_although_well_signed(field: str, value: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read_announcement(resign(**{field: value}), NOW)

    assert len(str(caught.value)) < limits.MAX_TEXT_CHARACTERS


def test_peer_is_dialled_itself_first_and_then_through_its_relays() -> None:
    own = Endpoint("192.0.2.1", 7000, "0" * 64)
    relay = Relay("192.0.2.7", 4001, SOMEBODY)

    found = make_announcement(endpoints=(own,), relays=(relay,)).all_endpoints

    assert found[0] == own
    assert found[1] == Libp2pEndpoint(
        "192.0.2.7", 4001, peer_id=identity_of(1).peer_id, relay_id=identity_of(2).peer_id
    )


def test_reader_that_knows_no_relays_reads_the_rest() -> None:
    """Relays are no kind of endpoint: who does not know them would refuse the whole record.

    Nor do local endpoints stand among those that everybody may dial.
    """
    record = sign(make_full())

    body = read_body(record)

    assert {key for endpoint in body["endpoints"] for key in endpoint} == {
        "host",
        "port",
        "fingerprint",
    }
    assert len(body["endpoints"]) == 2
    assert len(body["relays"]) == len(body["local_endpoints"]) == 1


@pytest.mark.parametrize("field", ["peer_id", "span", "state", "weights", "expires_at"])
def test_missing_field_is_named(field: str) -> None:
    body = read_body(sign(make_announcement()))
    del body[field]

    with pytest.raises(RemoteProtocolError, match=field):
        read_announcement(sign_body(identity_of(1), json.dumps(body).encode()), NOW)


@pytest.mark.parametrize("lifetime_seconds", [0, -1, limits.MAX_ANNOUNCEMENT_LIFETIME_SECONDS + 1])
def test_lifetime_is_bounded(lifetime_seconds: float) -> None:
    with pytest.raises(RemoteProtocolError, match="lifetime"):
        read_announcement(resign(expires_at=NOW + lifetime_seconds), NOW)
    with pytest.raises(ValueError, match="lifetime"):
        make_announcement(expires_at=NOW + lifetime_seconds)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 3000,
        b"\xff\xfe",
        b'{"peer_id": "\\ud800"}',
        b"9" * 3000,
    ],
)
def test_signed_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_announcement(sign_body(identity_of(1), body), NOW)


def test_size_is_checked_before_anything_else() -> None:
    with pytest.raises(RemoteProtocolError, match="too large"):
        read_announcement(bytes(limits.MAX_ANNOUNCEMENT_BYTES + 1), NOW)


def test_unknown_version_is_refused() -> None:
    record = sign(make_announcement())

    with pytest.raises(RemoteProtocolError, match="version 1"):
        read_announcement(b"\x01" + record[1:], NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"queue_seconds": NOT_A_NUMBER},
        {"decode_steps_per_second": float("inf")},
        {"weights": "int7"},
        {"sequence": "1"},
        {"endpoints": (Endpoint("a" * 250, 80, "c" * 64),) * (limits.MAX_ENDPOINTS + 1)},
        {"software": "x" * 65},
    ],
)
def test_our_own_mistake_is_found_before_it_is_published(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        sign(make_announcement(**changes))


def test_our_own_announcement_beyond_the_limit_is_found() -> None:
    huge = make_announcement(
        endpoints=tuple(
            Endpoint("".join(random.Random(n).choices(LETTERS, k=250)), 80, "c" * 64)
            for n in range(limits.MAX_ENDPOINTS)
        ),
        rtts=tuple((identity_of(n).peer_id, 0.1) for n in range(MAX_RTTS)),
    )

    with pytest.raises(LocalProtocolError, match="too large"):
        sign(huge)


def test_inconsistent_announcement_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="beyond"):
        make_announcement(span=Span(4, 9))
    with pytest.raises(ValueError, match="version"):
        make_announcement(min_version=3)


def test_mutated_records_are_only_ever_refused() -> None:
    seed = 20260108
    print(f"seed {seed}")
    generator = random.Random(seed)
    record = sign(make_full())
    assert read_announcement(record, NOW)

    for _ in range(1000):
        with pytest.raises(RemoteProtocolError):
            read_announcement(mutate(record, generator), NOW)
        # The same behind a good signature: it may be valid, but nothing else may come out.
        resigned = sign_body(identity_of(1), mutate(record[HEADER_BYTES:], generator))
        with contextlib.suppress(RemoteProtocolError):
            read_announcement(resigned, NOW)


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


def test_thousand_announcements_are_no_more_than_a_megabyte() -> None:
    """With all that a peer says of itself and its neighbours; a client reads them all."""
    usual = make_announcement(
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
        rtts=((SOMEBODY, 0.1235),) * MAX_ANNOUNCED_RTTS,
        coordinate=Coordinate(-0.1235, -0.1235, -0.1235, 0.0123, 0.12),
        software="shoal 0.1.0",
        kernels="int8 avx512-vnni, attention avx512",
        name="the machine in the cellar",
        device="NVIDIA GeForce RTX 4090",
        num_sessions=17,
        block_bytes=218_112_000,
    )

    assert len(sign(usual)) <= 1000


# ---- made-up announcements that name another peer

VICTIM = Endpoint("2001:db8::7", 4000, "d" * 64)


@pytest.mark.parametrize(
    "name",
    [
        lambda number: VICTIM,
        lambda number: Endpoint(f"n{number}.example.org", 4000, VICTIM.fingerprint),
        lambda number: Endpoint(f"2001:db8:{'0:' * (number % 5)}:7", number, VICTIM.fingerprint),
        lambda number: Endpoint(VICTIM.host, VICTIM.port, f"{number:064x}"),
    ],
    ids=["copied", "other names", "written differently", "other keys"],
)
def test_machine_is_drawn_as_often_as_any_other_however_many_name_it(name: Any) -> None:
    honest = [
        make_announcement(number, endpoints=(Endpoint("192.0.2.7", number, f"{number:064x}"),))
        for number in range(1, 10)
    ]
    victim = make_announcement(10, endpoints=(VICTIM,))
    made_up = [make_announcement(number, endpoints=(name(number),)) for number in range(11, 211)]

    for seed in range(20):
        drawn = list(draw_by_address([*made_up, victim, *honest], random.Random(seed)))
        assert {peer.peer_id for peer in honest} < {peer.peer_id for peer in drawn}
        assert len(drawn) == 10


def test_peers_behind_one_address_are_drawn_as_often_as_others() -> None:
    behind = [
        make_announcement(number, endpoints=(Endpoint("192.0.2.7", number, f"{number:064x}"),))
        for number in range(1, 31)
    ]
    elsewhere = make_announcement(31, endpoints=(Endpoint("192.0.2.8", 1, "e" * 64),))
    relayed = [make_announcement(number, endpoints=()) for number in (32, 33)]
    rng = random.Random(1)

    first = [next(draw_by_address([*behind, elsewhere, *relayed], rng)) for _ in range(3000)]

    counts = [first.count(peer) for peer in (*behind, elsewhere, *relayed)]
    assert min(counts) >= 40
    assert max(counts) <= 160
