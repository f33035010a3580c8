"""What a client sent over one boundary of a route, and the shortest way to send it again.

The log follows everything that changes a cache: steps, rollbacks and the row maps of beam
search. Rebuilding a cache from it takes one replay of the prefix, not the history of every step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import LocalProtocolError

Payload = TypeVar("Payload")


@dataclass(frozen=True, slots=True)
class LogEntry(Generic[Payload]):
    """Hidden states of tokens `[position, position + num_tokens)`, as they were sent.

    `num_row_maps` is how many row maps had been applied before: later ones moved these rows.
    """

    position: int
    num_tokens: int
    is_decoded: bool
    num_row_maps: int
    payload: Payload


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
    """The input of one hop of a session, owned by the client. The payloads are opaque here."""

    def __init__(self) -> None:
        self._entries: list[LogEntry[Payload]] = []
        self._row_maps: list[tuple[int, ...]] = []
        self._length = 0

    def __repr__(self) -> str:
        return f"<RecoveryLog of {self._length} tokens in {len(self._entries)} entries>"

    @property
    def length(self) -> int:
        """Number of tokens per row that a replay rebuilds."""
        return self._length

    def copy(self) -> "RecoveryLog[Payload]":
        """Return a log with the same content; the payloads are shared."""
        twin = RecoveryLog[Payload]()
        twin._entries, twin._row_maps = list(self._entries), list(self._row_maps)
        twin._length = self._length
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
        self._entries.append(
            LogEntry(position, num_tokens, is_decoded, len(self._row_maps), payload)
        )
        self._length = position + num_tokens

    def rollback(self, position: int) -> list[Payload]:
        """Forget everything from `position` on; row maps stay, they moved the rest as well.

        Returns the payloads of which nothing is left.
        """
        if not 0 <= position <= self._length:
            raise LocalProtocolError(
                f"cannot roll back to token {position}, the log holds {self._length}"
            )
        dropped: list[Payload] = []
        while self._entries and self._entries[-1].position >= position:
            dropped.append(self._entries.pop().payload)
        self._length = position
        self._join_last_row_maps()
        return dropped

    def permute(self, row_map: Sequence[int]) -> None:
        """Note that every row i continues the prefix of row `row_map[i]`."""
        if self._entries and list(row_map) != list(range(len(row_map))):
            self._row_maps.append(tuple(row_map))
            self._join_last_row_maps()

    def _join_last_row_maps(self) -> None:
        """Make one of the row maps behind the last entry: no entry can tell them apart.

        So there are never more of them than entries, however often a search goes back.
        """
        if not self._entries:
            self._row_maps.clear()
            return
        while len(self._row_maps) > self._entries[-1].num_row_maps + 1:
            later = self._row_maps.pop()
            self._row_maps[-1] = tuple(self._row_maps[-1][row] for row in later)

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
        num_applied = len(self._row_maps)
        stop = self._length
        for entry in reversed(self._entries):
            while num_applied > entry.num_row_maps:
                num_applied -= 1
                row_map = self._row_maps[num_applied]
                rows = row_map if rows is None else tuple(row_map[row] for row in rows)
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
