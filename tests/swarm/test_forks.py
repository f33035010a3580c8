"""Sessions that begin where another one is, over a whole swarm: the same words, less work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from memory_swarm import look_into
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.session.inference_session import InferenceSession
from shoal.peer.engine.steps import StepWork
from shoal.peer.local_swarm.loopback import LoopbackPeer, LoopbackSwarm
from shoal.protocol.errors import UsageError

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
BEAMS = {**GREEDY, "num_beams": 3}
PROMPT_TOKENS = 9


def make_ids(seed: int, num_tokens: int = 4) -> Tensor:
    return torch.randint(3, 128, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


PROMPT = make_ids(0, PROMPT_TOKENS)


class Scene:
    """Two replicas of each half of a model, a client, and a count of what peers compute."""

    def __init__(self, swarm: LoopbackSwarm, model: Any, reference: Any) -> None:
        self.swarm = swarm
        self.model = model
        self._reference = reference
        self.num_computed_tokens = 0
        for peer in swarm.peers:
            self._count_work_of(look_into(peer).engine)

    def _count_work_of(self, engine: Any) -> None:
        execute = engine.execute

        def count(batch: Sequence[StepWork], *arguments: Any) -> Any:
            self.num_computed_tokens += sum(work.num_tokens for work in batch)
            return execute(batch, *arguments)

        engine.execute = count

    def expect(self, *texts: Tensor, **options: Any) -> Tensor:
        """Return what transformers generates after some texts."""
        text = torch.cat(texts, dim=1)
        return self._reference.generate(text, **options)[:, text.shape[1] :]

    def begin(self) -> Any:
        """Open a session for use in a `with`."""
        return self.model.inference_session(max_length=64)

    def read_prompt(self) -> None:
        self.model(PROMPT)

    def peers_of(self, session: InferenceSession) -> list[LoopbackPeer]:
        return [self.swarm.find(hop.peer.peer_id) for hop in session.hops]

    def forget_sessions(self) -> None:
        """Let all peers drop what they hold, as if they had been restarted."""

        async def forget() -> None:
            for service in (look_into(peer) for peer in self.swarm.peers):
                for session, held in list(service.sessions.items()):
                    service.admission.close(session, held)

        self.model._client.portal.run(forget())

    def count_sessions(self) -> int:
        return sum(len(look_into(peer).sessions) for peer in self.swarm.peers)


@pytest.fixture
def scene(tiny_models: Any) -> Iterator[Scene]:
    tiny = tiny_models.get()
    swarm = LoopbackSwarm(tiny.directory, [(0, 2), (0, 2), (2, 4), (2, 4)])
    with AutoDistributedModelForCausalLM.from_pretrained(
        tiny.directory, connect=swarm.connect
    ) as model:
        yield Scene(swarm, model, tiny.reference)


def test_many_questions_share_one_prompt_that_is_computed_once(scene: Scene) -> None:
    questions = [make_ids(seed) for seed in (1, 2, 3)]
    with scene.begin() as session:
        scene.read_prompt()
        num_of_prompt = scene.num_computed_tokens
        assert num_of_prompt == 2 * PROMPT_TOKENS

        for question in questions:
            with session.fork() as fork:
                answer = scene.model.generate(question, session=fork, **GREEDY)

                assert torch.equal(answer[:, 4:], scene.expect(PROMPT, question, **GREEDY))
                assert fork.hops == session.hops
                assert fork.failovers == ()

    # The last token of an answer is never sent.
    assert scene.num_computed_tokens - num_of_prompt == 2 * 3 * (4 + 6 - 1)


def test_fork_and_session_go_on_independently(scene: Scene) -> None:
    question = make_ids(1)
    with scene.begin() as session:
        first = scene.model.generate(PROMPT, **GREEDY)[:, PROMPT_TOKENS:]
        with session.fork() as fork, ThreadPoolExecutor(1) as other:
            assert torch.equal(fork.output_ids, session.output_ids)
            answering = other.submit(scene.model.generate, question, session=fork, **GREEDY)
            second = scene.model.generate(**GREEDY)
            answer = answering.result()[:, 4:]
            third = scene.model.generate(**GREEDY)

    assert torch.equal(answer, scene.expect(PROMPT, first, question, **GREEDY))
    assert torch.equal(second, scene.expect(PROMPT, first, **GREEDY))
    assert torch.equal(third, scene.expect(PROMPT, first, second, **GREEDY))


def test_fork_in_the_middle_knows_no_more_of_the_text(scene: Scene) -> None:
    question = make_ids(1)
    with scene.begin() as session:
        first = scene.model.generate(PROMPT, **GREEDY)[:, PROMPT_TOKENS:]
        num_before = scene.num_computed_tokens
        for position in (1, 5, PROMPT_TOKENS, PROMPT_TOKENS + 3):
            with session.fork(position) as fork:
                prefix = torch.cat([PROMPT, first], dim=1)[:, :position]
                assert fork.position == position
                assert torch.equal(fork.output_ids, prefix)

                answer = scene.model.generate(question, session=fork, **GREEDY)[:, 4:]

                assert torch.equal(answer, scene.expect(prefix, question, **GREEDY))
        assert scene.num_computed_tokens - num_before == 2 * 4 * (4 + 6 - 1)


def test_fork_of_a_fork_outlives_both(scene: Scene) -> None:
    one, two = make_ids(1), make_ids(2)
    with scene.begin() as session:
        scene.read_prompt()
        child = session.fork()
        first = scene.model.generate(one, session=child, **GREEDY)[:, 4:]
        grandchild = child.fork()
        child.close()
    with grandchild:
        num_before = scene.num_computed_tokens
        answer = scene.model.generate(two, session=grandchild, **GREEDY)[:, 4:]

        assert scene.num_computed_tokens - num_before == 2 * (1 + 4 + 6 - 1)
    assert torch.equal(answer, scene.expect(PROMPT, one, first, two, **GREEDY))


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("is_before", [True, False], ids=["before the fork", "after it"])
def test_killed_peer_changes_no_words(scene: Scene, hop: int, is_before: bool) -> None:
    one, two = make_ids(1), make_ids(2)
    with scene.begin() as session:
        first = scene.model.generate(PROMPT, **GREEDY)[:, PROMPT_TOKENS:]
        host = scene.peers_of(session)[hop].host
        if is_before:
            scene.swarm.network.kill(host)
        with session.fork() as fork:
            if not is_before:
                scene.swarm.network.kill(host)
            answers = [
                scene.model.generate(question, session=each, **GREEDY)[:, 4:]
                for each, question in ((fork, one), (session, two))
            ]

            for each in (fork, session):
                (failover,) = each.failovers
                assert failover.lost.span == session.hops[hop].span
                assert failover.num_replayed_tokens == PROMPT_TOKENS + 5
                assert host not in [peer.host for peer in scene.peers_of(each)]

    assert torch.equal(answers[0], scene.expect(PROMPT, first, one, **GREEDY))
    assert torch.equal(answers[1], scene.expect(PROMPT, first, two, **GREEDY))


def test_peers_that_forgot_the_parent_get_a_replay(scene: Scene) -> None:
    question = make_ids(1)
    with scene.begin() as session:
        scene.read_prompt()
        scene.forget_sessions()
        with session.fork(7) as fork:
            answer = scene.model.generate(question, session=fork, **GREEDY)[:, 4:]

            swarm = scene.model._client.swarm
            assert not any(
                map(swarm.book.is_quarantined, swarm.book.view.peers)
            )  # it is nobody's fault
            assert [failover.num_replayed_tokens for failover in fork.failovers] == [7, 7]
    assert torch.equal(answer, scene.expect(PROMPT[:, :7], question, **GREEDY))


def test_beams_go_on_in_a_fork_and_in_its_parent(scene: Scene) -> None:
    one = make_ids(1)
    with scene.begin() as session:
        first = scene.model.generate(PROMPT, **BEAMS)[:, PROMPT_TOKENS:]
        num_before = scene.num_computed_tokens
        with session.fork(PROMPT_TOKENS) as fork:
            answer = scene.model.generate(one, session=fork, **BEAMS)[:, 4:]
            assert scene.num_computed_tokens - num_before == 2 * (4 + 6 - 1)
        second = scene.model.generate(**BEAMS)

    assert torch.equal(answer, scene.expect(PROMPT, one, **BEAMS))
    assert torch.equal(second, scene.expect(PROMPT, first, **BEAMS))


def test_beams_on_the_fork_of_a_single_row(scene: Scene) -> None:
    with scene.begin() as session:
        scene.read_prompt()
        with session.fork() as fork:
            beams = scene.model.generate(make_ids(1), session=fork, **BEAMS)[:, 4:]
        greedy = scene.model.generate(make_ids(1), session=session, **GREEDY)[:, 4:]

    assert torch.equal(beams, scene.expect(PROMPT, make_ids(1), **BEAMS))
    assert torch.equal(greedy, scene.expect(PROMPT, make_ids(1), **GREEDY))


def test_rows_that_wait_to_be_moved_are_moved_in_the_fork_too(scene: Scene) -> None:
    generator = torch.Generator().manual_seed(1)
    prompt, token = (torch.randn(2, n, 64, generator=generator) for n in (5, 1))
    swap = torch.tensor([1, 0])
    with scene.begin() as session:
        session.step(prompt)
        session.step(prompt[:, :0], hypo_ids=swap)
        with session.fork() as fork:
            outputs = [each.step(token) for each in (fork, session)]
    with scene.begin() as session:
        expected = [session.step(prompt), session.step(token, hypo_ids=swap)][1]

    assert torch.equal(outputs[0], expected)
    assert torch.equal(outputs[1], expected)


@pytest.mark.parametrize("is_new", [True, False])
def test_fork_of_no_tokens_is_a_new_session(scene: Scene, is_new: bool) -> None:
    with scene.begin() as session:
        if not is_new:
            scene.read_prompt()
        with session.fork(0) as fork:
            assert (fork.position, fork.num_rows, fork.hops) == (0, None, ())

            answer = scene.model.generate(make_ids(1), session=fork, **BEAMS)[:, 4:]

    assert torch.equal(answer, scene.expect(make_ids(1), **BEAMS))


def test_fork_that_cannot_be_is_refused_in_one_sentence(scene: Scene) -> None:
    with scene.begin() as session:
        scene.read_prompt()
        for position in (-1, PROMPT_TOKENS + 1):
            with pytest.raises(UsageError, match=f"cannot fork at token {position}: the session"):
                session.fork(position)
        with pytest.raises(UsageError, match="position must be a whole number"):
            session.fork("all")  # pyright: ignore[reportArgumentType]
        assert scene.count_sessions() == 2

    with pytest.raises(UsageError, match="the session is closed; open a new one"):
        session.fork()
