"""Asks other members of a run, each over streams that are kept for the next question."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from ...protocol.errors import (
    RemoteProtocolError,
    ShoalError,
    SilentError,
    UnavailableError,
)
from ...protocol.ids import MemberId, PeerId, SessionId, find_peer_id
from ...protocol.messages.codec import check_kind, encode_frame, read_answer
from ...protocol.messages.fields import Message
from ...protocol.messages.runs import (
    PIECE_BYTES,
    BytesReader,
    HeldOutPass,
    PartPass,
    PartPassed,
    PartsFetch,
    Question,
    Reduction,
    RunWelcome,
    StateFetch,
    StateFollows,
    SumFetch,
    Sums,
    cut_bytes,
    make_run_hello,
)
from ...protocol.messages.session import Queued
from ...protocol.net.clock import AnswerTimeout, Clock
from ...protocol.net.dialling import dial_peer, greet
from ...protocol.net.network import Presence
from ...protocol.net.tasks import cancel_all
from ...protocol.net.transport import Stream
from ...protocol.records.announcements import Announcement
from ...protocol.runs.deadlines import UsualTimes
from ...protocol.runs.run_record import RunRecord
from .questions import (
    FAILURES,
    AnswerMember,
    FrameCounts,
    MemberAnswer,
    NoteBytes,
    StillBusyError,
    ignore_bytes,
    make_question_id,
)

_logger = logging.getLogger(__name__)

_PEERS_AT_ONCE = 8
_LOOK_SECONDS = 0.2
"""How often to look whether more answers are needed."""

_MOST_KEPT = 8
"""Streams to one member that wait for the next question."""

_FRESH_SECONDS = 30.0
"""How old a reading of the directory may be: where a member listens hardly ever changes."""

_NUM_LOOKS = 5
"""How often a newcomer is sought: the leader that names it knows first where it listens."""

_SOON_SECONDS = 1.0
"""The same while nobody lets us in or a member is missing: then they are sought all the time."""


_Ask = Callable[[Stream, PeerId], Awaitable[MemberAnswer]]
"""Asks a peer something on a stream to it."""


class RemoteMembers:
    """The members of a run: this process itself, and those that announce the run.

    A member says at least every second that it is still at work, so one that is silent for longer
    than `silence_seconds` has stopped. One that does so without end has a deadline, too, which
    follows from how long questions of the same kind have taken.
    """

    def __init__(
        self,
        own: MemberId,
        record: RunRecord,
        presence: Presence,
        clock: Clock,
        silence_seconds: float,
        counts: FrameCounts,
    ) -> None:
        self.answer_here: AnswerMember | None = None
        """Answers questions to ourselves."""
        self._own = own
        self._record = record
        self._presence = presence
        self._clock = clock
        self._silence_seconds = silence_seconds
        self._counts = counts
        self._reached = set[MemberId]()
        self._kept: dict[MemberId, list[Stream]] = defaultdict(list)
        self._times: dict[tuple[str, float], UsualTimes] = {}
        """By the kind of a question, and how many silences it may last."""
        self._member_times: dict[MemberId, dict[tuple[str, float], UsualTimes]] = defaultdict(dict)
        """The same of each member: a slow one gets more time, and others do not."""

    async def ask(
        self,
        member: MemberId,
        question: Question,
        payload: bytes | memoryview = b"",
        most_bytes: int = 0,
        note_bytes: NoteBytes = ignore_bytes,
    ) -> MemberAnswer:
        """See Members.ask."""
        silences = _count_silences(question)
        if isinstance(question, StateFetch | SumFetch):
            silences += -(-most_bytes // PIECE_BYTES)  # each piece may take that long
        key, floor_seconds = (type(question).__name__, silences), silences * self._silence_seconds
        alike = self._times.setdefault(key, UsualTimes(floor_seconds))
        times = self._member_times[member].setdefault(key, UsualTimes(floor_seconds, alike))
        begun_at, seconds = self._clock.now(), times.deadline_seconds
        late = f"member …{find_peer_id(member)[-6:]} did not answer within {seconds:.0f} s"
        deadline = AnswerTimeout(seconds, late)
        try:
            async with deadline:
                if member == self._own:
                    assert self.answer_here is not None  # set before the run begins
                    answer = await self.answer_here(question, payload, self._own)
                else:
                    ask = partial(self._ask_on, question, payload, most_bytes, note_bytes)
                    answer = await self._ask_member(member, ask)
        except SilentError as error:
            if not deadline.has_expired:
                raise
            times.note_late()
            raise StillBusyError(str(error)) from error
        times.note(self._clock.now() - begun_at)
        return answer

    async def _ask_member(self, member: MemberId, ask: _Ask) -> MemberAnswer:
        kept = self._kept[member]
        if kept:
            try:
                return await self._ask_and_keep(kept.pop(), member, ask)
            except SilentError:
                raise
            except UnavailableError:
                pass  # it may have ended long ago; the member tells the same question again
        return await self._ask_and_keep(await self._dial(member), member, ask)

    async def _ask_and_keep(self, stream: Stream, member: MemberId, ask: _Ask) -> MemberAnswer:
        """Ask on a stream, which is kept where it can take the next question."""
        try:
            answer = await ask(stream, find_peer_id(member))
        except BaseException:
            await stream.close()
            raise
        if len(self._kept[member]) < _MOST_KEPT:
            self._kept[member].append(stream)
        else:
            await stream.close()
        return answer

    async def forget_others(self, members: Collection[MemberId]) -> None:
        """Hang up on all but these members, and forget how long they took: processes come and go,
        and anybody may have asked.
        """
        self._reached.intersection_update(members)
        for one in [one for one in self._member_times if one not in members]:
            del self._member_times[one]
        others = [one for one in self._kept if one not in members]
        for stream in [stream for one in others for stream in self._kept.pop(one)]:
            await stream.close()

    async def close(self) -> None:
        """Hang up on everybody."""
        await self.forget_others(())

    async def ask_peers(
        self,
        peers: Sequence[Announcement],
        question: Question,
        take: Callable[[MemberAnswer], None],
        is_enough: Callable[[], bool] = lambda: False,
    ) -> list[ShoalError]:
        """Ask peers at once, whichever members of the run they are, until that is enough.

        `take` gets the answers, and raises RemoteProtocolError for one that is wrong. Returns what
        failed.
        """
        turns = asyncio.Semaphore(_PEERS_AT_ONCE)

        async def ask(peer: Announcement) -> ShoalError | None:
            try:
                async with turns:
                    take(await self._ask_peer(peer, question))
            except FAILURES as error:
                _logger.info("…%s does not answer as asked: %s", peer.peer_id[-6:], error)
                return error
            return None

        asking = {asyncio.create_task(ask(peer)) for peer in peers}
        failures: list[ShoalError] = []
        try:
            while asking and not is_enough():
                done, asking = await asyncio.wait(asking, timeout=_LOOK_SECONDS)
                failures += [error for task in done if (error := task.result()) is not None]
        finally:
            await cancel_all(asking)
        return failures

    async def _ask_peer(self, peer: Announcement, question: Question) -> MemberAnswer:
        seconds = _count_silences(question) * self._silence_seconds
        late = f"peer …{peer.peer_id[-6:]} did not answer within {seconds:.0f} s"
        async with AnswerTimeout(seconds, late):
            stream = await self._open(peer, None)
            try:
                return await self._ask_on(question, b"", 0, ignore_bytes, stream, peer.peer_id)
            finally:
                await stream.close()

    async def list_peers(self) -> list[Announcement]:
        """Return the other peers that announce the run and may. Raises DirectoryError."""
        own, admits = self._presence.identity.peer_id, self._record.admits
        found = await self._presence.directory.lookup(self._record.model_id, _SOON_SECONDS)
        return [peer for peer in found if peer.peer_id != own and admits(peer.peer_id)]

    async def _dial(self, member: MemberId) -> Stream:
        """Dial a member where it was seen lately; where it does not answer, where it is now."""
        peer_id, dialled = find_peer_id(member), None
        failure = UnavailableError(f"the directory does not know member …{peer_id[-6:]}")
        for _ in range(0 if member in self._reached else _NUM_LOOKS):
            if await self._find(peer_id, _SOON_SECONDS) is not None:
                break
            await asyncio.sleep(_SOON_SECONDS)
        for max_age_seconds in (_FRESH_SECONDS, _SOON_SECONDS):
            peer = await self._find(peer_id, max_age_seconds)
            if peer is None or peer.all_endpoints == dialled:
                continue
            try:
                stream = await self._open(peer, member)
            except UnavailableError as error:
                dialled, failure = peer.all_endpoints, error
            else:
                self._reached.add(member)
                return stream
        raise failure

    async def _find(self, peer_id: PeerId, max_age_seconds: float) -> Announcement | None:
        found = await self._presence.directory.lookup(self._record.model_id, max_age_seconds)
        return next((one for one in found if one.peer_id == peer_id), None)

    async def _open(self, peer: Announcement, receiver: MemberId | None) -> Stream:
        clock, seconds = self._clock, self._silence_seconds
        name = f"member …{peer.peer_id[-6:]}"
        async with AnswerTimeout(seconds, f"{name} did not answer in time"):
            stream = await dial_peer(self._presence.transport, clock, peer, seconds)
            try:
                welcome, _ = await greet(stream, name, clock, model_id=self._record.model_id)
                if welcome.peer_id != peer.peer_id:
                    raise UnavailableError(f"another peer answers for {name}")
                hello = make_run_hello(
                    make_question_id(), self._presence.identity, welcome.nonce, self._record.run_id,
                    self._own, peer.peer_id, receiver,
                )  # fmt: skip
                await stream.send(encode_frame(hello))
                check_kind(read_answer(await stream.receive(), name), RunWelcome, name)
            except BaseException:
                await stream.close()
                raise
        return stream

    async def _ask_on(
        self,
        question: Question,
        payload: bytes | memoryview,
        most_bytes: int,
        note_bytes: NoteBytes,
        stream: Stream,
        peer_id: PeerId,
    ) -> MemberAnswer:
        name = f"member …{peer_id[-6:]}"
        question_id = question.question
        await self._send(stream, name, encode_frame(question))
        for piece in cut_bytes(question_id, payload):
            await self._send(stream, name, encode_frame(piece))
        message = await self._receive(stream, name, question_id)
        if not isinstance(message, PartPassed | Sums | StateFollows):
            return MemberAnswer(message)
        if message.num_bytes > most_bytes:
            raise RemoteProtocolError(f"{name} wants to send {message.num_bytes} bytes")
        reader = BytesReader(message.question, message.num_bytes)
        while not reader.is_complete:
            reader.take(await self._receive_next(stream, name, question_id))
            note_bytes(reader.num_taken)
        return MemberAnswer(message, reader.read())

    async def _send(self, stream: Stream, name: str, frame: bytes) -> None:
        async with AnswerTimeout(self._silence_seconds, f"{name} does not read"):
            await stream.send(frame)
        self._counts.note_sent(frame)

    async def _receive(self, stream: Stream, name: str, session: SessionId) -> Message:
        """Return the next message that is no sign of life."""
        while True:
            message = await self._receive_next(stream, name, session)
            if not isinstance(message, Queued):
                return message

    async def _receive_next(self, stream: Stream, name: str, session: SessionId) -> Message:
        async with AnswerTimeout(self._silence_seconds, f"{name} is silent"):
            frame = await stream.receive()
        answer = read_answer(frame, name, session)
        assert frame is not None  # that is an error
        self._counts.note_received(frame)
        return answer


def _count_silences(question: Question) -> float:
    """Return how many times `silence_seconds` what is asked may take longer than usual."""
    match question:
        case PartsFetch():
            return 1 / 3  # the run waits for it, and it is answered at once
        case PartPass() | HeldOutPass():
            return 3 * (1 + len(question.route))  # each member asks the next one
        case Reduction():
            return 9  # mates wait for each other twice
        case _:
            return 3
