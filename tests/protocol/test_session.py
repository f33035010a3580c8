"""The session table, and a peer that follows it against a client that knows what it meant."""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from shoal.protocol.errors import ErrorCode, LocalProtocolError, RefusedError
from shoal.protocol.ids import SessionId
from shoal.protocol.messages import Step
from shoal.protocol.session import (
    MAX_CACHED_ANSWER_BYTES,
    MAX_CACHED_ANSWERS,
    TRANSITIONS,
    Action,
    EpochOrder,
    PositionOrder,
    SequenceOrder,
    SessionState,
    choose_action,
)
from shoal.protocol.tensors import WireCodec, WireDtype, WireTensor

SESSION = SessionId(b"s" * 16)
COMBINATIONS = list(itertools.product(EpochOrder, SequenceOrder, PositionOrder))


def make_step(
    sequence: int, position: int, num_tokens: int = 1, epoch: int = 1, num_rows: int = 1
) -> Step:
    data = bytes(2 * num_rows * num_tokens)
    hidden = WireTensor(WireDtype.BF16, WireCodec.RAW, num_rows, num_tokens, 1, data)
    return Step(SESSION, epoch, sequence, position, hidden)


def make_state(length: int = 0, max_tokens: int = 100) -> SessionState:
    """Return a session in epoch 1 whose first step, sequence 1, filled `length` tokens."""
    state = SessionState(num_rows=1, max_tokens=max_tokens, epoch=1)
    if length:
        state.accept(make_step(1, 0, length))
        state.complete(1, b"first")
    return state


def describe(state: SessionState) -> tuple[object, ...]:
    return tuple(repr(value) for value in vars(state).values())


# ---- the table

EXPECTED = {
    # epoch, sequence, then the action for a position AT_END, WITHIN, BEYOND
    ("OLDER", "NEW"): "DROP DROP DROP",
    ("OLDER", "ANSWERED"): "DROP DROP DROP",
    ("OLDER", "STALE"): "DROP DROP DROP",
    ("SAME", "NEW"): "EXECUTE ROLLBACK GAP",
    ("SAME", "ANSWERED"): "RESEND RESEND RESEND",
    ("SAME", "STALE"): "DROP DROP DROP",
    ("NEWER", "NEW"): "EXECUTE ROLLBACK GAP",
    ("NEWER", "ANSWERED"): "RESEND RESEND RESEND",
    ("NEWER", "STALE"): "DROP DROP DROP",
}
POSITIONS = ("AT_END", "WITHIN", "BEYOND")


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(o.name for o in c))
def test_every_combination_has_its_action(
    combination: tuple[EpochOrder, SequenceOrder, PositionOrder],
) -> None:
    epoch, sequence, position = combination
    actions = EXPECTED[epoch.name, sequence.name].split()

    assert choose_action(*combination).name == actions[POSITIONS.index(position.name)]


def list_matches(combination: tuple[object, ...]) -> list[int]:
    return [
        index
        for index, (*columns, _) in enumerate(TRANSITIONS)
        if all(
            column is None or value in column
            for column, value in zip(columns, combination, strict=True)
        )
    ]


def test_no_row_of_the_table_is_unreachable() -> None:
    matches = [list_matches(combination) for combination in COMBINATIONS]

    assert all(matches)
    assert {rows[0] for rows in matches} == set(range(len(TRANSITIONS)))
    assert {row[-1] for row in TRANSITIONS} == set(Action)


# ---- single decisions


@pytest.mark.parametrize(
    ("step", "action"),
    [
        (make_step(2, 5), Action.EXECUTE),
        (make_step(9, 5), Action.EXECUTE),  # sequences may leave numbers out
        (make_step(2, 4), Action.ROLLBACK),
        (make_step(2, 0), Action.ROLLBACK),
        (make_step(2, 6), Action.GAP),
        (make_step(1, 5), Action.RESEND),
        (make_step(1, 0, epoch=2), Action.RESEND),
        (make_step(0, 5), Action.DROP),
        (make_step(2, 5, epoch=0), Action.DROP),
        (make_step(2, 5, epoch=7), Action.EXECUTE),
        (make_step(2, 6, epoch=7), Action.GAP),
    ],
)
def test_decision_follows_from_the_three_comparisons_and_changes_nothing(
    step: Step, action: Action
) -> None:
    state = make_state(length=5)
    before = describe(state)

    decision = state.decide(step)

    assert decision.action is action
    assert decision.answer == (b"first" if action is Action.RESEND else b"")
    assert describe(state) == before


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (make_step(2, 5, num_rows=2), ErrorCode.BAD_FRAME),
        (make_step(2, 3, num_rows=2), ErrorCode.BAD_FRAME),
        (make_step(2, 5, num_tokens=4), ErrorCode.TOO_LONG),
        (make_step(2, 4, num_tokens=5, epoch=2), ErrorCode.TOO_LONG),
    ],
)
def test_step_of_the_wrong_size_is_refused_and_leaves_no_trace(step: Step, code: ErrorCode) -> None:
    state = make_state(length=5, max_tokens=8)
    before = describe(state)

    with pytest.raises(RefusedError) as refusal:
        state.decide(step)
    with pytest.raises(RefusedError):
        state.accept(step)

    assert refusal.value.code is code
    assert describe(state) == before


def test_session_can_be_filled_to_its_limit() -> None:
    state = make_state(length=5, max_tokens=8)

    assert state.decide(make_step(2, 5, num_tokens=3)).action is Action.EXECUTE


def test_what_would_not_be_executed_is_answered_whatever_its_size() -> None:
    state = make_state(length=5, max_tokens=8)

    assert state.decide(make_step(1, 5, 99, num_rows=2)).action is Action.RESEND
    assert state.decide(make_step(2, 6, 99, num_rows=2)).action is Action.GAP
    assert state.decide(make_step(2, 5, 99, epoch=0)).action is Action.DROP


@pytest.mark.parametrize(
    "step",
    [make_step(2, 6), make_step(2, 5, epoch=0), make_step(1, 5), make_step(0, 5)],
    ids=["gap", "older epoch", "answered", "stale"],
)
def test_only_executed_steps_can_be_accepted(step: Step) -> None:
    state = make_state(length=5)
    before = describe(state)

    with pytest.raises(LocalProtocolError):
        state.accept(step)

    assert describe(state) == before


# ---- sequences of steps


def test_steps_may_follow_before_the_first_is_answered() -> None:
    state = make_state()

    for sequence, position in ((1, 0), (2, 1), (3, 2)):
        assert state.decide(make_step(sequence, position)).action is Action.EXECUTE
        state.accept(make_step(sequence, position))

    assert state.length == 3
    assert state.decide(make_step(2, 1)).action is Action.DROP  # being computed
    state.complete(1, b"1")
    state.complete(2, b"2")
    assert state.decide(make_step(2, 1)).answer == b"2"


def test_rollback_moves_the_end_of_the_prefix() -> None:
    state = make_state(length=5)

    state.accept(make_step(2, 2, 1))

    assert state.length == 3
    assert state.decide(make_step(3, 4)).action is Action.GAP
    assert state.decide(make_step(3, 3)).action is Action.EXECUTE


def test_newer_epoch_outlaws_the_older_one() -> None:
    state = make_state(length=5)

    state.accept(make_step(2, 5, epoch=4))

    assert state.epoch == 4
    assert state.decide(make_step(3, 6, epoch=3)).action is Action.DROP
    assert state.decide(make_step(3, 6, epoch=4)).action is Action.EXECUTE


def test_gap_does_not_move_the_epoch() -> None:
    state = make_state(length=5)

    assert state.decide(make_step(2, 9, epoch=4)).action is Action.GAP

    assert state.epoch == 1
    assert state.decide(make_step(3, 5, epoch=1)).action is Action.EXECUTE


def test_failed_step_is_taken_back() -> None:
    state = make_state(length=5)
    state.accept(make_step(2, 5, 3))

    state.fail(2)

    assert state.length == 5
    assert state.decide(make_step(2, 5, 3)).action is Action.DROP  # answered by a refusal
    assert state.decide(make_step(3, 5)).action is Action.EXECUTE


def test_steps_behind_a_failed_one_fall_with_it() -> None:
    state = make_state(length=5)
    for sequence, position in ((2, 5), (3, 6), (4, 7)):
        state.accept(make_step(sequence, position))

    state.fail(2)

    assert state.length == 5
    state.fail(3)
    state.fail(4)
    assert state.length == 5


def test_failure_does_not_take_back_a_later_rollback() -> None:
    state = make_state(length=5)
    state.accept(make_step(2, 5))
    state.accept(make_step(3, 2, 7, epoch=2))

    state.fail(2)

    assert state.length == 9
    assert state.decide(make_step(4, 9, epoch=2)).action is Action.EXECUTE


def test_late_news_of_a_failure_changes_nothing() -> None:
    state = make_state(length=5)
    state.accept(make_step(2, 5))
    state.accept(make_step(3, 2, 7, epoch=2))

    state.complete(3, b"3")
    state.fail(2)

    assert state.length == 9


def test_unknown_failure_changes_nothing() -> None:
    state = make_state(length=5)

    state.fail(1)
    state.fail(77)

    assert state.length == 5


def test_few_answers_are_kept() -> None:
    state = make_state()
    num_steps = MAX_CACHED_ANSWERS + 3

    for sequence in range(1, num_steps + 1):
        state.accept(make_step(sequence, sequence - 1))
        state.complete(sequence, b"%d" % sequence)

    actions = [state.decide(make_step(n, n - 1)).action for n in range(1, num_steps + 1)]
    assert actions == [Action.DROP] * 3 + [Action.RESEND] * MAX_CACHED_ANSWERS
    assert state.decide(make_step(num_steps, 0)).answer == b"%d" % num_steps


def test_large_answers_are_not_kept_and_push_nothing_out() -> None:
    state = make_state(length=1)
    state.accept(make_step(2, 1))
    state.accept(make_step(3, 2))

    state.complete(2, bytes(MAX_CACHED_ANSWER_BYTES + 1))
    state.complete(3, bytes(MAX_CACHED_ANSWER_BYTES))

    assert state.decide(make_step(1, 0)).action is Action.RESEND
    assert state.decide(make_step(2, 1)).action is Action.DROP
    assert len(state.decide(make_step(3, 2)).answer) == MAX_CACHED_ANSWER_BYTES


# ---- a peer and an honest client, over streams that may be cut, repeated and overtaken


@dataclass
class Stream:
    """One ordered stream: steps up, answers down. `inbox` holds what the peer has not read."""

    epoch: int
    inbox: deque[Step] = field(default_factory=deque)
    sent: list[Step] = field(default_factory=list)
    answers: deque["Pending"] = field(default_factory=deque)


@dataclass
class Pending:
    """An answer that a peer owes or has: the tokens it was computed on, or what went wrong."""

    step: Step
    outcome: tuple[int, ...] | str | None = None


class Peer:
    """Follows SessionState, over the plainest KV cache there is: a list of tokens."""

    def __init__(self, tokens_of: dict[int, tuple[int, ...]], rng: random.Random) -> None:
        self.state = SessionState(1, 10_000, epoch=1)
        self.cache: list[int] = []
        self.executed: list[int] = []
        self._queue: deque[Pending] = deque()
        self._computed: deque[Pending] = deque()
        self._tokens_of = tokens_of
        self._rng = rng

    def read(self, stream: Stream) -> None:
        step = stream.inbox.popleft()
        decision = self.state.decide(step)
        if decision.action is Action.RESEND:
            stream.answers.append(Pending(step, tuple(decision.answer)))
        elif decision.action is Action.GAP:
            stream.answers.append(Pending(step, "gap"))
        elif decision.action in (Action.EXECUTE, Action.ROLLBACK):
            self.state.accept(step)
            pending = Pending(step)
            self._queue.append(pending)
            stream.answers.append(pending)

    def compute(self) -> None:
        """Execute the oldest step, or refuse it and forget the cache from its position on."""
        if not self._queue:
            return
        pending = self._queue.popleft()
        self._computed.append(pending)
        step = pending.step
        if step.position > len(self.cache) or self._rng.random() < 0.15:
            pending.outcome = "refused"
            del self.cache[step.position :]
            return
        self.cache[step.position :] = self._tokens_of[step.sequence]
        self.executed.append(step.sequence)
        pending.outcome = tuple(self.cache)

    def settle(self) -> None:
        """Note in the state what was computed, in that order, as the service does."""
        while self._computed:
            pending = self._computed.popleft()
            if pending.outcome == "refused":
                self.state.fail(pending.step.sequence)
            elif isinstance(pending.outcome, tuple):
                self.state.complete(pending.step.sequence, bytes(pending.outcome))

    def answer(self, stream: Stream) -> Pending | None:
        """Send the next answer, if it is ready."""
        if not stream.answers or stream.answers[0].outcome is None:
            return None
        self.settle()
        return stream.answers.popleft()


class HonestClient:
    """Appends, rolls back and sends early; knows for every step which tokens it stands on."""

    def __init__(self, rng: random.Random) -> None:
        self.tokens_of: dict[int, tuple[int, ...]] = {}
        self.streams = [Stream(epoch=1)]
        self.num_confirmed_steps = 0
        self._meant: dict[int, tuple[int, ...]] = {}  # sequence: the cache after it
        self._waiting: deque[Step] = deque()
        self._intended: tuple[int, ...] = ()
        self._confirmed: tuple[int, ...] = ()
        self._sequence = 0
        self._rng = rng

    def send(self) -> None:
        self._sequence += self._rng.choice((1, 1, 2))
        # Tokens are small numbers that rarely repeat, so that a mix-up shows.
        tokens = tuple(self._rng.randrange(256) for _ in range(self._rng.randint(1, 4)))
        stream = self.streams[-1]
        step = make_step(self._sequence, len(self._intended), len(tokens), stream.epoch)
        self._intended += tokens
        self.tokens_of[self._sequence] = tokens
        self._meant[self._sequence] = self._intended
        self._waiting.append(step)
        stream.inbox.append(step)
        stream.sent.append(step)

    def repeat(self) -> None:
        """Send something once more: on its stream, or on the newest one with its epoch."""
        stream = self._rng.choice(self.streams)
        if stream.sent:
            step = self._rng.choice(stream.sent[-6:])
            if step in self._waiting and stream is self.streams[-1]:
                stream.inbox.append(step)
            elif step not in self._waiting:
                target = self._rng.choice((stream, self.streams[-1]))
                target.inbox.append(replace(step, epoch=stream.epoch))

    def roll_back(self) -> None:
        if len(self._intended) < 200 and self._rng.random() < 0.7:
            return
        self._intended = self._intended[: self._rng.randint(0, len(self._intended))]

    def reconnect(self) -> None:
        """Give up all answers that are missing; what was sent may still arrive."""
        self.streams.append(Stream(self.streams[-1].epoch + 1))
        self._waiting.clear()
        common = 0
        while self._intended[: common + 1] == self._confirmed[: common + 1] and common < len(
            self._confirmed
        ):
            common += 1
        self._intended = self._intended[:common]

    def take(self, stream: Stream, answer: Pending) -> None:
        if stream is not self.streams[-1]:
            return
        step = answer.step
        if not self._waiting or self._waiting[0].sequence != step.sequence:
            return  # a repeat, or void because of an earlier failure
        self._waiting.popleft()
        if isinstance(answer.outcome, tuple):
            assert answer.outcome == self._meant[step.sequence]
            self._confirmed = answer.outcome
            self.num_confirmed_steps += 1
        else:
            assert answer.outcome == "refused", "a gap although nothing that came before failed"
            self._forget(step)

    def _forget(self, refused: Step) -> None:
        """Void what needed a refused step's tokens."""
        intended = self._meant[refused.sequence][: refused.position]
        kept: deque[Step] = deque()
        for step in self._waiting:
            if step.position <= len(intended):
                kept.append(step)
                intended = self._meant[step.sequence]
        self._waiting = kept
        self._confirmed = self._confirmed[: refused.position]
        self._intended = intended


@pytest.mark.parametrize("seed", range(40))
def test_peer_computes_only_what_an_honest_client_means(seed: int) -> None:
    rng = random.Random(seed)
    client = HonestClient(rng)
    peer = Peer(client.tokens_of, rng)

    for _ in range(1500):
        event = rng.random()
        # Mostly the newest stream: a peer that reads it too rarely falls behind what is sent.
        stream = rng.choice(client.streams[-3:] + [client.streams[-1]] * 4)
        if event < 0.15:
            client.send()
        elif event < 0.2:
            client.roll_back()
        elif event < 0.25:
            client.repeat()
        elif event < 0.26:
            client.reconnect()
        elif event < 0.5 and stream.inbox:
            peer.read(stream)
        elif event < 0.75:
            peer.compute()
        elif event < 0.8:
            peer.settle()
        else:
            answer = peer.answer(stream)
            if answer is not None:
                client.take(stream, answer)

    assert peer.executed == sorted(set(peer.executed)), "no step is executed twice or out of turn"
    assert client.num_confirmed_steps > 30
