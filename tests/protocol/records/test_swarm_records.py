"""What a member takes of its swarm: what members signed and sealed, and nothing else."""

from __future__ import annotations

import gc
import random
import string
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from announcements import MODEL, NOW, identity_of, make_announcement, sign
from chosen_cases import choose_cases
from operations import count_operations
from swarm_values import PUBLIC, make_values, number_identity, number_peer

from shoal.peer.announcing.round_trip_times import MAX_ANNOUNCED_RTTS
from shoal.peer.process.config import ANNOUNCEMENT_BYTES
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.errors import RefusedError, RemoteProtocolError, RevokedError, UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import NO_MODEL, ModelId, PeerId
from shoal.protocol.limits import MAX_ANNOUNCEMENTS_PER_MODEL
from shoal.protocol.membership.membership import (
    MAX_REVOKED,
    Membership,
    Revocations,
    Role,
    make_owner,
    make_public,
    sign_revocations,
)
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.records import (
    DIGEST_BYTES,
    MAX_NAMED_RECORDS,
    MAX_RECORDS_BYTES,
    RecordFetch,
)
from shoal.protocol.records.announcement_book import AnnouncementBook
from shoal.protocol.records.announcements import (
    Announcement,
    PeerState,
    sign_announcement,
    verify_announcement,
)
from shoal.protocol.records.coordinates import Coordinate
from shoal.protocol.records.swarm_records import SwarmRecords

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)
RECORD = sign(make_announcement())
SEED = 7


def make_value(number: int = 1, writer: Membership = SERVER, **changes: Any) -> bytes:
    announcement = make_announcement(number, **changes)
    return SwarmRecords(writer).add_own(sign(announcement, number), NOW).value


def list_value(revocations: Revocations, owner: Membership = OWNER) -> bytes:
    return SwarmRecords(owner).seal_revocations(sign_revocations(owner, revocations))


def revoke(*numbers: int, sequence: int = 1) -> Revocations:
    return Revocations(sequence, frozenset(identity_of(number).peer_id for number in numbers))


def found(records: SwarmRecords) -> set[str]:
    return {peer.peer_id for peer in records.list_current(MODEL, NOW)}


@pytest.mark.parametrize("reader", [OWNER, SERVER, USER, PUBLIC], ids=str)
def test_members_remember_what_a_peer_signed(reader: Membership) -> None:
    records = SwarmRecords(reader)
    value = make_value(writer=SERVER if reader.is_private else PUBLIC)

    for _ in range(2):
        records.take(MODEL, value, NOW)

    assert records.list_current(MODEL, NOW) == [make_announcement()]
    assert [known.value for known in records.list_records(MODEL, NOW)] == [value]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (b"", "another swarm"),
        (bytes(15), "another swarm"),
        (bytes(16), "cut short"),
        (bytes(16) + b"\x01" + bytes(64), "cut short"),
        (make_value(writer=PUBLIC) + b"\0", "damaged|cut short|signed"),
        (make_value(writer=make_public(bytes(range(16)))), "another swarm"),
        (make_value(writer=PUBLIC, model_id=ModelId("b" * 32)), "another model"),
        (make_value(), "another swarm"),
        (b"\xff\0" + RECORD, "another swarm"),
    ],
)
def test_what_is_no_record_of_this_swarm_and_model_is_refused(value: bytes, complaint: str) -> None:
    records = SwarmRecords(PUBLIC)

    with pytest.raises(RemoteProtocolError, match=complaint):
        records.take(MODEL, value, NOW)

    assert found(records) == set()


def test_replay_of_an_older_record_is_refused_and_an_expired_one_forgotten() -> None:
    records = SwarmRecords(PUBLIC)
    newer = {"sequence": 2, "expires_at": NOW + 91}
    records.take(MODEL, make_value(writer=PUBLIC, **newer), NOW)

    with pytest.raises(RemoteProtocolError, match="newer"):
        records.take(MODEL, make_value(writer=PUBLIC), NOW)

    assert records.list_current(MODEL, NOW) == [make_announcement(**newer)]
    assert records.list_current(MODEL, NOW + 91) == []
    assert records.list_hints(MODEL, NOW + 91) == [make_announcement(**newer)]


def test_what_we_announce_and_look_up_has_room() -> None:
    records = SwarmRecords(PUBLIC, AnnouncementBook(2, 20))
    other = ModelId("b" * 32)
    records.reserve(other)
    records.take(other, make_value(writer=PUBLIC, model_id=other), NOW)
    records.add_own(sign(make_announcement(2), 2), NOW)

    for number in range(1, 41):
        model_id = ModelId(f"{number:032x}")
        records.take(model_id, make_value(number, PUBLIC, model_id=model_id), NOW)

    assert len(records.list_current(other, NOW)) == 1
    assert records.list_current(MODEL, NOW) == [make_announcement(2)]
    assert records.list_current(ModelId(f"{1:032x}"), NOW) == []


# ---- private swarms


def test_peer_that_no_member_let_serve_is_refused() -> None:
    sealed_by_a_user = SwarmRecords(USER).seal(bytes(64) + RECORD)
    borrowed = SwarmRecords(USER).seal(SERVER.certify(identity_of(2).peer_id) + RECORD)
    records = SwarmRecords(USER)

    for value in (sealed_by_a_user, borrowed):
        with pytest.raises(RemoteProtocolError, match="no certificate"):
            records.take(MODEL, value, NOW)
    with pytest.raises(UsageError, match="only allows using"):
        SwarmRecords(USER).add_own(RECORD, NOW)
    assert found(records) == set()


def test_strangers_neither_write_nor_read() -> None:
    ours = make_value()
    for reader, value in (
        (USER, make_value(writer=STRANGER)),
        (USER, SERVER.swarm_id + RECORD),
        (USER, make_value(writer=PUBLIC)),
        (STRANGER, ours),
        (STRANGER, STRANGER.swarm_id + ours[16:]),
        (make_public(SERVER.swarm_id), ours),
    ):
        with pytest.raises(RemoteProtocolError):
            SwarmRecords(reader).take(MODEL, value, NOW)

    assert identity_of(1).peer_id.encode() not in ours
    assert b"endpoints" not in ours


def test_revoked_peer_is_ignored_at_once_and_from_then_on() -> None:
    records = SwarmRecords(SERVER)
    for number in (1, 2):
        records.take(MODEL, make_value(number), NOW)

    records.take(MODEL, list_value(revoke(1)), NOW)

    assert found(records) == {identity_of(2).peer_id}
    assert [peer.peer_id for peer in records.list_hints(MODEL, NOW + 90)] == [
        identity_of(2).peer_id
    ]
    with pytest.raises(RemoteProtocolError, match="revoked"):
        records.take(MODEL, make_value(1, sequence=2, expires_at=NOW + 91), NOW)
    with pytest.raises(RevokedError, match="has revoked"):
        records.add_own(RECORD, NOW)


def test_newest_list_of_the_owner_counts_and_no_other() -> None:
    records = SwarmRecords(SERVER)
    records.take(MODEL, list_value(revoke(1, sequence=2)), NOW)

    for refused in (list_value(revoke(sequence=1)), list_value(revoke(sequence=3), STRANGER)):
        with pytest.raises(RemoteProtocolError):
            records.take(MODEL, refused, NOW)
    forged = SwarmRecords(SERVER).seal_revocations(b"\x01" + bytes(64 + 8))
    with pytest.raises(RemoteProtocolError, match="not signed by the owner"):
        records.take(MODEL, forged, NOW)

    assert records.revocations == revoke(1, sequence=2)


def test_newer_list_that_lacks_somebody_lets_nobody_in_again() -> None:
    """The owner made it while nobody told of the one before."""
    records = SwarmRecords(SERVER)

    for revoked in (revoke(1, sequence=1), revoke(2, sequence=2)):
        records.take(MODEL, list_value(revoked), NOW)

    assert records.revocations == revoke(1, 2, sequence=2)


def test_public_swarm_has_nobody_who_could_revoke() -> None:
    records = SwarmRecords(PUBLIC)

    with pytest.raises(RemoteProtocolError, match="not signed by the owner"):
        records.take(MODEL, records.seal_revocations(b"\x01" + bytes(64 + 8)), NOW)


def test_junk_is_refused_with_a_protocol_error() -> None:
    rng = random.Random(SEED)
    for membership in (USER, PUBLIC):
        genuine = make_value(writer=SERVER if membership.is_private else PUBLIC)
        records = SwarmRecords(membership)
        for _ in range(1000):
            value = bytearray(rng.choice([genuine, membership.swarm_id + rng.randbytes(200), b""]))
            for _ in range(1 + rng.randrange(3)):
                place = rng.randrange(len(value) + 1)
                value[place : place + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
            if bytes(value) != genuine:
                with pytest.raises(RemoteProtocolError):
                    records.take(MODEL, bytes(value), NOW)
        assert found(records) == set()


# ---- what members tell each other


def ask(asker: SwarmRecords, answering: SwarmRecords, max_bytes: int = MAX_RECORDS_BYTES) -> int:
    """Have one ask another; return how many records it was told."""
    rng = random.Random(SEED)
    fetch = asker.make_fetch(MODEL, NOW, rng, max_bytes)
    answer = answering.answer("stranger", MODEL, fetch, NOW, rng)
    assert asker.take_all(MODEL, answer.records, NOW) == len(answer.records)
    return len(answer.records)


@pytest.mark.parametrize("membership", [PUBLIC, SERVER], ids=str)
def test_two_members_know_the_same_after_one_question_each(membership: Membership) -> None:
    first, second = SwarmRecords(membership), SwarmRecords(membership)
    for number, records in ((1, first), (2, second)):
        records.add_own(sign(make_announcement(number), number), NOW)
        records.take(MODEL, make_value(number + 2, membership), NOW)

    assert ask(first, second) == 2
    assert ask(second, first) == 2  # its own once more, and what it had been told

    everyone = {identity_of(number).peer_id for number in (1, 2, 3, 4)}
    assert found(first) == found(second) == everyone
    assert ask(first, second) == ask(second, first) == 1


@pytest.mark.parametrize("membership", [PUBLIC, SERVER], ids=str)
def test_member_is_told_one_record_of_each_model_that_it_does_not_know(
    membership: Membership,
) -> None:
    asker, answering = SwarmRecords(membership), SwarmRecords(membership)
    models = [ModelId(letter * 32) for letter in "abcd"]
    known = make_value(1, membership)
    answering.take(MODEL, known, NOW)
    for number, model_id in enumerate([*models[1:], *models], 2):
        answering.take(model_id, make_value(number, membership, model_id=model_id), NOW)
    left = make_value(9, membership, model_id=ModelId("e" * 32), state=PeerState.OFFLINE)
    answering.take(ModelId("e" * 32), left, NOW)
    asker.take(MODEL, make_value(10, membership), NOW)
    asker.take(MODEL, known, NOW)
    rng = random.Random(SEED)
    fetch = asker.make_fetch(NO_MODEL, NOW, rng)

    answer = answering.answer("stranger", NO_MODEL, fetch, NOW, rng)
    asker.take_all(NO_MODEL, [*answer.records, b"junk"], NOW)

    assert len(answer.records) == 3
    assert sorted(asker.list_models(NOW)) == models
    fetch = asker.make_fetch(NO_MODEL, NOW, rng)
    assert answering.answer("stranger", NO_MODEL, fetch, NOW, rng).records == ()


def test_question_for_models_names_few_records_of_each() -> None:
    records, other = SwarmRecords(PUBLIC), SwarmRecords(PUBLIC)
    for number in range(1, 20):
        value = make_value(number, PUBLIC)
        records.take(MODEL, value, NOW)
        other.take(MODEL, value, NOW)
    rng = random.Random(SEED)

    fetch = records.make_fetch(NO_MODEL, NOW, rng)

    assert 0 < len(fetch.known) <= 4 * DIGEST_BYTES
    assert other.answer("stranger", NO_MODEL, fetch, NOW, rng).records == ()


def test_record_that_is_brought_for_the_list_of_models_is_kept_with_its_model() -> None:
    rng = random.Random(SEED)
    asker, answering = SwarmRecords(PUBLIC), SwarmRecords(PUBLIC)
    fetch = replace(asker.make_fetch(NO_MODEL, NOW, rng, 1), own=make_value(writer=PUBLIC))

    answer = answering.answer("stranger", NO_MODEL, fetch, NOW, rng)

    assert answer.has_own
    assert found(answering) == {identity_of(1).peer_id}
    assert answering.list_models(NOW) == [MODEL]


def test_asker_hears_whether_its_own_record_is_kept() -> None:
    rng = random.Random(SEED)
    asker, answering = SwarmRecords(PUBLIC), SwarmRecords(PUBLIC)
    nothing = asker.make_fetch(MODEL, NOW, rng)
    asker.add_own(RECORD, NOW)
    fetch = asker.make_fetch(MODEL, NOW, rng)

    assert not answering.answer("stranger", MODEL, nothing, NOW, rng).has_own
    assert answering.answer("stranger", MODEL, fetch, NOW, rng).has_own
    answering.take(MODEL, make_value(writer=PUBLIC, sequence=2, expires_at=NOW + 91), NOW)
    assert not answering.answer("stranger", MODEL, fetch, NOW, rng).has_own
    assert not answering.answer("stranger", MODEL, replace(fetch, own=b"junk"), NOW, rng).has_own


def test_list_of_revocations_is_told_until_it_is_known_and_taken_from_its_owner() -> None:
    rng = random.Random(SEED)
    longest = Revocations(
        1, frozenset(Identity(number.to_bytes(32)).peer_id for number in range(MAX_REVOKED))
    )
    owner, member, newcomer = SwarmRecords(OWNER), SwarmRecords(SERVER), SwarmRecords(USER)
    fetch = replace(owner.make_fetch(MODEL, NOW, rng, 1), own=list_value(longest))

    assert member.answer("stranger", MODEL, fetch, NOW, rng).has_own
    assert ask(newcomer, member, 1) == 0  # it has no room for it
    assert ask(newcomer, member, 5000) == 1
    assert ask(newcomer, member, 5000) == 0

    assert newcomer.revocations == longest


def count_answers(records: SwarmRecords, fetch: RecordFetch) -> int:
    """Return how often a stranger is answered at once, however often it asks."""
    rng = random.Random(SEED)
    for num_answers in range(10_000):
        try:
            records.answer("stranger", MODEL, fetch, NOW, rng)
        except RefusedError:
            return num_answers
    raise AssertionError("it is never refused")


@cache
def make_peers() -> Sequence[tuple[Announcement, bytes]]:
    """Return announcements and values of peers of 8 blocks, of which nobody serves the last 4."""
    return [
        (
            make_announcement(peer_id=PeerId(f"peer {number}")),
            f"value {number} {'…' * 100}".encode(),
        )
        for number in range(MAX_ANNOUNCEMENTS_PER_MODEL)
    ]


def make_full(num_records: int = MAX_ANNOUNCEMENTS_PER_MODEL) -> SwarmRecords:
    """Return records of as many peers, and of one more."""
    book = AnnouncementBook()
    for announcement, value in make_peers()[:num_records]:
        book.add(MODEL, announcement, value, NOW)
    records = SwarmRecords(PUBLIC, book)
    records.add_own(RECORD, NOW)
    return records


ALL_BUT_ONE = MAX_ANNOUNCEMENTS_PER_MODEL - 1


@pytest.mark.parametrize(
    ("num_records", "max_bytes", "num_named"),
    choose_cases(
        [
            (100, MAX_RECORDS_BYTES, MAX_NAMED_RECORDS),
            (2000, 64, MAX_NAMED_RECORDS),
            (2000, MAX_RECORDS_BYTES, 0),
            (ALL_BUT_ONE, 0, MAX_NAMED_RECORDS),
            (ALL_BUT_ONE, 64, 0),
            (ALL_BUT_ONE, MAX_RECORDS_BYTES, MAX_NAMED_RECORDS),
        ],
        [100, 2000, ALL_BUT_ONE],
        [0, 64, MAX_RECORDS_BYTES],
        [0, MAX_NAMED_RECORDS],
    ),
)
def test_stranger_is_charged_for_what_its_questions_cost(
    num_records: int, max_bytes: int, num_named: int
) -> None:
    """A unit of the budget pays for 16,000 instructions, 0.3 ms at most."""
    records, rng = make_full(num_records), random.Random(SEED)
    fetch = records.make_fetch(MODEL, NOW, rng)
    fetch = replace(fetch, own=b"", known=fetch.known[: num_named * 8], max_bytes=max_bytes)

    num_operations = count_operations(lambda: records.answer("one", MODEL, fetch, NOW, rng))

    assert num_operations * count_answers(records, fetch) <= 1500 * 16_000


def test_newcomer_to_a_full_book_costs_what_any_other_does() -> None:
    values = make_values(150, NOW)
    few, full = SwarmRecords(PUBLIC), make_full()

    first, *_ = counted = [count_operations(lambda: few.take(MODEL, values[0], NOW))] + [
        count_operations(lambda value=value: full.take(MODEL, value, NOW)) for value in values
    ]

    assert sum(counted) <= 2 * first * len(counted)
    assert max(counted) <= 150_000  # 3 ms, once in a hundred


def test_only_the_newest_announcement_of_a_peer_takes_memory() -> None:
    records = SwarmRecords(SERVER)
    for number in range(20):
        renewed = {"sequence": number, "expires_at": NOW + 90 + number, "name": "renewed"}
        records.take(MODEL, make_value(**renewed), NOW)
    verify_announcement.cache_clear()  # it remembers the last few of all that it has read
    gc.collect()

    held = [one for one in gc.get_objects() if isinstance(one, Announcement)]
    assert [one.sequence for one in held if one.name == "renewed"] == [19]


def make_largest(number: int) -> bytes:
    """Return a record that takes as much memory as one can, up to a tenth."""
    rng = random.Random(number)
    draw = partial(rng.choices, string.ascii_letters + string.digits, k=67)
    identity, key = number_identity(number), rng.randbytes(32).hex()
    announcement = make_announcement(
        1,
        peer_id=identity.peer_id,
        endpoints=tuple(Endpoint("".join(draw()), 300 + n, key) for n in range(8)),
        relays=tuple(
            Relay("".join(draw()), 300 + n, number_peer(rng.getrandbits(200))) for n in range(4)
        ),
        rtts=tuple((number_peer(rng.getrandbits(200)), 0.5 + n) for n in range(16)),
        local_endpoints=tuple(Endpoint(f"10.0.{n}.1", 1000 + n, key) for n in range(4)),
    )
    return sign_announcement(identity, announcement)


def test_memory_of_announcements_is_what_serve_counts_for_them() -> None:
    """The most that a book of one model holds, in the largest records."""
    book = AnnouncementBook()
    book.reserve(MODEL)
    for number in range(11_000):
        announcement = make_announcement(peer_id=PeerId(f"peer {number}"))
        for scope in (MODEL, f"model {number % 3}"):
            book.add(scope, announcement, f"{scope} {number}".encode(), NOW)
    most_known = len(book)
    records, values = SwarmRecords(PUBLIC), []
    for number in range(51):
        values.append(records.seal(make_largest(number)))
    records.take(MODEL, values.pop(), NOW)

    tracemalloc.start()
    for value in values:
        records.take(MODEL, bytes(bytearray(value)), NOW)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most_known == 20_000
    assert 6_000 < num_bytes / len(values) < ANNOUNCEMENT_BYTES / most_known


def test_newcomer_learns_of_many_peers_in_several_answers() -> None:
    values = make_values(600, NOW)
    answering, newcomer = SwarmRecords(PUBLIC), SwarmRecords(PUBLIC)
    assert answering.take_all(MODEL, values, NOW) == 600

    num_answers = 0
    while ask(newcomer, answering):
        num_answers += 1

    assert len(newcomer.list_current(MODEL, NOW)) == 600
    assert num_answers == -(-sum(map(len, values)) // (MAX_RECORDS_BYTES - 500))


def announce_everything(rng: random.Random, number: int) -> tuple[Identity, Announcement]:
    """Return what a peer announces that tells all that peers tell."""
    identity = Identity(rng.randbytes(32))
    others = [Identity(rng.randbytes(32)).peer_id for _ in range(MAX_ANNOUNCED_RTTS)]
    return identity, make_announcement(
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
        name=f"machine {number}",
        device="NVIDIA GeForce RTX 4090",
        num_sessions=rng.randrange(10),
        block_bytes=218_112_000,
        relay_port=31337,
        sequence=1_790_000_000_000 + rng.randrange(10**6),
    )


def test_lookup_in_a_private_swarm_of_a_thousand_peers_takes_less_than_a_megabyte() -> None:
    """Sixteen nodes are asked that all know the same; the first is asked until it has no more."""
    rng = random.Random(SEED)
    answering, asker = SwarmRecords(SERVER), SwarmRecords(SERVER)
    for number in range(1000):
        identity, announcement = announce_everything(rng, number)
        record = sign_announcement(identity, announcement)
        answering.take(MODEL, SwarmRecords(SERVER).add_own(record, NOW).value, NOW)
    num_bytes, num_nodes = 0, 0

    while num_nodes < 16:
        fetch = asker.make_fetch(MODEL, NOW, rng)
        answer = answering.answer("stranger", MODEL, fetch, NOW, rng)
        asker.take_all(MODEL, answer.records, NOW)
        num_bytes += len(encode_frame(fetch)) + len(encode_frame(answer))
        num_nodes += sum(map(len, answer.records)) < MAX_RECORDS_BYTES // 2

    assert len(asker.list_current(MODEL, NOW)) == 1000
    assert num_bytes < 1_000_000
