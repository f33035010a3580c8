"""Records of runs: what their owners sign is what others read, and nothing else is taken."""

import pytest
from training_runs import describe_run

from shoal.protocol.errors import RemoteProtocolError, UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.limits import MAX_RUN_MEMBERS, MAX_RUN_RECORD_BYTES
from shoal.protocol.runs.run_record import read_run_record, sign_run
from shoal.protocol.runs.training_run import read_run

OWNER, FRIEND, STRANGER = (Identity(bytes([number]) * 32) for number in range(3))
RUN = read_run(describe_run())
RECORD = sign_run(OWNER, RUN, [FRIEND.peer_id])


def test_record_says_what_its_owner_has_signed() -> None:
    record = read_run_record(RECORD.document)

    assert record == RECORD
    assert (record.owner, record.admitted, record.run) == (OWNER.peer_id, (FRIEND.peer_id,), RUN)
    assert len(record.document) % 4 == 0
    assert len(record.run_id) == 64
    assert record.run_id.startswith(record.model_id)


def test_owner_and_admitted_peers_may_take_part_or_everybody() -> None:
    peer_ids = [identity.peer_id for identity in (OWNER, FRIEND, STRANGER)]

    assert [RECORD.admits(peer_id) for peer_id in peer_ids] == [True, True, False]
    assert all(map(sign_run(OWNER, RUN).admits, peer_ids))


def test_run_id_names_owner_and_admitted_peers() -> None:
    others = [
        sign_run(OWNER, RUN),
        sign_run(STRANGER, RUN, [FRIEND.peer_id]),
        sign_run(OWNER, RUN, [STRANGER.peer_id]),
    ]

    assert len({RECORD.run_id, *(other.run_id for other in others)}) == 4
    again = sign_run(OWNER, RUN, [FRIEND.peer_id, FRIEND.peer_id])
    assert again.run_id == RECORD.run_id


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (b"", "cut short"),
        (RECORD.document[:65], "cut short"),
        (b"\x02" + RECORD.document[1:], "records of runs of version 2 are unknown"),
        (RECORD.document[:-9], "malformed"),
        (RECORD.document.replace(b'"seed":7', b'"seed":8'), "not signed by the owner"),
        (
            RECORD.document.replace(OWNER.peer_id.encode(), STRANGER.peer_id.encode()),
            "not signed by the owner",
        ),
        (RECORD.document.replace(b'"seed":7', b'"seed":-'), "malformed"),
        (RECORD.document[:65] + b"[" * 10_000, "malformed"),
        (RECORD.document.replace(FRIEND.peer_id.encode(), b"friend"), "not the peer id"),
        (RECORD.document + bytes(MAX_RUN_RECORD_BYTES), "has at most 1048576 bytes"),
    ],
)
def test_other_bytes_are_refused(document: bytes, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        read_run_record(document)


def test_what_cannot_be_signed_is_told() -> None:
    large = RUN.model_copy(update={"model": {"text": "x" * MAX_RUN_RECORD_BYTES}})

    with pytest.raises(UsageError, match="has at most 1048576 bytes"):
        sign_run(OWNER, large)
    with pytest.raises(UsageError, match="'friend' is not the peer id"):
        sign_run(OWNER, RUN, ["friend"])
    with pytest.raises(UsageError, match="can admit 256 peers"):
        sign_run(OWNER, RUN, [str(number) for number in range(MAX_RUN_MEMBERS + 1)])
