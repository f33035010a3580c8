"""Logs of what was sent over one boundary of a route, and its shortest replay.

A client keeps a `RecoveryLog` of each hop; a hop of a chain keeps a `SenderLog` of what it pushed.

The log follows everything that changes a cache: steps, rollbacks and the row maps of beam
search. Rebuilding a cache from it takes one replay of the prefix, not the history of every step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..errors import ErrorCode, LocalProtocolError, RefusedError

Payload = TypeVar("Payload")


@dataclass(frozen=True, slots=True, eq=False)
class LogEntry(Generic[Payload]):
    """Hidden states of tokens `[position, position + num_tokens)`, as they were sent.

    `num_row_maps` is how many row maps had been applied before: later ones moved these rows.
    """

    position: int
    num_tokens: int
    is_decoded: bool
    num_row_maps: int
    payload: Payload
    before: "LogEntry[Payload] | None" = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class _RowMap:
    """A row map of a log, its number among them, and the one before it."""

    rows: tuple[int, ...]
    number: int
    before: "_RowMap | None"


@dataclass(frozen=True, slots=True)
class ReplayPiece(Generic[Payload]):
    """A part of the prefix to send again.

    Of `payload`, take the first `num_tokens` tokens; row i of the rebuilt cache is row
    `rows[i]` of the payload (None: rows as they are).
    """

    position: int
    num_tokens: int
    is_decoded: bool
    rows: tuple[int, ...] | None
    payload: Payload


class RecoveryLog(Generic[Payload]):
    """The input of one hop of a session, owned by the client. The payloads are opaque here.

    Entries and row maps are linked from the newest to the oldest and never change, so a copy shares
    all of them: it costs the same however long the log is.
    """

    def __init__(self) -> None:
        self._newest: LogEntry[Payload] | None = None
        self._newest_row_map: _RowMap | None = None
        self.length = 0
        """Number of tokens per row that a replay rebuilds."""

    @property
    def num_row_maps(self) -> int:
        """Number of row maps that a replay composes, at most one for each entry."""
        return 0 if self._newest_row_map is None else self._newest_row_map.number

    def copy(self) -> "RecoveryLog[Payload]":
        """Return a log with the same content; entries and payloads are shared."""
        twin = RecoveryLog[Payload]()
        twin._newest, twin._newest_row_map = self._newest, self._newest_row_map
        twin.length = self.length
        return twin

    def append(
        self,
        position: int,
        num_tokens: int,
        payload: Payload,
        row_map: Sequence[int] | None = None,
        is_decoded: bool = False,
    ) -> None:
        """Note a step that a hop executed, in the order the hop applied it: roll back to
        `position`, permute the rows, append the tokens.

        Raises LocalProtocolError when the step is empty or would leave a gap.
        """
        if num_tokens < 1:
            raise LocalProtocolError(f"a step has at least one token, not {num_tokens}")
        self.rollback(position)
        if row_map is not None:
            self.permute(row_map)
        self._newest = LogEntry(
            position, num_tokens, is_decoded, self.num_row_maps, payload, self._newest
        )
        self.length = position + num_tokens

    def rollback(self, position: int) -> list[Payload]:
        """Forget everything from `position` on; row maps stay, they moved the rest as well.

        Returns the payloads of which nothing is left.
        """
        if not 0 <= position <= self.length:
            raise LocalProtocolError(
                f"cannot roll back to token {position}, the log holds {self.length}"
            )
        dropped: list[Payload] = []
        while self._newest is not None and self._newest.position >= position:
            dropped.append(self._newest.payload)
            self._newest = self._newest.before
        self.length = position
        self._join_last_row_maps()
        return dropped

    def permute(self, row_map: Sequence[int]) -> None:
        """Note that every row i continues the prefix of row `row_map[i]`."""
        if self._newest is not None and list(row_map) != list(range(len(row_map))):
            number = self.num_row_maps + 1
            self._newest_row_map = _RowMap(tuple(row_map), number, self._newest_row_map)
            self._join_last_row_maps()

    def _join_last_row_maps(self) -> None:
        """Make one of the row maps behind the last entry: no entry can tell them apart.

        So there are never more of them than entries, however often a search goes back.
        """
        if self._newest is None:
            self._newest_row_map = None
            return
        while (later := self._newest_row_map) is not None:
            earlier = later.before
            if earlier is None or later.number <= self._newest.num_row_maps + 1:
                return
            rows = tuple(earlier.rows[row] for row in later.rows)
            self._newest_row_map = _RowMap(rows, earlier.number, earlier.before)

    def _list(self) -> Iterator[LogEntry[Payload]]:
        """Return the entries, the newest first."""
        entry = self._newest
        while entry is not None:
            yield entry
            entry = entry.before

    def plan_replay(self) -> list[ReplayPiece[Payload]]:
        """Return the pieces that rebuild the prefix when sent in order.

        >>> log = RecoveryLog[str]()
        >>> log.append(0, 5, "prompt")
        >>> log.append(5, 1, "next", row_map=[1, 1], is_decoded=True)
        >>> [(piece.payload, piece.num_tokens, piece.rows) for piece in log.plan_replay()]
        [('prompt', 5, (1, 1)), ('next', 1, None)]
        """
        pieces: list[ReplayPiece[Payload]] = []
        rows: tuple[int, ...] | None = None
        row_map = self._newest_row_map
        stop = self.length
        for entry in self._list():
            while row_map is not None and row_map.number > entry.num_row_maps:
                moved = row_map.rows
                rows = moved if rows is None else tuple(moved[row] for row in rows)
                row_map = row_map.before
            pieces.append(
                ReplayPiece(
                    entry.position, stop - entry.position, entry.is_decoded, rows, entry.payload
                )
            )
            stop = entry.position
        pieces.reverse()
        return pieces


def group_pieces(
    pieces: Iterable[ReplayPiece[Payload]], max_tokens: int
) -> Iterator[list[ReplayPiece[Payload]]]:
    """Join generated tokens into steps of at most `max_tokens` tokens per row, in order.

    A rebuilt cache must hold what the lost one held, and a peer chooses its arithmetic by the
    size of a step. So the steps of a prompt stay alone, and where a rollback cut one short, it is
    sent whole; the next step begins where the rollback led and has the peer forget the rest.
    Generated tokens are computed one by one however many arrive.
    """
    group: list[ReplayPiece[Payload]] = []
    num_tokens = 0
    for piece in pieces:
        if group and (not piece.is_decoded or num_tokens + piece.num_tokens > max_tokens):
            yield group
            group, num_tokens = [], 0
        if piece.is_decoded:
            group.append(piece)
            num_tokens += piece.num_tokens
        else:
            yield [piece]
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class SentStep(Generic[Payload]):
    """A step as it was pushed; see `messages.Step` for the fields."""

    sequence: int
    position: int
    num_tokens: int
    payload: Payload
    row_map: tuple[int, ...] | None = None
    is_decoded: bool = False
    last_token_only: bool = False


class SenderLog(Generic[Payload]):
    """Everything a hop pushed for one session, owned by that session at its peer.

    A hop that takes the place of a lost one needs the prefix before the step under way, and then
    that step as it was, since the hops behind apply its row map or rollback as well. Which step
    that is, is known only when it is asked for. So the steps since the newest one that moved rows
    or went back are kept apart: a client asks for such a step only when all before are done.
    """

    def __init__(self) -> None:
        self._settled = RecoveryLog[Payload]()
        self._settled_sequence = 0
        # The first of these may go back or move rows; each other one begins where the last ended.
        self._recent: list[SentStep[Payload]] = []

    @property
    def length(self) -> int:
        """Number of tokens per row that were pushed and not rolled back."""
        if not self._recent:
            return self._settled.length
        return self._recent[-1].position + self._recent[-1].num_tokens

    @property
    def payloads(self) -> list[Payload]:
        """The steps that the log keeps in memory."""
        settled = [piece.payload for piece in self._settled.plan_replay()]
        return settled + [sent.payload for sent in self._recent]

    def begin_fork(self, position: int) -> "SenderLog[Payload]":
        """Return the log of a session that begins with the first tokens of this one."""
        twin = SenderLog[Payload]()
        twin._settled = self._settled.copy()
        for sent in self._recent:
            _append(twin._settled, sent)
        twin._settled.rollback(position)
        return twin

    def append(self, sent: SentStep[Payload]) -> list[Payload]:
        """Note a step that was pushed; returns the payloads of which nothing is left."""
        dropped: list[Payload] = []
        if sent.position != self.length or sent.row_map is not None:
            for earlier in self._recent:
                _append(self._settled, earlier)
                self._settled_sequence = earlier.sequence
            self._recent.clear()
            dropped = self._settled.rollback(sent.position)
        self._recent.append(sent)
        return dropped

    def plan(
        self, resume_sequence: int
    ) -> tuple[list[ReplayPiece[Payload]], list[SentStep[Payload]]]:
        """Return the prefix before a step, to rebuild it, and that step with all after it.

        Raises RefusedError when the prefix before it is not kept any more.

        >>> log = SenderLog[str]()
        >>> _ = log.append(SentStep(1, 0, 5, "prompt")), log.append(SentStep(2, 5, 1, "next"))
        >>> prefix, rest = log.plan(2)
        >>> [piece.payload for piece in prefix], [sent.payload for sent in rest]
        (['prompt'], ['next'])
        """
        if resume_sequence <= self._settled_sequence:
            raise RefusedError(
                ErrorCode.LOG_INCOMPLETE, f"step {resume_sequence} is no longer in the sender log"
            )
        prefix = self._settled.copy()
        rest: list[SentStep[Payload]] = []
        for sent in self._recent:
            if sent.sequence >= resume_sequence:
                rest.append(sent)
            else:
                _append(prefix, sent)
        return prefix.plan_replay(), rest


def _append(log: RecoveryLog[Payload], sent: SentStep[Payload]) -> None:
    log.append(sent.position, sent.num_tokens, sent.payload, sent.row_map, sent.is_decoded)
