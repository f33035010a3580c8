"""Random schedules of a run: whatever is lost, late, repeated or dead, members never disagree.

Everything in a schedule follows from its seed, which a failure names.
"""

import random
from collections import Counter, defaultdict
from contextlib import suppress

from shoal.protocol.errors import LocalProtocolError
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
)

NUM_SEEDS = 200
NUM_STEPS = 250
MAX_MEMBERS = 5


class Witness:
    """Reads every message and every log, and knows what was chosen, from that alone."""

    def __init__(self, first: Decision) -> None:
        self.chain = [first]
        self.proposed: dict[tuple[int, Ballot], Decision] = {}
        self.accepted_by: defaultdict[tuple[int, Ballot], set[MemberId]] = defaultdict(set)
        self.promised: dict[tuple[int, MemberId], Ballot] = {}
        self.seen: Counter[str] = Counter()

    def see_sent(self, sender: MemberId, message: Message) -> None:
        """Note a message; what a member sends to itself shows in what it sends to others."""
        self.seen[type(message).__name__] += 1
        match message:
            case Prepare() | Promise():
                self._see_promise(sender, message.number, message.ballot)
            case Accept():
                known = self.proposed.setdefault((message.number, message.ballot), message.decision)
                assert known == message.decision, "one ballot has two decisions"
                if message.ballot >= self.promised[message.number, sender]:
                    self.accepted_by[message.number, message.ballot].add(sender)
            case Accepted():
                self._see_promise(sender, message.number, message.ballot)
                self.accepted_by[message.number, message.ballot].add(sender)
            case _:
                return
        if isinstance(message, Accept | Accepted):
            self._check_carried(message.number)

    def _check_carried(self, number: int) -> None:
        """Check that what a majority has accepted is in every later ballot, known or not."""
        former = self.chain[number - 1]
        ballots = sorted(ballot for of_number, ballot in self.proposed if of_number == number)
        chosen = [each for each in ballots if self._has_quorum(number, each, former)]
        if chosen:
            later = {self.proposed[number, each] for each in ballots if each >= chosen[0]}
            assert len(later) == 1, f"decision {number} was chosen, and not carried on"

    def _has_quorum(self, number: int, ballot: Ballot, former: Decision) -> bool:
        quorum = self.accepted_by[number, ballot] & set(former.roster)
        return len(quorum) > len(former.members) / 2

    def _see_promise(self, sender: MemberId, number: int, ballot: Ballot) -> None:
        before = self.promised.get((number, sender), ballot)
        assert ballot >= before, f"{sender} broke its promise for {number}"
        self.promised[number, sender] = ballot

    def see_log(self, log: DecisionLog) -> None:
        """Check that a log says the same as all logs before it, and what was chosen."""
        number = log.newest.number
        if number < len(self.chain):
            assert log.newest == self.chain[number], f"two decisions have number {number}"
            return
        assert number == len(self.chain), f"nobody has seen decision {number - 1}"
        before = self.chain[-1]
        assert log.newest.previous == before.digest
        assert before.roster == (log.member_id,) or any(
            self._has_quorum(number, ballot, before)
            for (of_number, ballot), decision in self.proposed.items()
            if of_number == number and decision == log.newest
        ), f"decision {number} has no majority of the roster of {number - 1}"
        self.seen["decisions"] += 1
        self.seen["changes of members"] += before.members != log.newest.members
        proposers = {each.proposer for of_number, each in self.proposed if of_number == number}
        self.seen["contested"] += len(proposers) > 1
        self.chain.append(log.newest)


class Schedule:
    """Processes of a run, and the messages between them, in an order that a seed draws."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        names = [MemberId(f"m{number}") for number in range(self.rng.choice((1, 2, 3, 3, 3, 4, 5)))]
        first = Decision(0, bytes(32), tuple(Member(name, 0) for name in names), b"")
        self.logs = {name: DecisionLog(name, first) for name in names}
        self.witness = Witness(first)
        self.in_flight: list[tuple[MemberId, MemberId, Message]] = []
        self.cut_off: set[MemberId] = set()
        self.num_started = len(names)
        self.num_values = 0

    def play(self) -> None:
        actions = {
            self.deliver: 120,
            self.propose_something: 20,
            self.tell: 2,
            self.crash: 0.5,
            self.start: 2,
            self.cut: 2,
            self.heal: 2,
        }
        for action in self.rng.choices(list(actions), list(actions.values()), k=NUM_STEPS):
            action()

    # ---- what may happen

    def deliver(self) -> None:
        """Deliver any message that is on its way, or lose it, or deliver it and keep a copy."""
        if not self.in_flight:
            return
        # Most arrive soon, or stale ones would crowd out every ballot.
        recent = max(0, len(self.in_flight) - 8) if self.rng.random() < 0.8 else 0
        place = self.rng.randrange(recent, len(self.in_flight))
        fate = self.rng.random()
        self.in_flight[place], self.in_flight[-1] = self.in_flight[-1], self.in_flight[place]
        source, receiver, message = self.in_flight[-1] if fate < 0.15 else self.in_flight.pop()
        is_cut = (source in self.cut_off) != (receiver in self.cut_off)
        if fate < 0.8 and not is_cut and receiver in self.logs:
            self.post(receiver, self.logs[receiver].receive(source, message))

    def propose_something(self) -> None:
        log = self.rng.choice(list(self.logs.values()))
        members = list(log.newest.members)
        is_removing, is_adding = self.rng.random() < 0.2, self.rng.random() < 0.3
        if is_removing and len(members) > 3:
            dead = [member for member in members if member.id not in self.logs]
            members.remove(self.rng.choice(dead or members))
        newcomers = sorted(set(self.logs).difference(log.newest.roster))
        if is_adding and newcomers:
            members.append(Member(self.rng.choice(newcomers), 1))
        with suppress(LocalProtocolError):  # a process outside may try
            self.propose(log, members[-MAX_MEMBERS:])

    def tell(self) -> None:
        self.tell_roster(self.rng.choice(list(self.logs.values())))

    def crash(self) -> None:
        if len(self.logs) > 1:
            del self.logs[self.rng.choice(list(self.logs))]

    def start(self) -> None:
        """Start a process that somebody told what was newest for it."""
        name = MemberId(f"m{self.num_started}")
        self.num_started += 1
        self.logs[name] = DecisionLog(name, self.rng.choice(list(self.logs.values())).newest)

    def cut(self) -> None:
        self.cut_off = {name for name in self.logs if self.rng.random() < 0.4}

    def heal(self) -> None:
        self.cut_off = set()

    # ---- what follows

    def propose(self, log: DecisionLog, members: list[Member]) -> Decision:
        self.num_values += 1
        decision = log.newest.make_next(members, b"%d" % self.num_values)
        self.post(log.member_id, log.propose(decision))
        return decision

    def post(self, sender: MemberId, outgoing: Outgoing) -> None:
        """Send what a process has just said, once the witness has seen it and its log."""
        for receiver, message in outgoing:
            assert receiver != sender
            self.witness.see_sent(sender, message)
            self.in_flight.append((sender, receiver, message))
        self.witness.see_log(self.logs[sender])

    def tell_roster(self, log: DecisionLog) -> None:
        told = Decided(log.newest)
        mates = [member for member in log.newest.roster if member != log.member_id]
        self.post(log.member_id, [(mate, told) for mate in mates])

    def deliver_all(self) -> None:
        while self.in_flight:
            source, receiver, message = self.in_flight.pop(0)
            if receiver in self.logs:
                self.post(receiver, self.logs[receiver].receive(source, message))

    def find_survivors(self) -> list[DecisionLog]:
        """Return the living members of the newest decision that a living process knows.

        None, where they are no majority, so that nothing can be decided any more.
        """
        newest = max((log.newest for log in self.logs.values()), key=lambda each: each.number)
        alive = [self.logs[name] for name in newest.roster if name in self.logs]
        return alive if len(alive) >= newest.majority else []

    def settle(self) -> None:
        """Heal the network, and have one process at a time propose until it gets through."""
        self.heal()
        self.deliver_all()
        for _ in range(10):
            survivors = self.find_survivors()
            if not survivors:
                return
            log = survivors[0]
            if not log.is_member:
                self.tell_roster(log)
                self.deliver_all()
                continue
            wanted = self.propose(log, list(log.newest.members))
            self.deliver_all()
            if wanted in self.witness.chain:
                self.witness.seen["settled"] += 1
                return
        raise AssertionError("a majority lives, and nothing is decided")


def run_schedule(seed: int) -> Counter[str]:
    """Play the schedule of a seed; return how often its members did what."""
    schedule = Schedule(seed)
    schedule.play()
    schedule.settle()
    return schedule.witness.seen


def test_members_agree_whatever_the_network_does() -> None:
    seen: Counter[str] = Counter()

    for seed in range(NUM_SEEDS):
        try:
            seen += run_schedule(seed)
        except Exception as error:
            error.add_note(f"the schedule of seed {seed}")
            raise

    # The same in every run. Without them, the schedules would show nothing.
    assert seen["decisions"] > 500
    assert seen["contested"] > 100
    assert seen["changes of members"] > 50
    assert seen["settled"] > NUM_SEEDS / 2
