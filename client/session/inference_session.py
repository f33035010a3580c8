"""The synchronous session that scripts use, with the tokens of its text."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

import torch
from torch import Tensor

from ...protocol.errors import UsageError
from ...protocol.spans import Span
from ..concurrency.portal import Portal
from ..routing.route import Hop
from ..settings.client_config import make_whole
from ..trace.trace import Handoff, Recorder, SessionFailover
from .deep_prompts import are_same, check_prompts, check_rows_stay, share_prompts
from .state import SessionContext, StepProgress, Waiting


class AsyncSession(Protocol):
    """A session on the client's loop; see `RemoteSession`."""

    state: SessionContext
    failovers: list[SessionFailover]
    handoffs: list[Handoff]

    @property
    def position(self) -> int: ...
    @property
    def hops(self) -> tuple[Hop, ...]: ...
    @property
    def standbys(self) -> list[Hop]: ...
    @property
    def spans_without_replica(self) -> tuple[Span, ...]: ...
    def check_rows(self, num_rows: int, row_map: Sequence[int] | None) -> None: ...
    def rollback(self, position: int) -> None: ...
    async def step(
        self,
        hidden_BTH: Tensor,
        row_map: Sequence[int] | None = None,
        is_decoded: bool = False,
        last_token_only: bool = False,
    ) -> Tensor: ...
    async def fork_into(self, fork: Self, position: int) -> None: ...
    async def close(self) -> None: ...


OpenRemote = Callable[[], AsyncSession]
"""Makes a session whose hops are chosen with its first step."""


class SequenceManager(Protocol):
    """The blocks of a client, as a session sees them; see `RemoteSequenceManager`."""

    @property
    def portal(self) -> Portal: ...
    def make_opener(self, max_length: int) -> OpenRemote: ...


class InferenceSession:
    """A generation over the swarm, for one thread at a time. Usually opened by a model.

    When `generate` drives the session, `output_ids` holds the tokens [B, T] of the text so far. A
    soft prompt may precede the text: the first `num_prompt_tokens` positions. `adapter` is the
    adapter that was active when the session was opened, with its weights of that time.
    `past_key_values` is the cache that models returned in this session, or None.
    """

    def __init__(self, sequence_manager: SequenceManager, max_length: int) -> None:
        """Open a session of at most `max_length` tokens per row over the blocks of a manager."""
        self._set_up(sequence_manager.make_opener(max_length), sequence_manager.portal)

    @classmethod
    def over(cls, open_remote: OpenRemote, portal: Portal) -> Self:
        """Return a session over what `open_remote` makes."""
        session = cls.__new__(cls)
        session._set_up(open_remote, portal)
        return session

    def _set_up(self, open_remote: OpenRemote, portal: Portal) -> None:
        self._open_remote = open_remote
        self._remote = open_remote()
        self._portal = portal
        self._thread_lock = threading.RLock()
        self._forking_lock = threading.Lock()  # a fork waits for another fork, and for nothing else
        self._closing_lock = threading.Lock()  # nothing is opened behind the back of `close`
        self._num_rows: int | None = None
        self._row_map: tuple[int, ...] | None = None
        self._earlier_failovers: list[SessionFailover] = []
        self._earlier_handoffs: list[Handoff] = []
        self._is_generating = False
        self._recorder: Recorder | None = None
        self.closed = False
        self.output_ids: Tensor | None = None
        self.num_prompt_tokens = 0
        self.adapter: object = None
        self.past_key_values: object = None

    def __repr__(self) -> str:
        return f"<InferenceSession of {self._remote!r}>"

    def __enter__(self) -> "InferenceSession":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def max_length(self) -> int:
        """Maximum number of tokens per row."""
        return self._remote.state.facts.max_tokens

    @property
    def position(self) -> int:
        """Index of the next token. Setting a lower one rolls the session back.

        Raises UsageError if the session is closed, and while generate() runs, for example in a
        streamer: the text would lose tokens that belong to the result.
        """
        return self._remote.position

    @position.setter
    def position(self, position: int) -> None:
        position = make_whole("position", position)
        with self.claim():
            self.check_is_idle()
            self._check_open()
            self.rollback(position)

    @property
    def text_length(self) -> int:
        """Number of tokens of the text, per row, in the peers' caches."""
        return max(0, self.position - self.num_prompt_tokens)

    def rollback(self, position: int) -> None:
        """Drop the tokens from `position` on; the caller has claimed the session."""
        if 0 < position < self.num_prompt_tokens:
            raise UsageError(
                f"the first {self.num_prompt_tokens} positions are a trained prompt, which cannot "
                "be cut; set session.position = 0 to begin anew"
            )
        self._remote.rollback(position)
        if self.output_ids is not None:
            self.output_ids = self.output_ids[:, : self.text_length]

    def fork(self, position: int | None = None) -> "InferenceSession":
        """Return a new session on the same hops that begins with the same tokens.

        With `position`, it begins with that many tokens, as after a rollback. Peers copy their
        caches, so nothing is computed again; for a peer that cannot copy, the fork's first step
        replays. Both sessions are independent afterwards, also on different threads, and each must
        be closed. Several threads may fork one session; they take turns. Raises UsageError if the
        session is closed, in use by another call, or has fewer tokens.
        """
        with self._forking_lock, self.claim():
            self.check_is_idle()
            at = self.position if position is None else make_whole("position", position)
            fork = InferenceSession.over(self._open_remote, self._portal)
            fork._remote.state.prompts_LBPH = self._remote.state.prompts_LBPH
            try:
                self._portal.run(self._remote.fork_into(fork._remote, at))
            except BaseException:
                fork.close()  # interrupted, perhaps when the peers had just opened it
                raise
            fork.output_ids, fork.num_prompt_tokens = self.output_ids, self.num_prompt_tokens
            fork.adapter = self.adapter
            if at > 0:
                fork._num_rows, fork._row_map = self._num_rows, self._row_map
            if position is not None:
                fork.rollback(at)
        return fork

    @property
    def num_rows(self) -> int | None:
        """Number of rows in the peers' caches; None before the first step.

        A step with another number of rows must begin at position 0.
        """
        return self._num_rows

    @property
    def last_token_id(self) -> Tensor | None:
        """The newest token of each row, [B, 1], or None."""
        return None if self.output_ids is None else self.output_ids[:, -1:]

    @last_token_id.setter
    def last_token_id(self, ids_B1: Tensor) -> None:
        """Replace that token, from which generate() continues. UsageError if there is none."""
        if self.output_ids is None or self.output_ids.shape[1] <= self.text_length:
            raise UsageError("the session has no newest token that peers have not computed yet")
        self.output_ids[:, -1:] = ids_B1

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the session runs through."""
        return len(self._remote.state.facts.span)

    @property
    def waiting(self) -> Waiting | None:
        """The peer in whose queue the session waits, with the estimated time, or None."""
        return self._remote.state.waiting

    @property
    def progress(self) -> StepProgress | None:
        """How many tokens of the step under way are through all blocks, or None between steps."""
        return self._remote.state.progress

    @property
    def sought(self) -> Span | None:
        """The blocks whose peer was lost and not yet replaced, or None."""
        return self._remote.state.sought

    @property
    def spans_without_replica(self) -> tuple[Span, ...]:
        """The blocks that no other peer with the same weights serves, by the newest announcements.

        They have no standby; if their peer is lost, they must wait for another one.
        """
        return self._remote.spans_without_replica

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops in use, in order; empty before the first step."""
        return self._remote.hops

    @property
    def failovers(self) -> tuple[SessionFailover, ...]:
        """All failovers so far."""
        return (*self._earlier_failovers, *self._remote.failovers)

    @property
    def standbys(self) -> tuple[Hop, ...]:
        """The hops for which a hot standby is ready, if standbys are enabled."""
        return tuple(self._remote.standbys)

    @property
    def handoffs(self) -> tuple[Handoff, ...]:
        """All handoffs so far: planned moves away from a peer that was leaving."""
        return (*self._earlier_handoffs, *self._remote.handoffs)

    def record(self, recorder: Recorder | None) -> None:
        """Record everything that the session does from now on; None stops recording."""
        self._recorder = recorder
        self._remote.state.recorder = recorder

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Exclude other threads within the `with` block.

        Raises UsageError at once if another thread uses the session.
        """
        if not self._thread_lock.acquire(blocking=False):
            raise UsageError("this session is in use by another thread; open one per thread")
        try:
            yield
        finally:
            self._thread_lock.release()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Claim the session for a call of generate(); its callbacks may not move it either."""
        with self.claim():
            self.check_is_idle()
            self._is_generating = True
            try:
                yield
            finally:
                self._is_generating = False

    def check_is_idle(self) -> None:
        """Raise UsageError while generate() runs: only generate() may then move the session."""
        with self.claim():
            if self._is_generating:
                raise UsageError(
                    "generate() is running in this session; roll back or continue when it has "
                    "returned"
                )

    def step(
        self,
        inputs: Tensor,
        prompts: Tensor | None = None,
        hypo_ids: Tensor | None = None,
        *,
        last_token_only: bool = False,
        is_decoded: bool | None = None,
    ) -> Tensor:
        """Send hidden states of the next tokens, [B, T, H]; return those after the last block.

        `hypo_ids` [B] names, for each row, the row whose prefix it continues; a step without tokens
        only reorders rows. `is_decoded` says that the tokens were generated one by one; a step of
        one token is, by default. `prompts`, [L, B, P, H] or [L, 1, P, H], are passed with the first
        step of a text: peers add them to the first P inputs of each block. Rows with different
        prompts cannot be reordered. Returns [B, T, H], or [B, 1, H] with `last_token_only`, in the
        dtype of the input. Raises the errors of `RemoteSession.step`, and UsageError if the number
        of rows differs from the prefix.
        """
        with self.claim():
            self.check_is_idle()
            return self.advance(
                inputs,
                hypo_ids,
                prompts,
                last_token_only=last_token_only,
                is_decoded=is_decoded,
            )

    def advance(
        self,
        hidden_BTH: Tensor,
        hypo_ids: Tensor | None,
        prompts: Tensor | None = None,
        *,
        last_token_only: bool,
        is_decoded: bool | None,
    ) -> Tensor:
        """Like `step`; the caller has claimed the session."""
        self._check_open()
        prompts, hypo_ids = leave_out_dummy(prompts), leave_out_dummy(hypo_ids)
        _check_is_tensor("hidden states", hidden_BTH)
        if hypo_ids is not None:
            _check_is_tensor("hypo_ids", hypo_ids)
        if hidden_BTH.dim() == 3:
            self._make_rows(hidden_BTH.shape[0])
            self._take_prompts(prompts, hidden_BTH)
        row_map = self._compose(hypo_ids)
        if self._remote.state.prompts_LBPH is not None:
            check_rows_stay(self._remote.state.prompts_LBPH, row_map)
        if hidden_BTH.dim() == 3 and hidden_BTH.shape[1] == 0:
            self._remote.check_rows(hidden_BTH.shape[0], row_map)
            self._row_map = row_map
            return hidden_BTH
        if is_decoded is None:
            is_decoded = hidden_BTH.dim() == 3 and hidden_BTH.shape[1] == 1
        step = self._remote.step(hidden_BTH.detach(), row_map, is_decoded, last_token_only)
        output_BTH = self._portal.run(step)
        self._row_map = None
        return output_BTH.to(hidden_BTH.dtype)

    def _make_rows(self, num_rows: int) -> None:
        """Let the session have so many rows: peers keep the number that they were opened with."""
        if self._num_rows not in (None, num_rows):
            if self.position > 0:
                raise UsageError(
                    f"the session holds {self.position} tokens of {self._num_rows} rows and the "
                    f"step has {num_rows}; set session.position = 0 to begin anew with other "
                    "rows, or open another session"
                )
            with self.beginning_anew():
                pass
        self._num_rows = num_rows

    def _take_prompts(self, prompts: Tensor | None, hidden_BTH: Tensor) -> None:
        """Let the text that begins with this step have deep prompts: peers get them with `Open`."""
        if prompts is not None:
            check_prompts(prompts, len(self._remote.state.facts.span), hidden_BTH)
            if self.position > 0:
                raise UsageError(
                    f"deep prompts belong to the beginning of a text, and {self.position} tokens "
                    "are there; set session.position = 0 to begin anew"
                )
        if self.position > 0 or hidden_BTH.shape[1] == 0:
            return
        shared = None if prompts is None else share_prompts(prompts)
        if are_same(shared, self._remote.state.prompts_LBPH):
            return
        if self.hops:
            with self.beginning_anew():
                self._num_rows = hidden_BTH.shape[0]
        self._remote.state.prompts_LBPH = shared

    @contextmanager
    def beginning_anew(self) -> Iterator[None]:
        """Start at position 0, with any number of rows; restore the session on failure.

        Within the block, the peers also keep the earlier tokens.
        """
        before = self._remote, self._num_rows, self._row_map
        with self._closing_lock:
            self._check_open()
            self._remote, self._num_rows, self._row_map = self._open_remote(), None, None
            self._remote.state.recorder = self._recorder
        used = before[0]
        try:
            yield
        except BaseException:
            with self._closing_lock:
                used = self._remote
                self._remote, self._num_rows, self._row_map = before
            if self.closed:  # by another thread, which closed only the new session
                self._hang_up(self._remote)
            raise
        finally:
            self._earlier_failovers += used.failovers
            self._earlier_handoffs += used.handoffs
            self._hang_up(used)

    def close(self) -> None:
        """Free the caches on all peers; safe to call twice and from any thread.

        A step that another thread is running raises UsageError.
        """
        with self._closing_lock:
            if self.closed:
                return
            self.closed = True
        if self._recorder is not None:
            self._recorder.end()  # saying goodbye is no part of the text
        self._hang_up(self._remote)

    def _hang_up(self, remote: AsyncSession) -> None:
        if not self._portal.is_closed:  # it hung up on everybody already
            self._portal.run(remote.close())

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("the session is closed; open a new one")

    def _compose(self, hypo_ids: Tensor | None) -> tuple[int, ...] | None:
        """Return the row map of this step after the one that waits from a step of no tokens."""
        if hypo_ids is None:
            return self._row_map
        rows = [int(row) for row in hypo_ids.to(torch.int64).flatten()]
        if self._row_map is None:
            return tuple(rows)
        if not all(0 <= row < len(self._row_map) for row in rows):
            raise UsageError(f"hypo_ids {rows} name rows that the session does not have")
        return tuple(self._row_map[row] for row in rows)


def leave_out_dummy(given: Tensor | None) -> Tensor | None:
    """Return None for an empty tensor, which scripts of PETALS pass where they have nothing.

    >>> leave_out_dummy(torch.empty(0)) is None
    True
    """
    return None if isinstance(given, Tensor) and given.numel() == 0 else given


def check_is_session(given: object) -> None:
    """Raise UsageError unless the object is a session."""
    if not isinstance(given, InferenceSession):
        raise UsageError(
            "session must be one that model.inference_session(...) opened, not "
            f"{type(given).__name__}"
        )


def _check_is_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise UsageError(f"{name} must be a tensor, not {type(given).__name__}")
