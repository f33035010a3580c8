"""The record of a run: what its owner has signed, which decides what is trained, and by whom.

The run id is the digest of the whole record, so a peer that knows the id knows owner, run and
admitted peers. A record vouches for itself: the peer id of the owner contains the key that signed
it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import NewerRecordError, RemoteProtocolError, UsageError
from ..identity import SIGNATURE_BYTES, Identity, public_key_of, verify
from ..ids import MODEL_ID_CHARACTERS, ModelId, PeerId, RunId
from ..limits import MAX_RUN_MEMBERS, MAX_RUN_RECORD_BYTES
from .training_run import TrainingRun

# One byte of version, the signature, and JSON, which spaces fill up to whole elements of a tensor.
_VERSION = b"\x01"
_CONTEXT = b"shoal run record 1\0"
_HEADER_BYTES = len(_VERSION) + SIGNATURE_BYTES
_ELEMENT_BYTES = 4

_MAX_NAME_CHARACTERS = 80
"""Of a setting that we do not know, in a message to the user."""


class _Terms(BaseModel):
    """The part of the record that the owner signs.

    It is written without what has its default, so that a run that uses nothing new can be read by
    versions that do not know what is new. Defaults therefore never change: the id of a run stands
    for them too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    owner: PeerId
    admitted: Annotated[tuple[PeerId, ...], Field(max_length=MAX_RUN_MEMBERS, strict=False)]
    run: TrainingRun


@dataclass(frozen=True)
class RunRecord:
    """A run as its owner has signed it; see `sign_run` and `read_run_record`."""

    document: bytes
    """The bytes that travel."""
    run_id: RunId
    owner: PeerId
    admitted: tuple[PeerId, ...]
    """The peers that may take part beside the owner; empty: all that the swarm admits."""
    run: TrainingRun

    @property
    def model_id(self) -> ModelId:
        """The model id under which members announce themselves."""
        return make_run_model_id(self.run_id)

    @property
    def model_name(self) -> str:
        """The name of that model."""
        return make_run_model_name(self.run.name)

    def admits(self, peer_id: PeerId) -> bool:
        """Return whether a peer may take part."""
        return not self.admitted or peer_id == self.owner or peer_id in self.admitted


def make_run_id(document: bytes) -> RunId:
    """Return the id of the run whose record these bytes are."""
    return RunId(hashlib.sha256(document).hexdigest())


def make_run_model_id(run_id: RunId) -> ModelId:
    """Return under which model the members of a run announce themselves."""
    return ModelId(run_id[:MODEL_ID_CHARACTERS])


def make_run_model_name(name: str) -> str:
    """Return what members of a run call the model that they announce, unlike any served one.

    >>> make_run_model_name("stories")
    'run/stories'
    """
    return f"run/{name}"


def sign_run(identity: Identity, run: TrainingRun, admitted: Iterable[str] = ()) -> RunRecord:
    """Return the record of a run whose owner has this identity.

    Raises UsageError where an id is no peer id, or where the record would be too large.
    """
    listed = tuple(map(PeerId, sorted(set(admitted))))
    if len(listed) > MAX_RUN_MEMBERS:
        raise UsageError(f"a run can admit {MAX_RUN_MEMBERS} peers, not {len(listed)}")
    terms = _Terms(owner=identity.peer_id, admitted=listed, run=run)
    content = terms.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    text += " " * (-(_HEADER_BYTES + len(text)) % _ELEMENT_BYTES)
    body = text.encode()
    document = _VERSION + identity.sign(_CONTEXT + body) + body
    try:
        record = read_run_record(document)
    except RemoteProtocolError as error:
        raise UsageError(f"this run cannot be begun: {error}") from error
    if record.run != run:
        raise UsageError("this run has values that JSON cannot carry")
    return record


def read_run_record(document: bytes) -> RunRecord:
    """Return the record in these bytes. Raises RemoteProtocolError, whatever they are.

    NewerRecordError: it has a setting, or a value of one, that this version does not know.
    """
    if len(document) > MAX_RUN_RECORD_BYTES:
        raise RemoteProtocolError(
            f"the record of a run has at most {MAX_RUN_RECORD_BYTES} bytes, not {len(document)}"
        )
    if len(document) <= _HEADER_BYTES:
        raise RemoteProtocolError("the record of the run is cut short")
    if not document.startswith(_VERSION):
        raise RemoteProtocolError(f"records of runs of version {document[0]} are unknown")
    signature, body = document[len(_VERSION) : _HEADER_BYTES], document[_HEADER_BYTES:]
    try:
        terms = _Terms.model_validate_json(body)
    except ValidationError as error:
        _check_known(error)
        raise RemoteProtocolError("the record of the run is malformed") from error
    for peer_id in terms.admitted:
        public_key_of(peer_id)
    if not verify(terms.owner, _CONTEXT + body, signature):
        raise RemoteProtocolError("the record of the run was not signed by the owner that it names")
    return RunRecord(document, make_run_id(document), terms.owner, terms.admitted, terms.run)


def _check_known(errors: ValidationError) -> None:
    for error in errors.errors(include_url=False, include_input=False):
        if error["type"] in ("extra_forbidden", "literal_error"):
            name = ".".join(map(str, error["loc"]))[:_MAX_NAME_CHARACTERS]
            raise NewerRecordError(
                f"this version of shoal does not know the setting {name!r} of the run, or its "
                "value: the run was made by a newer version of shoal; update shoal to take part"
            )
