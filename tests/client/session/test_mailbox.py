"""What hops say unasked, and what is kept of it."""

from collections.abc import Iterable

import pytest

from shoal.client.session.hop_link import GapError, Mailbox, UnaskedOutputsError
from shoal.protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Declined, Gap, Opened, Output, Status
from shoal.protocol.tensors import WireDtype, WireTensor

HERE, THERE = SessionId(b"h" * 16), SessionId(b"t" * 16)


def make_output(sequence: int, session: SessionId = HERE) -> Output:
    tensor = WireTensor(WireDtype.FP32, 1, 1, 1, bytes(4))
    return Output(session, 1, sequence, 0, tensor)


def put_all(mailbox: Mailbox, messages: Iterable[Message]) -> None:
    for message in messages:
        mailbox.put(HERE, "peer", message, 10)


def test_only_outputs_that_are_expected_are_kept_and_given_once() -> None:
    mailbox = Mailbox(lambda: 100)
    mailbox.expect(HERE, 2)

    for sequence in (1, 2, 3):
        mailbox.put(HERE, "peer", make_output(sequence), 10)

    assert mailbox.take_output(HERE, 1) is None
    arrived = mailbox.take_output(HERE, 2)
    assert arrived is not None
    assert (arrived.output.sequence, arrived.num_bytes) == (2, 10)
    assert mailbox.take_output(HERE, 2) is None
    mailbox.put(HERE, "peer", make_output(2), 10)  # a repeat
    assert mailbox.take_output(HERE, 2) is None


def test_end_of_a_replay_is_known_whatever_its_length() -> None:
    mailbox = Mailbox(lambda: 100)
    mailbox.expect(HERE, 9)
    mailbox.expect_replay(HERE)
    for sequence in (1, 2, 3, 9):
        mailbox.put(HERE, "peer", make_output(sequence), 10)

    assert mailbox.take_output(HERE, 4) is None
    assert mailbox.take_output(HERE, 3) is not None
    mailbox.end_replay(HERE)
    assert mailbox.take_output(HERE, 3) is None
    assert mailbox.take_output(HERE, 9) is not None


def test_answers_of_a_hop_are_told_apart_by_their_order() -> None:
    mailbox = Mailbox(lambda: 100)
    first, second = mailbox.expect_status(HERE), mailbox.expect_status(HERE)

    mailbox.put(HERE, "peer", Status(HERE, 1, 2, 3, num_replayed=4), 10)
    assert mailbox.find_status(HERE, second) is None
    mailbox.put(HERE, "peer", Status(HERE, 1, 5, 6), 10)

    statuses = mailbox.find_status(HERE, first), mailbox.find_status(HERE, second)
    assert [status and status.sequence for status in statuses] == [2, 5]


def test_answers_that_nobody_waits_for_take_no_room() -> None:
    mailbox = Mailbox(lambda: 100)

    for sequence in range(100):
        mailbox.expect_status(HERE)
        mailbox.put(HERE, "peer", Status(HERE, 1, sequence, 0), 10)

    kept = [number for number in range(1, 101) if mailbox.find_status(HERE, number)]
    assert len(kept) < 10


def test_hop_that_goes_on_saying_how_it_is_breaks_the_protocol() -> None:
    mailbox = Mailbox(lambda: 100)
    mailbox.expect_status(HERE)

    with pytest.raises(RemoteProtocolError, match="without being asked"):
        put_all(mailbox, (Status(HERE, 1, sequence, 0) for sequence in range(100)))


@pytest.mark.parametrize("is_replaying", [False, True])
def test_hop_that_goes_on_answering_unasked_breaks_the_protocol(is_replaying: bool) -> None:
    mailbox = Mailbox(lambda: 100)
    if is_replaying:
        mailbox.expect_replay(HERE)

    put_all(mailbox, map(make_output, range(1, 200)))

    assert isinstance(mailbox.trouble(HERE), UnaskedOutputsError)
    mailbox.forgive(HERE)
    put_all(mailbox, [make_output(200)])
    assert mailbox.trouble(HERE) is None


def test_hop_that_repeats_an_answer_for_ever_breaks_the_protocol() -> None:
    mailbox = Mailbox(lambda: 100)
    mailbox.expect(HERE, 1)

    put_all(mailbox, 200 * [make_output(1)])

    assert isinstance(mailbox.trouble(HERE), UnaskedOutputsError)


def test_late_answers_to_steps_that_were_given_up_are_no_fault() -> None:
    mailbox = Mailbox(lambda: 2000)
    for sequence in range(1, 1000):
        mailbox.expect(HERE, sequence)
    mailbox.forget_steps()

    for sequence in range(1, 1000):
        mailbox.put(HERE, "peer", make_output(sequence), 10)

    assert mailbox.trouble(HERE) is None
    assert mailbox.take_output(HERE, 1) is None


def test_standby_answers_every_step_of_a_session_unasked() -> None:
    newest = 0
    mailbox = Mailbox(lambda: newest)
    mailbox.expect_replay(HERE)

    for newest in range(1, 1000):
        mailbox.put(HERE, "peer", make_output(newest), 10)

    assert mailbox.take_output(HERE, 999) is not None


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Gap(HERE, 1, 2, 3), GapError),
        (Declined(HERE, 2, ErrorCode.BUSY, "later"), RefusedError),
        (Declined(None, 0, ErrorCode.DRAINING, "bye"), RefusedError),
    ],
)
def test_refusal_or_gap_of_a_hop_is_trouble(message: Message, kind: type[Exception]) -> None:
    mailbox = Mailbox(lambda: 100)

    mailbox.put(HERE, "peer", message, 10)

    assert isinstance(mailbox.trouble(HERE), kind)
    assert mailbox.trouble(THERE) is None


@pytest.mark.parametrize(
    "message",
    [
        Opened(HERE, 1, 0.0, 0),
        make_output(1, THERE),
        Status(THERE, 1, 0, 0),
        Gap(THERE, 1, 0, 0),
    ],
)
def test_whatever_else_a_hop_says_breaks_the_protocol(message: Message) -> None:
    mailbox = Mailbox(lambda: 100)

    with pytest.raises(RemoteProtocolError):
        mailbox.put(HERE, "peer", message, 10)


def test_first_trouble_counts_until_it_is_seen_to() -> None:
    mailbox = Mailbox(lambda: 100)
    first = UnavailableError("it broke")
    mailbox.put_trouble(HERE, first)
    mailbox.put_trouble(HERE, UnavailableError("and broke again"))

    assert mailbox.trouble(HERE) is first
    mailbox.forgive(HERE)
    assert mailbox.trouble(HERE) is None
