"""The bytes on the wire, as the first release of each message wrote them.

`golden_frames.json` holds frames with what they mean, malformed frames with the error that they are
refused with, and a signed announcement. It was written by the code of protocol version 5. Entries
are added (see `docs/new-message.md`), never changed: peers of that version are still out there.
"""

import dataclasses
import hashlib
import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from wire_messages import HONEST, ONE_OF_EACH

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.identity import Identity
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.records.announcements import sign_announcement, verify_announcement
from shoal.protocol.tensors import WireTensor

FILE = Path(__file__).with_name("golden_frames.json")
ADDED = {
    "leaves", "local_endpoints", "name", "device", "num_sessions", "block_bytes", "training",
    "model_id", "is_audit", "num_restarts", "waits_for",
}  # fmt: skip
"""Fields that came with a later version, which recorded messages do not have."""
GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def describe(value: Any) -> Any:
    """Return a message as JSON can hold it: names, numbers, and bytes in hex."""
    if isinstance(value, WireTensor):
        return [value.dtype.name, *value.shape, bytes(value.data).hex()]
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: describe(part)
            for field in dataclasses.fields(value)
            if (part := getattr(value, field.name)) or field.name not in ADDED
        }
        return {type(value).__name__: fields}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): describe(one) for key, one in value.items()}
    if isinstance(value, tuple | frozenset):
        return [describe(one) for one in value]
    return value


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_golden_frame_is_read_and_written_byte_for_byte() -> None:
    for golden in GOLDEN["frames"]:
        frame = bytes.fromhex(golden["frame"])

        message = decode_frame(frame)

        assert describe(message) == golden["message"]
        assert encode_frame(message) == frame, message


def test_large_frames_are_written_byte_for_byte() -> None:
    digests: dict[str, str] = GOLDEN["large_frames"]
    written = {
        digest(json.dumps(describe(message)).encode()): digest(encode_frame(message))
        for message in HONEST
    }

    assert digests
    assert {name: written[name] for name in digests} == digests


def test_malformed_frame_is_refused_with_the_same_error() -> None:
    for golden in GOLDEN["refusals"]:
        with pytest.raises(RemoteProtocolError) as refusal:
            pytest.fail(f"accepted: {decode_frame(bytes.fromhex(golden['frame']))}")

        text = str(refusal.value).split(" with type ")[0]  # what follows is protobuf's own
        assert text == golden["error"]


def test_every_kind_of_message_has_a_golden_frame() -> None:
    kinds = {bytes.fromhex(golden["frame"])[3] for golden in GOLDEN["frames"]}

    assert kinds == {encode_frame(message)[3] for message in ONE_OF_EACH.values()}


def test_golden_announcement_is_read_and_written_byte_for_byte() -> None:
    record = bytes.fromhex(GOLDEN["announcement"]["record"])
    identity = Identity(bytes.fromhex(GOLDEN["announcement"]["key"]))

    announcement = verify_announcement(record)

    assert describe(announcement) == GOLDEN["announcement"]["fields"]
    assert sign_announcement(identity, announcement) == record


def record_new_messages() -> None:
    """Add frames of the messages that have none; those that are there stay as they are."""
    known = {bytes.fromhex(golden["frame"])[3] for golden in GOLDEN["frames"]}
    last = json.dumps(GOLDEN["frames"][-1], ensure_ascii=False)
    lines = [last]
    for message in HONEST:
        if message.KIND not in known:
            golden = {"message": describe(message), "frame": encode_frame(message).hex()}
            lines.append(json.dumps(golden, ensure_ascii=False))
    text = FILE.read_text(encoding="utf-8")
    assert f"  {last}\n" in text
    FILE.write_text(
        text.replace(f"  {last}\n", "  " + ",\n  ".join(lines) + "\n"), encoding="utf-8"
    )


if __name__ == "__main__":
    record_new_messages()
