"""Finds the record of a training run in a swarm, by its name or its id."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence

from ..errors import (
    DirectoryError,
    NewerRecordError,
    RefusedError,
    RemoteProtocolError,
    UnavailableError,
    UsageError,
)
from ..ids import SESSION_ID_BYTES, ModelId, PeerId, RunId, SessionId
from ..messages.codec import check_kind, encode_frame, read_answer
from ..messages.runs import BytesReader, RunFetch, RunFollows
from ..records.announcements import Announcement, PeerState, draw_by_address
from ..runs.run_record import (
    RunRecord,
    make_run_id,
    make_run_model_id,
    make_run_model_name,
    read_run_record,
)
from ..runs.training_run import TrainingRun
from .clock import AnswerTimeout, Clock
from .dialling import open_greeted
from .directory import Directory
from .network import Network
from .transport import Transport

_PEER_SECONDS = 10.0
"""How long one peer may take to show its record."""

_RUNS_AT_ONCE = 4

Search = Callable[[str], Awaitable[list[RunRecord]]]
"""Returns the records of this name or id that peers of the swarm show, each once."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_RUN_ID = re.compile(r"[0-9a-f]{64}")


def is_name_or_id(text: str) -> bool:
    """Return whether this can name a run."""
    return any(form.fullmatch(text) for form in (_NAME, _RUN_ID))


async def find_run(
    wanted: str, peer_id: PeerId, search: Search, own: TrainingRun | None = None
) -> RunRecord | None:
    """Return the record of the run of this name or id; None where no peer of the swarm shows it.

    Of runs of one name, those that are equal to `own` count. Raises UsageError where several are
    left, or where the run does not admit this peer, and DirectoryError where the swarm cannot be
    reached.
    """
    records = await search(wanted)
    if not records:
        return None
    equal = [one for one in records if one.run == own]
    return choose_run(wanted, equal or records, peer_id)


def choose_run(wanted: str, records: Sequence[RunRecord], peer_id: PeerId) -> RunRecord:
    """Return the only run of a name or id. Raises UsageError, also where it does not admit us."""
    if len(records) > 1:
        known = " and ".join(f"{one.run_id} of {one.owner}" for one in records)
        raise UsageError(
            f"this swarm has {len(records)} runs called {wanted}: {known}; give the id in place of "
            "the name"
        )
    (record,) = records
    if not record.admits(peer_id):
        raise UsageError(
            f"the owner of the run {record.run.name}, {record.owner}, does not admit this peer, "
            f"{peer_id}: name the key that it admits with --identity"
        )
    return record


async def search_runs(wanted: str, network: Network, clock: Clock) -> list[RunRecord]:
    """Return the records of this name or id that peers of the swarm show, each once.

    Raises DirectoryError where the swarm cannot be reached, and UsageError where all runs that it
    has of this name or id are ones that only a newer version of shoal can read.
    """
    transport, directory = await network.connect()
    try:
        return await fetch_records(wanted, transport, directory, clock)
    finally:
        await transport.close()
        await directory.close()


async def fetch_records(
    wanted: str, transport: Transport, directory: Directory, clock: Clock
) -> list[RunRecord]:
    """Return what `search_runs` does, over what is open already."""
    is_id = _RUN_ID.fullmatch(wanted) is not None
    model_ids = [make_run_model_id(RunId(wanted))] if is_id else await directory.list_models()
    turns = asyncio.Semaphore(_RUNS_AT_ONCE)

    async def look(model_id: ModelId) -> bytes | None:
        async with turns:
            peers = await _list_peers(directory, model_id, None if is_id else wanted)
            return await _fetch_first(model_id, peers, transport, clock)

    found = await asyncio.gather(*map(look, model_ids))
    records, newer = list[RunRecord](), list[NewerRecordError]()
    for document in found:
        try:
            if document is not None:
                records.append(read_run_record(document))
        except NewerRecordError as error:
            newer.append(error)
        except RemoteProtocolError:
            continue
    matching = [one for one in records if wanted in (one.run_id, one.run.name)]
    if newer and not matching:
        raise UsageError(f"run {wanted}: {newer[0]}") from newer[0]
    return matching


async def _list_peers(
    directory: Directory, model_id: ModelId, name: str | None
) -> list[Announcement]:
    """Return the peers of a run; none where it has another name. None: any name."""
    try:
        peers = await directory.lookup(model_id)
    except DirectoryError:  # it went away since it named the run
        return []
    return [
        peer
        for peer in peers
        if peer.state is not PeerState.OFFLINE
        and (name is None or peer.model_name == make_run_model_name(name))
    ]


async def _fetch_first(
    model_id: ModelId, peers: Sequence[Announcement], transport: Transport, clock: Clock
) -> bytes | None:
    """Return the record that the first honest peer shows, unread."""
    for peer in draw_by_address(peers, random.Random()):
        try:
            document = await _fetch_document(peer, transport, clock)
        except (UnavailableError, RefusedError, RemoteProtocolError):
            continue
        if make_run_model_id(make_run_id(document)) == model_id:
            return document
    return None


async def _fetch_document(peer: Announcement, transport: Transport, clock: Clock) -> bytes:
    name = f"peer …{peer.peer_id[-6:]}"
    stream, _ = await open_greeted(
        transport, clock, peer, peer.span, _PEER_SECONDS, names_model=True
    )
    try:
        async with AnswerTimeout(_PEER_SECONDS, f"{name} did not answer in time"):
            question = SessionId(secrets.token_bytes(SESSION_ID_BYTES))
            await stream.send(encode_frame(RunFetch(question)))
            answer = read_answer(await stream.receive(), name, question)
            reader = BytesReader(question, check_kind(answer, RunFollows, name).num_bytes)
            while not reader.is_complete:
                reader.take(read_answer(await stream.receive(), name, question))
    finally:
        await stream.close()
    return bytes(reader.read())
