"""Records of runs: what their owners sign is what others read, and nothing else is taken."""

import json

import pytest
from training_runs import NO_SHARD, describe_run

from shoal.protocol.errors import NewerRecordError, RemoteProtocolError, UsageError
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


def test_run_id_is_the_same_in_all_versions() -> None:
    # Else `--new-run` after an update would not see that the run is under way.
    assert RECORD.run_id == "a6ba66fbba2656d492971593f6a00c2e042081acbeab9ffabc31fbb1cb4ec9fe"


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


def sign_content(content: object) -> bytes:
    """Return the document of a record with this content, of any version of shoal."""
    body = json.dumps(content).encode()
    return b"\x01" + OWNER.sign(b"shoal run record 1\0" + body) + body


def test_record_holds_only_what_differs_from_the_defaults() -> None:
    content = json.loads(sign_run(OWNER, RUN).document[65:])

    assert content == {
        "owner": OWNER.peer_id,
        "admitted": [],
        "run": describe_run(),
    }


def test_defaults_are_those_that_signed_records_stand_for() -> None:
    required = ("name", "seed", "model", "num_updates", "parts_per_update", "rows_per_part")
    run = {name: describe_run()[name] for name in required} | {
        "corpus": {"shards": [NO_SHARD], "sequence_length": 16},
        "optimizer": {"learning_rate": 0.01},
    }
    full = run | {
        "stage_borders": [],
        "corpus": {**run["corpus"], "held_out": [], "entropy": None, "tokenizer": []},
        "mode": "exact",
        "precision": "fp32",
        "optimizer": {
            "name": "muon", "learning_rate": 0.01, "adamw_learning_rate": None,
            "weight_decay": 0.0, "betas": [0.9, 0.95], "momentum": 0.95, "clip_norm": 1.0,
        },
        "schedule": {"warmup_updates": 0, "final_fraction": 0.1},
        "held_out_every": None,
    }  # fmt: skip
    owner = OWNER.peer_id

    short = read_run_record(sign_content({"owner": owner, "admitted": [], "run": run}))
    long = read_run_record(sign_content({"owner": owner, "admitted": [], "run": full}))

    assert short.run == long.run
    assert short.run.model_dump(mode="json") == full
    assert short.run_id != long.run_id


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"run": describe_run(loss_scale=2)}, "run.loss_scale"),
        ({"run": describe_run(schedule={"cooldown": 2})}, "run.schedule.cooldown"),
        ({"run": describe_run(mode="int4")}, "run.mode"),
        ({"expires_at": 2}, "expires_at"),
        ({"run": describe_run(**{"\x1b[2J" + "x" * 100: 2})}, r"run.\x1b[2J" + "x" * 72),
    ],
)
def test_record_of_a_newer_version_is_told(change: dict[str, object], name: str) -> None:
    content = {"owner": OWNER.peer_id, "admitted": [], "run": describe_run()} | change

    with pytest.raises(NewerRecordError, match="made by a newer version of shoal") as error:
        read_run_record(sign_content(content))

    assert f"the setting '{name}' of the run" in str(error.value)


def test_what_cannot_be_signed_is_told() -> None:
    large = RUN.model_copy(update={"model": {"text": "x" * MAX_RUN_RECORD_BYTES}})

    with pytest.raises(UsageError, match="has at most 1048576 bytes"):
        sign_run(OWNER, large)
    with pytest.raises(UsageError, match="'friend' is not the peer id"):
        sign_run(OWNER, RUN, ["friend"])
    with pytest.raises(UsageError, match="can admit 256 peers"):
        sign_run(OWNER, RUN, [str(number) for number in range(MAX_RUN_MEMBERS + 1)])
