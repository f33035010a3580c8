"""The peer's half of an inference session: what to do with a step that arrives.

A session is (epoch, length): the epoch counts routes, so that what a forgotten route still sends
is recognised; the length is where the cached prefix ends. A step says where it begins
(`position`) and its number (`sequence`, growing within a session). Three comparisons pick one
action, nothing else is consulted; the first row that matches applies, as in `SessionState.decide`:

    epoch    sequence    position   action
    older    any         any        DROP       a zombie of an earlier route
    any      answered    any        RESEND     a repeat; its answer is still cached
    any      not newer   any        DROP       a repeat that is being computed or long gone
    any      any         beyond     GAP        tokens are missing; say where the prefix ends
    any      any         within     ROLLBACK   forget the prefix from position on, then execute
    any      any         at end     EXECUTE    the normal case

A step of a newer epoch moves the session to that epoch. `SessionState` holds no cache, stream or
clock: it is told what happened and says what follows.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ..errors import ErrorCode, LocalProtocolError, RefusedError
from ..messages.session import Step


class StepAction(Enum):
    """The action of the peer on a step."""

    EXECUTE = auto()
    ROLLBACK = auto()
    GAP = auto()
    RESEND = auto()
    DROP = auto()


MAX_CACHED_ANSWERS = 2
MAX_CACHED_ANSWER_BYTES = 128 * 2**10
"""Answers kept for a repeat: those of decode steps, such as one token of seven rows at width 8192
in 16 bits. Larger ones (prompts) are not kept, and a client that lost one replays. No budget counts
them, so a stranger's sessions must not make them much: 256 sessions hold at most 64 MiB."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The action for one step; `answer` is the cached frame of a RESEND."""

    action: StepAction
    answer: bytes = b""


def count_kept_tokens(position: int, row_map: Sequence[int] | None) -> int:
    """Return how many tokens of the prefix stand after a step that failed.

    Those before the step; none, if it was to move rows. They may have been moved already, which
    nobody can undo, and moving them once more would mix the prefixes up.

    >>> count_kept_tokens(7, None), count_kept_tokens(7, (1, 0))
    (7, 0)
    """
    return position if row_map is None else 0


class SessionState:
    """The state of one session at a peer, owned by the stream that opened it.

    `length` counts tokens of accepted steps, also while the last of them is being computed, so
    that a client may send the next one early. A fork begins with those of its prefix.
    """

    def __init__(self, num_rows: int, max_tokens: int, epoch: int, prefix_tokens: int = 0) -> None:
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        self.epoch = epoch
        self.length = prefix_tokens
        self.sequence = 0
        """Number of the newest step that was accepted."""
        self.done_sequence = 0
        """Number of the newest step that was completed."""
        self._answers: OrderedDict[int, bytes] = OrderedDict()
        # Steps in the engine by sequence: where each begins, where the prefix ends after it, and
        # where if it fails.
        self._running: dict[int, tuple[int, int, int]] = {}
        self._lost: set[int] = set()  # those in the engine that need tokens which were taken back

    def __repr__(self) -> str:
        return (
            f"<SessionState epoch {self.epoch}, {self.length} of {self.max_tokens} tokens, "
            f"sequence {self.sequence}>"
        )

    def decide(self, step: Step) -> StepDecision:
        """Say what to do with a step; changes nothing.

        Raises RefusedError when the step cannot be part of this session at all: other rows than
        were opened, or an end beyond the session's limit.
        """
        if step.epoch < self.epoch:
            return StepDecision(StepAction.DROP)
        if step.sequence in self._answers:
            return StepDecision(StepAction.RESEND, self._answers[step.sequence])
        if step.sequence <= self.sequence:
            return StepDecision(StepAction.DROP)
        if step.position > self.length:
            return StepDecision(StepAction.GAP)
        self._check_size(step)
        is_within = step.position < self.length
        return StepDecision(StepAction.ROLLBACK if is_within else StepAction.EXECUTE)

    def accept(self, step: Step) -> None:
        """Note that a step with action EXECUTE or ROLLBACK was handed to the engine."""
        if self.decide(step).action not in (StepAction.EXECUTE, StepAction.ROLLBACK):
            raise LocalProtocolError("only a step that was decided to execute can be accepted")
        self.epoch = step.epoch
        self.length = step.position + step.hidden.tokens
        self.sequence = step.sequence
        rest = count_kept_tokens(step.position, step.row_map)
        self._running[step.sequence] = (step.position, self.length, rest)

    def complete(self, sequence: int, answer: bytes) -> None:
        """Note the answer to an accepted step, so that a repeat can be answered again.

        Empty where there is none to keep: what was pushed is in the sender log.
        """
        self.done_sequence = max(self.done_sequence, sequence)
        # The engine takes steps in order: how the ones before this ended has no say any more.
        self._running = {n: extent for n, extent in self._running.items() if n > sequence}
        self._lost = {n for n in self._lost if n > sequence}
        if not answer or len(answer) > MAX_CACHED_ANSWER_BYTES:
            return
        self._answers[sequence] = answer
        while len(self._answers) > MAX_CACHED_ANSWERS:
            self._answers.popitem(last=False)

    def fail(self, sequence: int) -> None:
        """Note that an accepted step has no answer: the prefix ends at its `count_kept_tokens`.

        Steps behind it that need its tokens fail as well; one that rolls back further stands.
        """
        self._lost.discard(sequence)
        if sequence not in self._running:
            return  # it is lost, or a later step is done, and says where the prefix ends
        _, _, rest = self._running.pop(sequence)
        self.length = min(self.length, rest)
        for later in sorted(number for number in self._running if number > sequence):
            position, stop, rest = self._running[later]
            if position <= self.length:
                self.length = stop
            else:
                self.length = min(self.length, rest)
                del self._running[later]
                self._lost.add(later)

    def is_lost(self, sequence: int) -> bool:
        """Return whether a step stood on tokens that were taken back, whatever came out of it."""
        return sequence in self._lost

    def admit(self, epoch: int) -> None:
        """Move on to an epoch: what comes of older ones is a zombie's. Never moves back."""
        self.epoch = max(self.epoch, epoch)

    def _check_size(self, step: Step) -> None:
        if step.hidden.rows != self.num_rows:
            raise RefusedError(
                ErrorCode.BAD_FRAME,
                f"the session has {self.num_rows} rows, the step has {step.hidden.rows}",
            )
        if step.position + step.hidden.tokens > self.max_tokens:
            raise RefusedError(
                ErrorCode.TOO_LONG,
                f"the step ends at token {step.position + step.hidden.tokens}, "
                f"the session was opened for {self.max_tokens}",
            )
