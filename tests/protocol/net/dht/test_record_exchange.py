"""Questions for records and their answers: what survives the trip, how small it is, and junk."""

from __future__ import annotations

import contextlib
import random

import pytest
from announcements import make_announcement

from shoal.peer.announcing.round_trip_times import MAX_ANNOUNCED_RTTS
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.identity import Identity
from shoal.protocol.net.dht import record_gate
from shoal.protocol.net.dht.record_gate import (
    KEY_BYTES,
    MAX_ANSWER_BYTES,
    MAX_KNOWN,
    Entry,
    decode_answer,
    decode_question,
    encode_answer,
    encode_question,
    may_be_cut,
)
from shoal.protocol.records.announcements import sign_announcement
from shoal.protocol.records.coordinates import Coordinate

SEED = 7
KEY = bytes(range(KEY_BYTES))
NUM_PEERS = 1000
NUM_ASKED = 10  # protocol/net/dht/neighbourhood.py
MEGABYTE = 1_000_000
PRIVATE_BYTES = 140  # swarm id, nonce, tag and certificate around a record


def make_entries(num_entries: int) -> list[Entry]:
    rng = random.Random(SEED)
    return [
        Entry(f"peer {n}", rng.randbytes(rng.randrange(300)), 100.0 + n) for n in range(num_entries)
    ]


def test_answer_brings_what_the_asker_lacks() -> None:
    entries = make_entries(20)
    question = encode_question(KEY, [entry.digest for entry in entries[:15]])

    key, known = decode_question(question)
    found = decode_answer(encode_answer(entries, known))

    assert key == KEY
    assert found == entries[15:]
    assert decode_answer(encode_answer(entries, ())) == entries


def test_renewed_entry_is_another_one() -> None:
    old = Entry("peer", b"value", 100.0)

    for renewed in (
        Entry("peer", b"value", 130.0), Entry("peer", b"other", 100.0), Entry("p", b"eervalue", 100)
    ):  # fmt: skip
        assert decode_answer(encode_answer([renewed], [old.digest])) == [renewed]


def test_answer_ends_where_a_message_does() -> None:
    entries = [Entry(str(n), bytes(4000), 1.0) for n in range(60)]

    answer = encode_answer(entries, ())

    assert MAX_ANSWER_BYTES - 4100 < len(answer) <= MAX_ANSWER_BYTES
    assert may_be_cut(answer)
    found = decode_answer(answer)
    assert not may_be_cut(encode_answer(entries[:10], ()))
    rest = decode_answer(encode_answer(entries, {entry.digest for entry in found}))
    assert [*found, *rest] == entries


@pytest.mark.parametrize(
    "question", [b"", KEY[:-1], KEY + b"x", KEY + bytes(9), KEY + bytes(8 * (MAX_KNOWN + 1))]
)
def test_malformed_question_is_refused(question: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode_question(question)


def test_every_cut_of_an_answer_is_refused_or_has_fewer_entries() -> None:
    entries = make_entries(3)
    answer = encode_answer(entries, ())

    for length in range(len(answer)):
        try:
            found = decode_answer(answer[:length])
        except RemoteProtocolError:
            continue
        assert list(found) == entries[: len(found)]
        assert len(found) < 3


def test_random_answers_end_in_nothing_but_a_protocol_error() -> None:
    rng = random.Random(SEED)

    for _ in range(100):
        with contextlib.suppress(RemoteProtocolError):
            decode_answer(bytes(rng.choices((0, 1, 200, 255), k=200)))


@pytest.mark.parametrize("expires_at", [float("nan"), float("inf"), -float("inf")])
def test_entry_that_never_expires_hides_no_other(expires_at: float) -> None:
    good = Entry("peer", b"value", 100.0)

    assert decode_answer(encode_answer([Entry("liar", b"x", expires_at), good], ())) == [good]


def test_too_large_an_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = encode_answer(make_entries(20), ())
    monkeypatch.setattr(record_gate, "MAX_ANSWER_BYTES", len(answer) - 1)

    with pytest.raises(RemoteProtocolError, match="too large"):
        decode_answer(answer)


def announce_everything(identity: Identity, rng: random.Random, number: int) -> Entry:
    """Return the record of a peer that tells all that peers tell, in a private swarm."""
    others = [Identity(rng.randbytes(32)).peer_id for _ in range(MAX_ANNOUNCED_RTTS)]
    announcement = make_announcement(
        peer_id=identity.peer_id,
        endpoints=(Endpoint(f"203.0.113.{number % 256}", 1024 + number, rng.randbytes(32).hex()),),
        free_kv_tokens=rng.randrange(10**6),
        decode_steps_per_second=100 * rng.random(),
        loaded_decode_steps_per_second=100 * rng.random(),
        prefill_tokens_per_second=1000 * rng.random(),
        queue_seconds=rng.random(),
        rtts=tuple((other, round(rng.random(), 4)) for other in others),
        coordinate=Coordinate(*(rng.random() for _ in range(5))).rounded(),
        software="shoal 0.1.0",
        kernels="native int8 with avx512_vnni",
        relay_port=31337,
        sequence=1_790_000_000_000 + rng.randrange(10**6),
    )
    record = sign_announcement(identity, announcement)
    return Entry(identity.peer_id, record + rng.randbytes(PRIVATE_BYTES), announcement.expires_at)


@pytest.mark.slow
def test_refresh_of_a_thousand_peers_is_below_a_megabyte() -> None:
    """Ten nodes are asked every ten seconds; a third of the peers announce anew meanwhile."""
    rng = random.Random(SEED)
    identities = [Identity(rng.randbytes(32)) for _ in range(NUM_PEERS)]
    entries = [announce_everything(one, rng, n) for n, one in enumerate(identities)]
    known: set[bytes] = set()

    def refresh() -> int:
        """Ask all nodes, each until it has no more; return the bytes of questions and answers."""
        num_bytes = 0
        for _ in range(NUM_ASKED):
            is_cut = True
            while is_cut:
                question = encode_question(KEY, known)
                answer = encode_answer(entries, decode_question(question)[1])
                known.update(entry.digest for entry in decode_answer(answer))
                num_bytes += len(question) + len(answer)
                is_cut = may_be_cut(answer)
        return num_bytes

    assert refresh() < MEGABYTE
    third = NUM_PEERS // 3
    entries[:third] = [announce_everything(one, rng, n) for n, one in enumerate(identities[:third])]
    assert refresh() < 0.4 * MEGABYTE
    # A minute on, each peer is known by three announcements that would still hold.
    known |= {rng.randbytes(8) for _ in range(3 * NUM_PEERS - len(known))}
    entries[:third] = [announce_everything(one, rng, n) for n, one in enumerate(identities[:third])]
    assert refresh() < 0.6 * MEGABYTE
