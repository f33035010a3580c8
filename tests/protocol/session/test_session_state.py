"""The session table, and single decisions that follow from it."""

from dataclasses import replace

import pytest
from session_steps import make_step

from shoal.protocol.errors import ErrorCode, LocalProtocolError, RefusedError
from shoal.protocol.messages.session import Step
from shoal.protocol.session.session_state import (
    MAX_CACHED_ANSWER_BYTES,
    MAX_CACHED_ANSWERS,
    SessionState,
    StepAction,
)


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
    # epoch, sequence, then the action for a position at the end, within, beyond
    ("older", "new"): "DROP DROP DROP",
    ("older", "answered"): "DROP DROP DROP",
    ("older", "stale"): "DROP DROP DROP",
    ("same", "new"): "EXECUTE ROLLBACK GAP",
    ("same", "answered"): "RESEND RESEND RESEND",
    ("same", "stale"): "DROP DROP DROP",
    ("newer", "new"): "EXECUTE ROLLBACK GAP",
    ("newer", "answered"): "RESEND RESEND RESEND",
    ("newer", "stale"): "DROP DROP DROP",
}
EPOCHS = {"older": 0, "same": 1, "newer": 2}
SEQUENCES = {"answered": 1, "stale": 2, "new": 3}


@pytest.mark.parametrize(("epoch", "sequence"), EXPECTED)
def test_every_combination_has_its_action(epoch: str, sequence: str) -> None:
    state = make_state(length=5)
    state.accept(make_step(2, 5))  # which is being computed

    decisions = [
        state.decide(make_step(SEQUENCES[sequence], position, epoch=EPOCHS[epoch]))
        for position in (6, 5, 7)
    ]

    assert " ".join(each.action.name for each in decisions) == EXPECTED[epoch, sequence]


# ---- single decisions


@pytest.mark.parametrize(
    ("step", "action"),
    [
        (make_step(2, 5), StepAction.EXECUTE),
        (make_step(9, 5), StepAction.EXECUTE),  # sequences may leave numbers out
        (make_step(2, 4), StepAction.ROLLBACK),
        (make_step(2, 0), StepAction.ROLLBACK),
        (make_step(2, 6), StepAction.GAP),
        (make_step(1, 5), StepAction.RESEND),
        (make_step(1, 0, epoch=2), StepAction.RESEND),
        (make_step(0, 5), StepAction.DROP),
        (make_step(2, 5, epoch=0), StepAction.DROP),
        (make_step(2, 5, epoch=7), StepAction.EXECUTE),
        (make_step(2, 6, epoch=7), StepAction.GAP),
    ],
)
def test_decision_follows_from_the_three_comparisons_and_changes_nothing(
    step: Step, action: StepAction
) -> None:
    state = make_state(length=5)
    before = describe(state)

    decision = state.decide(step)

    assert decision.action is action
    assert decision.answer == (b"first" if action is StepAction.RESEND else b"")
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


def test_fork_begins_behind_its_prefix_with_sequences_of_its_own() -> None:
    state = SessionState(num_rows=1, max_tokens=8, epoch=1, prefix_tokens=5)

    assert state.length == 5
    assert state.decide(make_step(1, 5)).action is StepAction.EXECUTE
    assert state.decide(make_step(1, 2)).action is StepAction.ROLLBACK
    assert state.decide(make_step(1, 6)).action is StepAction.GAP
    assert state.decide(make_step(0, 5)).action is StepAction.DROP
    with pytest.raises(RefusedError):
        state.decide(make_step(1, 5, num_tokens=4))
    state.accept(make_step(1, 5))
    state.fail(1)
    assert state.length == 5


def test_session_can_be_filled_to_its_limit() -> None:
    state = make_state(length=5, max_tokens=8)

    assert state.decide(make_step(2, 5, num_tokens=3)).action is StepAction.EXECUTE


def test_what_would_not_be_executed_is_answered_whatever_its_size() -> None:
    state = make_state(length=5, max_tokens=8)

    assert state.decide(make_step(1, 5, 99, num_rows=2)).action is StepAction.RESEND
    assert state.decide(make_step(2, 6, 99, num_rows=2)).action is StepAction.GAP
    assert state.decide(make_step(2, 5, 99, epoch=0)).action is StepAction.DROP


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
        assert state.decide(make_step(sequence, position)).action is StepAction.EXECUTE
        state.accept(make_step(sequence, position))

    assert state.length == 3
    assert state.decide(make_step(2, 1)).action is StepAction.DROP  # being computed
    state.complete(1, b"1")
    state.complete(2, b"2")
    assert state.decide(make_step(2, 1)).answer == b"2"


def test_rollback_moves_the_end_of_the_prefix() -> None:
    state = make_state(length=5)

    state.accept(make_step(2, 2, 1))

    assert state.length == 3
    assert state.decide(make_step(3, 4)).action is StepAction.GAP
    assert state.decide(make_step(3, 3)).action is StepAction.EXECUTE


def test_newer_epoch_outlaws_the_older_one() -> None:
    state = make_state(length=5)

    state.accept(make_step(2, 5, epoch=4))

    assert state.epoch == 4
    assert state.decide(make_step(3, 6, epoch=3)).action is StepAction.DROP
    assert state.decide(make_step(3, 6, epoch=4)).action is StepAction.EXECUTE


def test_gap_does_not_move_the_epoch() -> None:
    state = make_state(length=5)

    assert state.decide(make_step(2, 9, epoch=4)).action is StepAction.GAP

    assert state.epoch == 1
    assert state.decide(make_step(3, 5, epoch=1)).action is StepAction.EXECUTE


def test_failed_step_is_taken_back() -> None:
    state = make_state(length=5)
    state.accept(make_step(2, 5, 3))

    state.fail(2)

    assert state.length == 5
    assert state.decide(make_step(2, 5, 3)).action is StepAction.DROP  # answered by a refusal
    assert state.decide(make_step(3, 5)).action is StepAction.EXECUTE


def test_failed_step_that_was_to_move_rows_leaves_nothing() -> None:
    state = make_state(length=5)
    state.accept(replace(make_step(2, 5), row_map=(0,)))
    state.accept(make_step(3, 6))

    state.fail(2)

    assert state.length == 0
    assert state.decide(make_step(4, 5)).action is StepAction.GAP
    assert state.decide(make_step(4, 0)).action is StepAction.EXECUTE


def test_steps_behind_a_failed_one_fall_with_it() -> None:
    state = make_state(length=5)
    for sequence, position in ((2, 5), (3, 6), (4, 7)):
        state.accept(make_step(sequence, position))

    state.fail(2)

    assert state.length == 5
    state.fail(3)
    state.fail(4)
    assert state.length == 5


def test_steps_that_stood_on_a_failed_one_are_known() -> None:
    state = make_state(length=5)
    for sequence, position in ((2, 5), (3, 6), (4, 5)):
        state.accept(make_step(sequence, position))

    state.fail(2)

    assert [state.is_lost(sequence) for sequence in (2, 3, 4)] == [False, True, False]
    state.fail(3)
    state.complete(4, b"4")
    assert not state.is_lost(3)
    assert state.length == 6


def test_failure_does_not_take_back_a_later_rollback() -> None:
    state = make_state(length=5)
    state.accept(make_step(2, 5))
    state.accept(make_step(3, 2, 7, epoch=2))

    state.fail(2)

    assert state.length == 9
    assert state.decide(make_step(4, 9, epoch=2)).action is StepAction.EXECUTE


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
    assert actions == [StepAction.DROP] * 3 + [StepAction.RESEND] * MAX_CACHED_ANSWERS
    assert state.decide(make_step(num_steps, 0)).answer == b"%d" % num_steps


def test_large_answers_are_not_kept_and_push_nothing_out() -> None:
    state = make_state(length=1)
    state.accept(make_step(2, 1))
    state.accept(make_step(3, 2))

    state.complete(2, bytes(MAX_CACHED_ANSWER_BYTES + 1))
    state.complete(3, bytes(MAX_CACHED_ANSWER_BYTES))

    assert state.decide(make_step(1, 0)).action is StepAction.RESEND
    assert state.decide(make_step(2, 1)).action is StepAction.DROP
    assert len(state.decide(make_step(3, 2)).answer) == MAX_CACHED_ANSWER_BYTES
