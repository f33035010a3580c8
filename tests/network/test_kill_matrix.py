"""Peers die in every phase of a generation; the words are those of an undisturbed model.

Real processes, fp32, greedy (or beams). The reference is plain transformers on the same weights.
Tests over two peers per span come before those over one, which need fewer peers to start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from shoal.client import AutoDistributedModelForCausalLM, RouteError
from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm
from shoal.protocol.spans import Span

pytestmark = [pytest.mark.network, pytest.mark.slow]

SPANS = (Span(0, 1), Span(1, 3), Span(3, 4))
NUM_NEW_TOKENS = 24
KILL_AFTER = 8
SEED = 11


class LiveSwarm:
    """A local swarm that is brought back to two peers per span before each test."""

    def __init__(self, swarm: LocalSwarm, model: Any) -> None:
        self.swarm = swarm
        self.tiny = model
        self.delivery = "star"

    def heal(self, num_replicas: int) -> None:
        """Leave exactly that many healthy peers on every span."""
        for peer in self.swarm.peers:
            if peer.is_running:
                peer.resume()
        added: list[LocalPeer] = []
        for span in SPANS:
            running = [p for p in self.swarm.peers if p.is_running and p.span == span]
            for surplus in running[num_replicas:]:
                surplus.kill()
            missing = num_replicas - len(running)
            added += [self.swarm.add(span, wait=False) for _ in range(missing)]
        self.swarm.wait_until_online(added)

    def connect(self, **settings: Any) -> Any:
        return AutoDistributedModelForCausalLM.from_pretrained(
            self.tiny.directory,
            initial_peers=self.swarm.initial_peers,
            delivery=self.delivery,
            **settings,
        )


@pytest.fixture(scope="module")
def live(tiny_models: Any) -> Iterator[LiveSwarm]:
    tiny = tiny_models.get("llama")
    spans = [span for span in SPANS for _ in range(2)]
    with LocalSwarm(
        tiny.directory, spans=spans, weights="fp32", announce_period_seconds=2.0
    ) as swarm:
        yield LiveSwarm(swarm, tiny)


@pytest.fixture(autouse=True, params=["chain", pytest.param("star", marks=pytest.mark.thorough)])
def delivery(live: LiveSwarm, request: pytest.FixtureRequest) -> None:
    """Every test runs in both wirings."""
    live.delivery = request.param


@pytest.fixture
def prompt() -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(3, 128, (1, 20), generator=generator)


class CallAt(BaseStreamer):
    """Calls a function when `generate` has produced so many tokens."""

    def __init__(self, num_tokens: int, function: Callable[[], object]) -> None:
        self._num_left = num_tokens + 1  # the prompt comes first, as one value
        self._function = function

    def put(self, value: Tensor) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._function()

    def end(self) -> None:
        return


def generate(model: Any, inputs: Tensor | None, **settings: Any) -> Tensor:
    settings = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False, **settings}
    settings["min_new_tokens"] = settings["max_new_tokens"]
    return model.generate(inputs, **settings)


def run_undisturbed(live: LiveSwarm, inputs: Tensor, **settings: Any) -> Tensor:
    return generate(live.tiny.reference, inputs, **settings)


def kill_hops(live: LiveSwarm, session: Any, indices: tuple[int, ...]) -> None:
    for index in indices:
        find_hop(live, session, index).kill()


def find_hop(live: LiveSwarm, session: Any, index: int) -> LocalPeer:
    return live.swarm.find(session.hops[index].peer.peer_id)


@pytest.mark.parametrize(
    "indices",
    [
        pytest.param((0,), marks=pytest.mark.thorough),
        pytest.param((1,), marks=pytest.mark.thorough),
        pytest.param((2,), marks=pytest.mark.thorough),
        pytest.param((0, 2), marks=pytest.mark.thorough),
        pytest.param((0, 1), marks=pytest.mark.thorough),
        pytest.param((1, 2), marks=pytest.mark.thorough),
        (0, 1, 2),
    ],
    ids=lambda indices: f"hops{indices}",
)
def test_kill_between_decode_steps(
    live: LiveSwarm, prompt: Tensor, indices: tuple[int, ...]
) -> None:
    live.heal(2)

    with live.connect() as model, model.inference_session(max_length=64) as session:
        streamer = CallAt(KILL_AFTER, lambda: kill_hops(live, session, indices))
        tokens = generate(model, prompt, streamer=streamer)

        assert torch.equal(tokens, run_undisturbed(live, prompt))
        assert {failover.lost.span for failover in session.failovers} == {
            SPANS[index] for index in indices
        }
        assert all(failover.num_replayed_tokens > 20 for failover in session.failovers)


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(3))
def test_paused_peer_is_left(live: LiveSwarm, prompt: Tensor, index: int) -> None:
    live.heal(2)

    with live.connect() as model, model.inference_session(max_length=64) as session:

        def pause() -> None:
            find_hop(live, session, index).pause()

        tokens = generate(model, prompt, streamer=CallAt(KILL_AFTER, pause))

        assert torch.equal(tokens, run_undisturbed(live, prompt))
        assert SPANS[index] in {failover.lost.span for failover in session.failovers}


@pytest.mark.parametrize(
    "index",
    [pytest.param(0, marks=pytest.mark.thorough), 1, pytest.param(2, marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize(
    "trouble", [LocalPeer.kill, pytest.param(LocalPeer.pause, marks=pytest.mark.thorough)]
)
def test_trouble_during_beam_search(
    live: LiveSwarm, prompt: Tensor, trouble: Callable[[LocalPeer], None], index: int
) -> None:
    live.heal(2)
    beams = {"num_beams": 3, "num_return_sequences": 3}

    with live.connect() as model, model.inference_session(max_length=64) as session:
        num_calls = 0

        def disturb_in_the_middle(tokens: Tensor, scores: Tensor) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls == KILL_AFTER:
                trouble(find_hop(live, session, index))
            return scores

        tokens = generate(model, prompt, logits_processor=[disturb_in_the_middle], **beams)

        assert torch.equal(tokens, run_undisturbed(live, prompt, **beams))
        assert SPANS[index] in {failover.lost.span for failover in session.failovers}


def test_kill_while_a_long_prompt_is_on_its_way(live: LiveSwarm) -> None:
    """The second hop is stopped, so that the prompt waits there when the kill comes."""
    live.heal(2)
    inputs = torch.randint(3, 128, (1, 300), generator=torch.Generator().manual_seed(SEED))

    with live.connect() as model, model.inference_session(max_length=400) as session:
        generate(model, inputs[:, :1], max_new_tokens=1)
        session.position = 0
        victim = live.swarm.find(session.hops[1].peer.peer_id)
        victim.pause()
        killing = threading.Timer(0.3, victim.kill)
        killing.start()
        tokens = generate(model, inputs)
        killing.join()

        assert torch.equal(tokens, run_undisturbed(live, inputs))
        assert len(session.failovers) == 1


@pytest.mark.parametrize(
    ("trouble", "index"),
    [
        (LocalPeer.kill, 0),
        pytest.param(LocalPeer.pause, 1, marks=pytest.mark.thorough),
        pytest.param(LocalPeer.kill, 2, marks=pytest.mark.thorough),
    ],
)
def test_eight_sessions_of_different_texts_go_on(
    live: LiveSwarm, trouble: Callable[[LocalPeer], None], index: int
) -> None:
    """Half of them had rolled back before; the peers compute them together."""
    live.heal(2)
    generator = torch.Generator().manual_seed(SEED)
    prompts = [torch.randint(3, 128, (1 + n % 2, 5 + 4 * n), generator=generator) for n in range(8)]

    lost: set[Span] = set()

    with live.connect() as model, ThreadPoolExecutor(len(prompts)) as threads:

        def write(number: int) -> Tensor:
            inputs = prompts[number]
            with model.inference_session(max_length=96) as session:
                if number % 2:
                    generate(model, inputs, max_new_tokens=4)
                    session.position = inputs.shape[1] - 1
                    inputs = inputs[:, -1:]
                disturb = CallAt(KILL_AFTER, lambda: trouble(find_hop(live, session, index)))
                text = generate(model, inputs, streamer=None if number else disturb)
                lost.update(failover.lost.span for failover in session.failovers)
            return text

        texts = list(threads.map(write, range(len(prompts))))

    assert SPANS[index] in lost
    for inputs, text in zip(prompts, texts, strict=True):
        expected = run_undisturbed(live, inputs)
        assert torch.equal(text[:, -NUM_NEW_TOKENS:], expected[:, -NUM_NEW_TOKENS:])


POINTS = {"open": 0, "answer": 2}
"""Where the only peer of a span dies; `test_replacement_that_dies_too` has the third point."""


def make_dying_program(point: str, signal_name: str = "SIGKILL") -> tuple[str, ...]:
    return (str(Path(__file__).with_name("dying_peer.py")), point, signal_name)


@pytest.mark.parametrize(
    ("point", "index"),
    [
        pytest.param(
            point, index, marks=[pytest.mark.thorough] * ((point, index) not in POINTS.items())
        )
        for point in ("open", "prefill", "answer")
        for index in range(3)
    ],
)
def test_kill_at_a_point_of_the_protocol(
    live: LiveSwarm, prompt: Tensor, point: str, index: int
) -> None:
    """The only peer of a span dies there; the one that comes next takes over."""
    live.heal(1)
    span = SPANS[index]
    (healthy,) = [p for p in live.swarm.peers if p.is_running and p.span == span]
    healthy.kill()
    dying = live.swarm.add(span, program=make_dying_program(point))
    # Comes when the other has died, so that nothing else can be chosen before.
    succession = threading.Thread(target=lambda: (dying.wait(120), live.swarm.add(span)))
    succession.start()

    # A prompt in pieces of four tokens, so that `prefill` dies in the middle of it.
    with live.connect(max_step_bytes=4 * 64 * 4, failover_timeout_seconds=60.0) as model:
        tokens = generate(model, prompt)

    succession.join()
    assert torch.equal(tokens, run_undisturbed(live, prompt))
    assert not dying.is_running


def test_replacement_that_dies_too(live: LiveSwarm, prompt: Tensor) -> None:
    live.heal(1)
    (first,) = [p for p in live.swarm.peers if p.is_running and p.span == SPANS[1]]

    with live.connect(failover_timeout_seconds=60.0, max_step_bytes=4 * 64 * 4) as model:
        succession: list[threading.Thread] = []
        dying: list[LocalPeer] = []

        def kill_first_and_offer_a_bad_replacement() -> None:
            bad = live.swarm.add(SPANS[1], program=make_dying_program("prefill"))
            dying.append(bad)
            follow = threading.Thread(target=lambda: (bad.wait(120), live.swarm.add(SPANS[1])))
            follow.start()
            succession.append(follow)
            first.kill()

        streamer = CallAt(KILL_AFTER, kill_first_and_offer_a_bad_replacement)
        tokens = generate(model, prompt, streamer=streamer)

    succession[0].join()
    assert torch.equal(tokens, run_undisturbed(live, prompt))
    assert not dying[0].is_running


@pytest.mark.parametrize(
    "index",
    [pytest.param(0, marks=pytest.mark.thorough), 1, pytest.param(2, marks=pytest.mark.thorough)],
)
def test_pause_in_the_middle_of_a_prompt(live: LiveSwarm, prompt: Tensor, index: int) -> None:
    """The only peer of a span stands still with half of the prompt; the next one takes over."""
    live.heal(1)
    span = SPANS[index]
    (healthy,) = [p for p in live.swarm.peers if p.is_running and p.span == span]
    healthy.kill()
    stopping = live.swarm.add(span, program=make_dying_program("prefill", "SIGSTOP"))

    def succeed() -> None:
        os.waitid(os.P_PID, stopping.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        live.swarm.add(span)

    succession = threading.Thread(target=succeed, daemon=True)  # may wait for ever, in a failure
    succession.start()

    with live.connect(max_step_bytes=4 * 64 * 4, failover_timeout_seconds=60.0) as model:
        tokens = generate(model, prompt)

    succession.join()
    assert torch.equal(tokens, run_undisturbed(live, prompt))
    assert stopping.is_running
    stopping.kill()


def test_peer_restarts_with_the_same_identity_and_an_empty_cache(
    live: LiveSwarm, prompt: Tensor, tmp_path: Path
) -> None:
    live.heal(1)
    (other,) = [p for p in live.swarm.peers if p.is_running and p.span == SPANS[1]]
    other.kill()
    identity = tmp_path / "peer.key"
    original = live.swarm.add(SPANS[1], identity=identity)

    with (
        live.connect(failover_timeout_seconds=60.0) as model,
        model.inference_session(max_length=64) as session,
    ):

        def restart() -> None:
            original.kill()
            live.swarm.add(SPANS[1], identity=identity, wait=False)

        tokens = generate(model, prompt, streamer=CallAt(KILL_AFTER, restart))

        assert torch.equal(tokens, run_undisturbed(live, prompt))
        (failover,) = session.failovers
        assert failover.replacements[0].peer.peer_id == original.peer_id


def test_no_replica_left_names_the_blocks_and_the_session_goes_on_later(
    live: LiveSwarm, prompt: Tensor
) -> None:
    live.heal(1)

    with (
        live.connect(failover_timeout_seconds=2.0) as model,
        model.inference_session(max_length=64) as session,
    ):
        first = generate(model, prompt, max_new_tokens=KILL_AFTER)
        kill_hops(live, session, (1,))
        with pytest.raises(RouteError, match="1:3") as caught:
            generate(model, None, max_new_tokens=NUM_NEW_TOKENS - KILL_AFTER)
        assert caught.value.missing == (Span(1, 3),)

        live.swarm.add(SPANS[1])
        rest = generate(model, None, max_new_tokens=NUM_NEW_TOKENS - KILL_AFTER)

        assert torch.equal(torch.cat([first, rest], dim=1), run_undisturbed(live, prompt))
