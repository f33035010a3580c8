"""A stage of a run as a workload: other members ask, one question at a time on a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

from ...protocol.errors import (
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    UnavailableError,
)
from ...protocol.fair_share import BUSY_SECONDS
from ...protocol.ids import MemberId, SessionId, find_peer_id
from ...protocol.messages.codec import encode_frame
from ...protocol.messages.fields import Message
from ...protocol.messages.runs import (
    BytesReader,
    HeldOutPass,
    PartPass,
    Question,
    RunFetch,
    RunFollows,
    RunHello,
    RunPiece,
    RunWelcome,
    check_run_hello,
    cut_bytes,
)
from ...protocol.net.clock import Clock
from ...protocol.runs.run_record import RunRecord
from ...protocol.spans import Span
from ..streams.client_stream import ClientStream, Handler, KeepAlive, StreamWork
from ..streams.service import Service, Workload
from ..streams.stream_host import MAX_PENDING_BYTES, PendingBytes, ServiceCounts, StreamHost
from .questions import AnswerMember, MemberAnswer

_MAX_STREAMS = 1024
_IDLE_SECONDS = 600.0
_ROOM_SECONDS = 60.0


class RunWorkload(Workload):
    """Leads the questions of other members to `answer`, and shows the record of the run."""

    def __init__(
        self,
        record: RunRecord,
        member_id: MemberId,
        answer: AnswerMember,
        find_input_bytes: Callable[[PartPass | HeldOutPass, MemberId], int],
        note_change: Callable[[], None],
        is_late: Callable[[], bool],
    ) -> None:
        """`find_input_bytes` says how many bytes a part of a member may bring. `is_late`: nobody is
        to wait for us any more.
        """
        self.record = record
        self.member_id = member_id
        self.answer = answer
        self.find_input_bytes = find_input_bytes
        self.is_late = is_late
        self.asking: list[MemberId | None] = []
        """The senders of the questions that are under way; None: a stream without a RunHello."""
        self._note_change = note_change

    @property
    def is_idle(self) -> bool:
        return not self.asking

    def accept(self, stream: ClientStream) -> StreamWork:
        return _RunStreamWork(self, stream)

    def count(self) -> Mapping[str, int]:
        return {"run questions": len(self.asking)}

    def note_end(self, sender: MemberId | None) -> None:
        """Note that a question has ended."""
        self.asking.remove(sender)
        if not self.asking:
            self._note_change()


class _RunStreamWork(StreamWork):
    def __init__(self, workload: RunWorkload, stream: ClientStream) -> None:
        self._workload = workload
        self._stream = stream
        self._keep_alive = KeepAlive(stream.answers, lambda: None if workload.is_late() else 0.0)
        self._coming: tuple[Question | RunFetch, BytesReader] | None = None
        """A question, and as much as has come of the bytes behind it."""
        self._task: asyncio.Task[None] | None = None
        self._sender: MemberId | None = None
        """The member that asks, which has proved its id."""

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {
            RunHello: self._greet,
            RunFetch: self._begin,
            **dict.fromkeys(get_args(Question), self._begin),
            RunPiece: self._take,
        }

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    @property
    def is_in_use(self) -> bool:
        return self._sender is not None

    def stop(self) -> None:
        self._keep_alive.stop()
        if self._task is not None:
            self._task.cancel()

    def _greet(self, hello: RunHello) -> None:
        """Take a sender for the member that it proves to be. Raises RefusedError where it looks
        for another one than us, or where the run does not admit it.
        """
        if self._sender is not None:
            raise RemoteProtocolError("a member says who it is once")
        work = self._workload
        check_run_hello(hello, self._stream.nonce, find_peer_id(work.member_id))
        if hello.run_id.hex() != work.record.run_id or hello.receiver not in (None, work.member_id):
            raise RefusedError(ErrorCode.WRONG_MODEL, "another member of a run is looked for")
        if not work.record.admits(find_peer_id(hello.sender)):
            detail = "the owner of the run does not admit this peer"
            raise RefusedError(ErrorCode.NOT_A_MEMBER, detail)
        self._sender = hello.sender
        self._stream.touch()
        self._stream.answers.say(RunWelcome(hello.question))

    def _begin(self, question: Question | RunFetch) -> None:
        """Take a question, and what follows it. Raises RemoteProtocolError during another one."""
        if self._task is not None or self._coming is not None:
            raise RemoteProtocolError("a stream takes one question of a run at a time")
        num_bytes = 0 if isinstance(question, RunFetch) else self._check_sender(question)
        self._stream.touch()
        self._coming = question, BytesReader(question.question, num_bytes)
        self._go_on(*self._coming)

    def _check_sender(self, question: Question) -> int:
        """Return how many bytes follow a question. Raises RemoteProtocolError or RefusedError where
        who asks may not.
        """
        if self._sender is None:
            raise RemoteProtocolError("a member of a run has to say first who it is")
        if not isinstance(question, PartPass | HeldOutPass):
            return 0
        num_bytes = question.num_bytes
        if num_bytes not in (0, self._workload.find_input_bytes(question, self._sender)):
            raise RefusedError(ErrorCode.BAD_VALUES, f"{num_bytes} bytes are no activations here")
        return num_bytes

    def _take(self, piece: RunPiece) -> None:
        if self._coming is None:
            raise RemoteProtocolError("a piece came without a question")
        self._stream.touch()
        question, reader = self._coming
        reader.take(piece)
        self._go_on(question, reader)

    def _go_on(self, question: Question | RunFetch, reader: BytesReader) -> None:
        """Answer as soon as the question is complete."""
        if not reader.is_complete:
            return
        self._coming = None
        if not isinstance(question, RunFetch):  # that is answered at once
            self._keep_alive.begin(question.question)
        self._workload.asking.append(self._sender)
        self._task = self._stream.begin(self._answer(question, reader.read()))
        self._task.add_done_callback(partial(self._finish, self._sender))

    def _finish(self, sender: MemberId | None, task: asyncio.Task[None]) -> None:
        self._task = None
        self._keep_alive.stop()
        self._workload.note_end(sender)

    async def _answer(self, question: Question | RunFetch, payload: memoryview) -> None:
        question_id: SessionId = question.question
        answers = self._stream.answers
        try:
            if isinstance(question, RunFetch):
                document = self._workload.record.document
                answer = MemberAnswer(RunFollows(question_id, len(document)), document)
            else:
                assert self._sender is not None  # or nothing was begun
                answer = await self._workload.answer(question, payload, self._sender)
            self._keep_alive.stop()
            answers.say(answer.message)
            for piece in cut_bytes(question_id, answer.payload):
                if answers.is_full:
                    await answers.wait_for_room(_ROOM_SECONDS)
                answers.post(encode_frame(piece))
        except RefusedError as error:
            self._keep_alive.stop()
            answers.refuse(question_id, error)
        except (UnavailableError, RemoteProtocolError, LocalProtocolError) as error:
            self._keep_alive.stop()
            refusal = RefusedError(ErrorCode.NEXT_UNREACHABLE, str(error), BUSY_SECONDS)
            answers.refuse(question_id, refusal)


def make_run_service(
    workload: RunWorkload,
    whole: Span,
    clock: Clock,
    changed: asyncio.Event,
    counts: ServiceCounts,
) -> Service:
    """Return what serves the streams of a run of so many blocks, and counts them with all others of
    the peer; see Service for `changed`.
    """
    host = StreamHost(
        peer_id=find_peer_id(workload.member_id),
        model_id=workload.record.model_id,
        span=whole,
        clock=clock,
        idle_seconds=_IDLE_SECONDS,
        pending=PendingBytes(MAX_PENDING_BYTES),
        parked=None,
        knows_members=True,
        counts=counts,
    )
    return Service(host, [workload], _MAX_STREAMS, changed)
