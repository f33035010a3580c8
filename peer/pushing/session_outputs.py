"""The outputs of one session: sent to its client, or pushed to the next hop and logged."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor

from ...kernels.wire_tensors import decode_as, encode_as, join_pieces
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import SharedBytes, Tenant
from ...protocol.ids import SessionId
from ...protocol.limits import MAX_CONTROL_BYTES, MAX_FRAME_BYTES, MAX_STEP_TOKENS
from ...protocol.messages.codec import encode_frame
from ...protocol.messages.session import Declined, HopSeconds, NextHop, Output, Step, choose_lane
from ...protocol.session.recovery_log import ReplayPiece, SenderLog, SentStep, group_pieces
from ...protocol.tensors import WireTensor, compute_num_bytes
from .push_links import PushLinks

_logger = logging.getLogger(__name__)


_MAX_LOGGED_BYTES = 256 * 2**20
"""Outputs of all sessions that were pushed to other peers and may have to be pushed again: 32,000
tokens of a model of width 4096 in 16 bits. A session that finds no room is not logged."""

_BEHIND_ALL = 2**64
"""A sequence that no step reaches."""


@dataclass(frozen=True)
class PushResources:
    """Resources that the outputs of all sessions of a peer share: connections, and the memory for
    outputs that are not sent yet or may have to be sent again.
    """

    links: PushLinks
    pending: SharedBytes
    logged: SharedBytes = field(
        default_factory=lambda: SharedBytes(_MAX_LOGGED_BYTES, times_free=3)
    )


class SessionOutputs:
    """The outputs of one session at its peer. `post` sends a frame to the session's client."""

    def __init__(
        self,
        session: SessionId,
        tenant: Tenant,
        resources: PushResources,
        post: Callable[[bytes], None],
    ) -> None:
        self.tenant = tenant
        self.next: NextHop | None = None
        self.post = post
        self._mirror: NextHop | None = None  # is to take the place of the next one
        self._session = session
        self._resources = resources
        self._links = resources.links
        self._log: SenderLog[WireTensor] | None = None
        self._logged_bytes = 0
        self._resume_sequence = 0
        self._newest_sequence = 0
        self._loss: RefusedError | None = None  # of the next hop, until the client names another

    def open(
        self, following: NextHop, log: SenderLog[WireTensor] | None, prefix_tokens: int
    ) -> None:
        """Push to a next hop from the first step on; a fork brings the log of its prefix."""
        self.next = following
        if prefix_tokens == 0:
            self._log = SenderLog[WireTensor]()
        elif log is not None:
            num_bytes = _count_bytes(log.payloads)
            if self._resources.logged.has_room_for(self.tenant, num_bytes):
                self._log = log
                self._count(num_bytes)
        self._links.prepare(following, self)

    def fork_log(self, prefix_tokens: int) -> SenderLog[WireTensor] | None:
        """Return the log of a session that begins with a prefix of this one; None: it is lost."""
        if self._log is None or self._log.length < prefix_tokens:
            return None
        return self._log.begin_fork(prefix_tokens)

    def give_up_log(self) -> None:
        """Keep nothing of what was pushed; nothing more is logged."""
        self._log = None
        self._count(-self._logged_bytes)

    def close(self) -> None:
        """Forget everything: the session is over."""
        self._settle(None)
        self.give_up_log()

    def is_pushed(self, sequence: int) -> bool:
        """Return whether the output of a step goes to the next hop."""
        return self.next is not None and sequence >= self.next.first_sequence

    def push(self, step: Step, output: Output) -> None:
        """Log the output of a step and, unless it is a replay, send it to the next hop.

        A new hop that is to take its place gets it as well, behind its replay, on the same lane.
        """
        assert self.next is not None
        self._newest_sequence = step.sequence
        hidden = output.hidden
        self._note(
            SentStep(
                step.sequence,
                step.position,
                hidden.tokens,
                hidden,
                step.row_map,
                step.is_decoded,
                step.last_token_only,
            )
        )
        if not self.is_pushed(step.sequence):
            return
        seconds = HopSeconds(output.queue_seconds, output.compute_seconds)
        # A replay may still be under way on the bulk lane.
        is_piece = step.is_piece or step.sequence <= self._resume_sequence
        pushed = replace(step, hidden=hidden, is_piece=is_piece, before=(*step.before, seconds))
        self._send(pushed, self.next)
        if self._mirror is not None:
            self._send(replace(pushed, is_piece=True), self._mirror)

    def redirect(self, following: NextHop | None, resume_sequence: int, length: int) -> int:
        """Push elsewhere from now on, or nowhere; return of how many steps the replay consists.

        Raises RefusedError when the log does not hold what the other one lacks.
        """
        if following is not None and self._has_all_before(resume_sequence, following):
            if following == self._mirror:
                # Outputs on their way stay there, and later ones follow them.
                following, self._resume_sequence = self._mirror, resume_sequence
            self._settle(following)
            return 0
        log = self._log
        if log is None and length == 0 and self.next is None:
            log = SenderLog[WireTensor]()  # nothing was computed that could be missing
        if log is None:
            raise RefusedError(
                ErrorCode.LOG_INCOMPLETE, "the pushed steps are no longer in the sender log"
            )
        prefix, rest = log.plan(resume_sequence)
        if following is not None and following.first_sequence >= resume_sequence:
            prefix = []  # it has what is before
        num_bytes = _count_bytes(piece.payload for piece in (*prefix, *rest))
        if not self._resources.pending.has_room_for(self.tenant, num_bytes):
            raise RefusedError(
                ErrorCode.LOG_INCOMPLETE, "this peer has no memory to resend the steps"
            )
        if following is not None:
            self._links.count_replay(self.tenant, num_bytes)
        self._settle(following)
        self._log, self._resume_sequence = log, resume_sequence
        if following is None:
            for sent in rest:
                self.post(encode_frame(self._make_output(sent)))
            self.give_up_log()
            return 0
        return self._replay(following, prefix, rest, num_bytes)

    def mirror(self, following: NextHop) -> int:
        """Push to a new hop as well from now on; return of how many steps its replay consists.

        That is 0 where the log does not hold what it lacks, or too much was sent again lately:
        then nothing is pushed there.
        """
        if self.next is None or self._log is None:
            return 0
        prefix, _ = self._log.plan(_BEHIND_ALL)
        num_bytes = _count_bytes(piece.payload for piece in prefix)
        if not prefix or not self._resources.pending.has_room_for(self.tenant, num_bytes):
            return 0
        try:
            self._links.count_replay(self.tenant, num_bytes)
        except RefusedError:
            return 0
        if self._mirror is not None:
            self._links.forget(self._mirror)
        self._mirror = following
        return self._replay(following, prefix, (), num_bytes)

    def _replay(
        self,
        following: NextHop,
        prefix: Sequence[ReplayPiece[WireTensor]],
        rest: Sequence[SentStep[WireTensor]],
        num_bytes: int,
    ) -> int:
        groups = _group_for_replay(prefix)
        frames = self._make_frames(following, groups, rest)
        self._resources.pending.count(self.tenant, num_bytes)
        self._links.replay(following, frames, num_bytes, self)
        return len(groups)

    def _has_all_before(self, resume_sequence: int, following: NextHop) -> bool:
        """Return whether a hop was pushed all there is before a step that is yet to come."""
        if resume_sequence <= self._newest_sequence:
            return False
        hops = (None if self._loss else self.next, self._mirror)
        return _locate(following) in [_locate(hop) for hop in hops if hop is not None]

    def _settle(self, following: NextHop | None) -> None:
        """Push to one hop, or to none, and to nobody else."""
        for hop in (self.next, self._mirror):
            if hop is not None and hop is not following:
                self._links.forget(hop)
        self._mirror = None
        self.next = following
        self._loss = None

    def pushes_to(self, following: NextHop) -> bool:
        """See `Sender`."""
        return following is self._mirror or (following is self.next and not self._loss)

    def note_left(self, num_bytes: int) -> None:
        """See `Sender`."""
        self._resources.pending.count(self.tenant, -num_bytes)

    def note_lost(self, following: NextHop) -> None:
        """See `Sender`. The client hears the same whatever was the reason."""
        detail = f"peer …{following.peer_id[-6:]} cannot be reached from here"
        self.refuse(following, RefusedError(ErrorCode.NEXT_UNREACHABLE, detail))

    def refuse(self, following: NextHop, refusal: RefusedError) -> None:
        """See `Sender`: the client decides what happens; it may have decided already.

        Nothing is said of a hop that is only about to be used: the client sees itself that
        nothing comes of it, and the session goes on without.
        """
        if following is self._mirror:
            self._mirror = None
        elif self.pushes_to(following):
            self._loss = refusal
            self._tell(refusal)

    def _note(self, sent: SentStep[WireTensor]) -> None:
        """Log an output, or give the log up where there is no room for it."""
        if self._log is None:
            return
        if not self._resources.logged.has_room_for(self.tenant, _count_bytes([sent.payload])):
            _logger.info("the sender log of a session exceeds its memory and is dropped")
            self.give_up_log()
            return
        dropped = self._log.append(sent)
        self._count(_count_bytes([sent.payload]) - _count_bytes(dropped))

    def _count(self, num_bytes: int) -> None:
        self._logged_bytes += num_bytes
        if num_bytes:
            self._resources.logged.count(self.tenant, num_bytes)

    def _send(self, step: Step, following: NextHop) -> None:
        if following is self.next and self._loss:
            self._tell(self._loss)  # it is logged: the client may have it sent elsewhere
            return
        frame = _encode_for(following, step)
        self._resources.pending.count(self.tenant, len(frame))
        self._links.push(following, choose_lane(step, len(frame)), frame, self)

    def _tell(self, refusal: RefusedError) -> None:
        self.post(encode_frame(Declined(self._session, 0, refusal.code, str(refusal))))

    def _make_frames(
        self,
        following: NextHop,
        groups: Sequence[Sequence[ReplayPiece[WireTensor]]],
        rest: Sequence[SentStep[WireTensor]],
    ) -> Iterator[bytes]:
        """Make the frames of a replay, and of the steps behind it, one by one: in the event loop
        the whole of a long one would hold up everybody.
        """
        replay = (_join(number, group) for number, group in enumerate(groups, 1))
        for sent in chain(replay, rest):
            step = Step(
                self._session,
                0,
                sent.sequence,
                sent.position,
                sent.payload,
                sent.row_map,
                sent.is_decoded,
                sent.last_token_only,
                is_piece=True,
            )
            yield _encode_for(following, step)

    def _make_output(self, sent: SentStep[WireTensor]) -> Output:
        return Output(self._session, 0, sent.sequence, sent.position, sent.payload)


def _encode_for(following: NextHop, step: Step) -> bytes:
    return encode_frame(replace(step, session=following.session, epoch=following.epoch))


def _group_for_replay(
    pieces: Sequence[ReplayPiece[WireTensor]],
) -> list[list[ReplayPiece[WireTensor]]]:
    """Return the pieces of a replay by the steps in which they are sent."""
    if not pieces:
        return []
    dtype, (rows, _, width) = pieces[0].payload.dtype, pieces[0].payload.shape
    token_bytes = compute_num_bytes(dtype, rows, 1, width)
    max_tokens = min(MAX_STEP_TOKENS, (MAX_FRAME_BYTES - MAX_CONTROL_BYTES) // token_bytes)
    return list(group_pieces(pieces, max_tokens))


def _join(number: int, group: Sequence[ReplayPiece[WireTensor]]) -> SentStep[WireTensor]:
    """Return a step of a replay; they are numbered from 1."""
    first = group[0]
    rows, _, width = first.payload.shape
    hidden_BTH = join_pieces([_decode(piece) for piece in group])
    data = encode_as(first.payload.dtype.name, hidden_BTH)
    hidden = WireTensor(first.payload.dtype, rows, hidden_BTH.shape[1], width, data)
    return SentStep(
        number,
        first.position,
        hidden.tokens,
        hidden,
        is_decoded=first.is_decoded,
        last_token_only=True,
    )


def _decode(piece: ReplayPiece[WireTensor]) -> ReplayPiece[Tensor]:
    wire = piece.payload
    payload = decode_as(wire.dtype.name, wire.data, wire.shape)
    return ReplayPiece(piece.position, piece.num_tokens, piece.is_decoded, piece.rows, payload)


def _locate(hop: NextHop) -> tuple[object, ...]:
    """Return what makes a session at another peer that one and no other."""
    return hop.peer_id, hop.endpoints, hop.session


def _count_bytes(payloads: Iterable[WireTensor]) -> int:
    return sum(memoryview(payload.data).nbytes for payload in payloads)
