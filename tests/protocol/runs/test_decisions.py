"""What members decide together, case by case, over a network that the test plays by hand."""

import pytest

from shoal.protocol import limits
from shoal.protocol.errors import LocalProtocolError, RemoteProtocolError
from shoal.protocol.ids import MemberId
from shoal.protocol.runs.decisions import (
    Accept,
    Accepted,
    Ballot,
    Decided,
    Decision,
    DecisionLog,
    Member,
    Message,
    Outgoing,
    Prepare,
    Promise,
    Refusal,
)


def make_members(names: str) -> tuple[Member, ...]:
    """Return members named by letters, which hold stages 0 and 1 in turn."""
    return tuple(Member(MemberId(name), number % 2) for number, name in enumerate(names))


def make_first(names: str) -> Decision:
    return Decision(0, bytes(32), make_members(names), b"first")


class Run:
    """The logs of some members, and messages that are delivered only among those connected."""

    def __init__(self, names: str) -> None:
        self.first = make_first(names)
        self.logs = {name: DecisionLog(name, self.first) for name in self.first.roster}

    def __getitem__(self, name: str) -> DecisionLog:
        return self.logs[MemberId(name)]

    def add(self, name: str, newest: Decision) -> DecisionLog:
        self.logs[MemberId(name)] = DecisionLog(MemberId(name), newest)
        return self[name]

    def send(self, sender: str, outgoing: Outgoing, connected: str) -> None:
        """Deliver messages and the answers to them, in order; what goes elsewhere is lost."""
        waiting = [(MemberId(sender), *each) for each in outgoing]
        while waiting:
            source, receiver, message = waiting.pop(0)
            if receiver in connected and source in connected:
                answers = self.logs[receiver].receive(source, message)
                waiting += [(receiver, *each) for each in answers]

    def propose(self, name: str, value: bytes, connected: str, members: str = "") -> Decision:
        """Have one member propose among those connected; return what is newest for it then."""
        log = self[name]
        named = make_members(members) if members else log.newest.members
        self.send(name, log.propose(log.newest.make_next(named, value)), connected)
        return log.newest


def get_kinds(outgoing: Outgoing) -> list[type[Message]]:
    return [type(message) for _, message in outgoing]


@pytest.mark.parametrize(
    ("num_members", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4), (7, 4)]
)
def test_decision_needs_a_majority_and_no_more(num_members: int, majority: int) -> None:
    names = "abcdefg"[:num_members]
    few, enough = Run(names), Run(names)

    assert few.propose("a", b"1", names[: majority - 1]).number == int(num_members == 1)
    assert enough.propose("a", b"1", names[:majority]).value == b"1"
    assert {enough[name].newest.number for name in names[:majority]} == {1}


def test_survivor_of_two_replicas_commits_in_a_run_of_two_stages() -> None:
    run = Run("abcde")

    assert run.propose("a", b"update 1", "abcde", "abcde").value == b"update 1"
    # b was killed, the only mate of d at stage 1.
    assert run.propose("d", b"update 2", "acde", "acde").value == b"update 2"
    assert run.propose("d", b"update 3", "acde").value == b"update 3"
    # After a change of members, the next kill is one of four.
    assert run.propose("d", b"update 4", "ade").value == b"update 4"


def test_one_half_of_a_run_decides_nothing() -> None:
    run = Run("abcd")

    assert run.propose("a", b"left", "ab").number == 0
    assert run.propose("c", b"right", "cd").number == 0
    assert run.propose("c", b"right", "bcd").value == b"right"


def test_half_of_a_run_cannot_remove_the_other_half() -> None:
    run = Run("abcd")

    assert run.propose("a", b"only a and b", "ab", "ab").number == 0
    assert run.propose("c", b"only c", "cd", "c").number == 0


def test_half_of_a_stage_that_was_removed_stays_out() -> None:
    run = Run("abcde")
    decided = run.propose("c", b"without a and b", "cde", "cde")

    assert run.propose("a", b"zombie's", "ab").number == 0
    assert run.propose("a", b"zombie's", "abcde") == decided
    assert not run["a"].is_member
    assert run["c"].newest == decided


def test_accepted_decision_is_carried_on_by_a_later_proposer() -> None:
    run = Run("abc")
    log_a, log_b = run["a"], run["b"]
    (_, prepare), _ = log_a.propose(run.first.make_next(run.first.members, b"of a"))
    ((_, promise),) = log_b.receive(log_a.member_id, prepare)
    (_, accept), _ = log_a.receive(log_b.member_id, promise)
    # a dies when b has accepted: nobody can tell whether a heard of it.
    log_b.receive(log_a.member_id, accept)

    assert run.propose("c", b"of c", "bc").value == b"of a"
    assert run.propose("c", b"of c", "bc").value == b"of c"


def test_of_two_accepted_decisions_the_one_of_the_higher_ballot_is_carried_on() -> None:
    run = Run("abcde")
    proposals = [run.first.make_next(run.first.members, value) for value in (b"low", b"high")]
    low, high = (
        Accept(Ballot(attempt, MemberId(name)), decision)
        for attempt, name, decision in zip((1, 2), "ba", proposals, strict=True)
    )
    run["c"].receive(MemberId("b"), low)
    run["d"].receive(MemberId("a"), high)

    assert run.propose("c", b"own", "cde").value == b"high"


def test_duelling_proposers_agree() -> None:
    run = Run("abc")
    log_a, log_b, log_c = run.logs.values()
    a, b, c = run.logs
    wanted_a, wanted_b = (run.first.make_next(run.first.members, value) for value in (b"a", b"b"))

    (_, prepare), _ = log_a.propose(wanted_a)
    ((_, promise),) = log_c.receive(a, prepare)
    (_, accept), _ = log_a.receive(c, promise)
    (_, outbidding), _ = log_b.propose(wanted_b)
    ((_, promise),) = log_c.receive(b, outbidding)
    ((_, refusal),) = log_c.receive(a, accept)
    (_, accept), _ = log_b.receive(c, promise)
    ((_, accepted),) = log_c.receive(b, accept)
    run.send("b", log_b.receive(c, accepted), "abc")

    assert refusal == Refusal(1, Ballot(1, b))
    assert {log.newest for log in run.logs.values()} == {wanted_b}


def test_proposer_outbids_what_refused_it() -> None:
    run = Run("abc")
    a = MemberId("a")
    run["c"].receive(a, Prepare(1, Ballot(9, a)))

    refused = run.propose("b", b"of b", "bc")
    (_, outbidding), *_ = run["b"].propose(run.first.make_next(run.first.members, b"of b"))

    assert refused == run.first
    assert outbidding == Prepare(1, Ballot(10, MemberId("b")))
    assert get_kinds(run["c"].receive(MemberId("b"), outbidding)) == [Promise]


def test_repeated_messages_change_nothing() -> None:
    run = Run("abc")
    log_a, log_b = run["a"], run["b"]
    a, b = log_a.member_id, log_b.member_id
    (_, prepare), _ = log_a.propose(run.first.make_next(run.first.members, b"1"))
    ((_, promise),) = log_b.receive(a, prepare)

    assert log_b.receive(a, prepare) == [(a, promise)]
    (_, accept), _ = log_a.receive(b, promise)
    assert log_a.receive(b, promise) == []
    ((_, accepted),) = log_b.receive(a, accept)
    assert log_b.receive(a, accept) == [(a, accepted)]
    assert get_kinds(log_a.receive(b, accepted)) == [Decided, Decided]
    assert log_a.receive(b, accepted) == []
    assert log_a.receive(b, promise) == []


def test_answers_of_one_member_count_once() -> None:
    log = Run("abcde")["a"]
    b, c = MemberId("b"), MemberId("c")
    (_, prepare), *_ = log.propose(log.newest.make_next(log.newest.members, b"1"))
    assert isinstance(prepare, Prepare)
    promise, accepted = Promise(1, prepare.ballot, None), Accepted(1, prepare.ballot)

    assert log.receive(b, promise) == log.receive(b, promise) == []
    assert get_kinds(log.receive(c, promise)) == 4 * [Accept]
    assert log.receive(b, accepted) == log.receive(b, accepted) == []
    assert get_kinds(log.receive(c, accepted)) == 4 * [Decided]


def test_answers_to_an_earlier_ballot_do_not_count() -> None:
    log = Run("abc")["a"]
    b = MemberId("b")
    wanted = log.newest.make_next(log.newest.members, b"1")
    first, second = (log.propose(wanted)[0][1] for _ in range(2))
    assert isinstance(first, Prepare)
    assert isinstance(second, Prepare)

    assert log.receive(b, Promise(1, first.ballot, None)) == []
    assert get_kinds(log.receive(b, Promise(1, second.ballot, None))) == 2 * [Accept]
    assert log.receive(b, Accepted(1, first.ballot)) == []
    assert get_kinds(log.receive(b, Accepted(1, second.ballot))) == 2 * [Decided]


def test_newcomer_takes_part_from_the_next_number_on() -> None:
    run = Run("abc")
    newcomer = run.add("n", run.first)

    with pytest.raises(LocalProtocolError, match="decision 0 names others than us"):
        newcomer.propose(run.first.make_next(run.first.members, b""))
    run.propose("a", b"with n", "abn", "abn")
    assert newcomer.is_member
    assert run.propose("n", b"of n", "bn").value == b"of n"


def test_newcomer_that_missed_its_decision_asks_for_it() -> None:
    run = Run("abc")
    newcomer = run.add("n", run.first)
    run.propose("a", b"with n", "abc", "abcn")

    run.send("n", [(MemberId("c"), Decided(newcomer.newest))], "cn")

    assert newcomer.newest.value == b"with n"


def test_member_is_told_by_one_that_it_does_not_know() -> None:
    run = Run("abc")
    run.add("n", run.first)
    run.propose("a", b"n for c", "acn", "abn")  # b has missed it, and now a dies

    assert run.propose("n", b"of n", "bn").number == 1  # b learns of n first
    assert run["b"].newest.value == b"n for c"
    assert run.propose("n", b"of n", "bn").value == b"of n"


def test_laggard_skips_to_the_newest_decision() -> None:
    run = Run("abcd")
    for number in range(1, 5):
        run.propose("a", b"%d" % number, "abc")
    log = run["d"]

    log.propose(run.first.make_next(run.first.members, b"long decided"))
    run.send("d", log.propose(run.first.make_next(run.first.members, b"late")), "bd")

    assert log.newest == run["a"].newest
    assert run.propose("d", b"5", "bcd").number == 5


def test_laggard_learns_from_a_proposal_that_it_cannot_take_part_in() -> None:
    run = Run("abc")
    run.propose("a", b"1", "ab")

    assert run.propose("a", b"2", "ac").number == 1
    assert run["c"].newest.value == b"1"
    assert run.propose("a", b"2", "ac").number == 2


def test_removed_member_learns_so_and_cannot_take_part() -> None:
    run = Run("abc")
    decided = run.propose("a", b"without c", "ab", "ab")
    zombie = run["c"]

    question = zombie.propose(run.first.make_next(run.first.members, b"of c"))
    assert run["a"].receive(zombie.member_id, question[0][1]) == [("c", Decided(decided))]
    run.send("a", [(zombie.member_id, Decided(decided))], "ac")

    assert not zombie.is_member
    with pytest.raises(LocalProtocolError, match="decision 1 names others than us"):
        zombie.propose(decided.make_next(decided.members, b"of c"))
    with pytest.raises(RemoteProtocolError, match="c is no member that decision 1 names"):
        run["a"].receive(zombie.member_id, Prepare(2, Ballot(1, zombie.member_id)))
    assert zombie.receive(MemberId("a"), Prepare(2, Ballot(1, MemberId("a")))) == []


def test_member_can_remove_itself() -> None:
    run = Run("abc")

    assert run.propose("a", b"a leaves", "abc", "bc").value == b"a leaves"
    assert run["b"].newest == run["c"].newest == run["a"].newest
    assert not run["a"].is_member


def test_process_that_comes_back_is_another_member() -> None:
    run = Run("abc")
    run.propose("a", b"1", "ab")
    restarted = run.add("c2", run.first)

    # The one of before has not been removed yet: nobody answers in its place.
    with pytest.raises(RemoteProtocolError, match="c2 is no member"):
        run["a"].receive(restarted.member_id, Promise(2, Ballot(1, MemberId("a")), None))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Prepare(1, Ballot(1, MemberId("c"))), "b sent a ballot of c"),
        (
            Accept(Ballot(1, MemberId("b")), Decision(1, bytes(32), make_members("abc"), b"")),
            "b sent a decision that does not follow",
        ),
        (
            Decided(Decision(1, bytes(32), make_members("abc"), b"")),
            "b sent a decision that does not follow",
        ),
        (
            Decided(Decision(0, bytes(32), make_members("abc"), b"another")),
            "b has another decision 0",
        ),
    ],
)
def test_message_that_no_member_sends_is_refused(message: Message, complaint: str) -> None:
    log = Run("abc")["a"]

    with pytest.raises(RemoteProtocolError, match=complaint):
        log.receive(MemberId("b"), message)

    fresh = log.propose(log.newest.make_next(log.newest.members, b""))
    assert [sent for _, sent in fresh] == 2 * [Prepare(1, Ballot(1, log.member_id))]


def test_stranger_that_names_others_is_not_believed() -> None:
    log = Run("abc")["a"]
    forged = Decision(7, bytes(32), make_members("yz"), b"")

    assert log.receive(MemberId("x"), Decided(forged)) == []
    assert log.newest.number == 0


def test_proposal_has_to_follow_the_newest_decision() -> None:
    run = Run("abc")
    stale = run.first.make_next(run.first.members, b"2")
    run.propose("a", b"1", "abc")

    with pytest.raises(LocalProtocolError, match="decision 1 does not follow decision 1"):
        run["a"].propose(stale)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"number": -1}, "-1 is no number"),
        ({"number": limits.MAX_DECISIONS + 1}, "is no number"),
        ({"previous": b""}, "a digest has 32 bytes, not 0"),
        ({"members": ()}, "a run cannot have 0 members"),
        (
            {"members": tuple(Member(MemberId(f"{n}"), 0) for n in range(257))},
            "a run cannot have 257 members",
        ),
        ({"members": make_members("aa")}, "each member once"),
        ({"members": (Member(MemberId(""), 0),)}, "a malformed member id"),
        ({"members": (Member(MemberId("a" * 97), 0),)}, "a malformed member id"),
        ({"members": (Member(MemberId("\x1b[2J"), 0),)}, "a malformed member id"),
        ({"members": (Member(MemberId("a"), -1),)}, "-1 is no stage"),
        ({"value": bytes(limits.MAX_DECISION_VALUE_BYTES + 1)}, "cannot hold 16385 bytes"),
    ],
)
def test_decision_is_bounded(changed: dict[str, object], complaint: str) -> None:
    fields = {"number": 1, "previous": bytes(32), "members": make_members("abc"), "value": b""}

    with pytest.raises(ValueError, match=complaint):
        Decision(**(fields | changed))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("attempt", [0, limits.MAX_BALLOT_ATTEMPTS + 1])
def test_ballot_is_bounded(attempt: int) -> None:
    with pytest.raises(ValueError, match="is no attempt"):
        Ballot(attempt, MemberId("a"))


def test_digest_covers_every_field() -> None:
    decisions = [
        Decision(1, bytes(32), make_members("ab"), b"v"),
        Decision(2, bytes(32), make_members("ab"), b"v"),
        Decision(1, bytes(31) + b"\1", make_members("ab"), b"v"),
        Decision(1, bytes(32), make_members("ba"), b"v"),
        Decision(1, bytes(32), (Member(MemberId("a"), 0), Member(MemberId("b"), 2)), b"v"),
        Decision(1, bytes(32), make_members("ab"), b"w"),
    ]

    assert len({decision.digest for decision in decisions}) == len(decisions)
