"""What one hop of a chain has pushed to the next, and the shortest way to push it again."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import ErrorCode, RefusedError
from .recovery_log import RecoveryLog, ReplayPiece

Payload = TypeVar("Payload")


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

    def __repr__(self) -> str:
        return f"<SenderLog of {self._settled!r} and {len(self._recent)} steps>"

    @property
    def length(self) -> int:
        """Number of tokens per row that were pushed and not rolled back."""
        if not self._recent:
            return self._settled.length
        return self._recent[-1].position + self._recent[-1].num_tokens

    @property
    def payloads(self) -> list[Payload]:
        """What the log keeps in memory."""
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
