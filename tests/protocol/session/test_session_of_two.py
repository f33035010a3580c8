"""A peer and an honest client, over streams that may be cut, repeated and overtaken."""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from session_steps import make_step

from shoal.protocol.messages.session import Step
from shoal.protocol.session.session_state import SessionState, StepAction


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

    def __init__(
        self, tokens_of: dict[int, tuple[int, ...]], rng: random.Random, prefix: tuple[int, ...]
    ) -> None:
        self.state = SessionState(1, 10_000, epoch=1, prefix_tokens=len(prefix))
        self.cache = list(prefix)
        self.executed: list[int] = []
        self._queue: deque[Pending] = deque()
        self._computed: deque[Pending] = deque()
        self._tokens_of = tokens_of
        self._rng = rng

    def read(self, stream: Stream) -> None:
        step = stream.inbox.popleft()
        decision = self.state.decide(step)
        if decision.action is StepAction.RESEND:
            stream.answers.append(Pending(step, tuple(decision.answer)))
        elif decision.action is StepAction.GAP:
            stream.answers.append(Pending(step, "gap"))
        elif decision.action in (StepAction.EXECUTE, StepAction.ROLLBACK):
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

    def __init__(self, rng: random.Random, prefix: tuple[int, ...]) -> None:
        self.tokens_of: dict[int, tuple[int, ...]] = {}
        self.streams = [Stream(epoch=1)]
        self.num_confirmed_steps = 0
        self._meant: dict[int, tuple[int, ...]] = {}  # sequence: the cache after it
        self._waiting: deque[Step] = deque()
        self._intended = prefix
        self._confirmed = prefix
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
@pytest.mark.parametrize("prefix", [(), (3, 1, 4, 1, 5, 9, 2, 6)], ids=["new", "fork"])
def test_peer_computes_only_what_an_honest_client_means(seed: int, prefix: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    client = HonestClient(rng, prefix)
    peer = Peer(client.tokens_of, rng, prefix)

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
