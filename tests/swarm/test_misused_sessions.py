"""Sessions and clients that are used in ways they are not made for, over a whole swarm."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from memory_swarm import look_into
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import UsageError

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
BEAMS = {**GREEDY, "num_beams": 3}


def make_ids(num_rows: int, num_tokens: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(3, 128, (num_rows, num_tokens), generator=generator)


@pytest.fixture
def swarm(tiny_models: Any) -> LoopbackSwarm:
    return LoopbackSwarm(tiny_models.get().directory, [(0, 2), (2, 4)])


@pytest.fixture
def model(tiny_models: Any, swarm: LoopbackSwarm) -> Iterator[Any]:
    with AutoDistributedModelForCausalLM.from_pretrained(
        tiny_models.get().directory, connect=swarm.connect
    ) as model:
        yield model


class Meddler:
    """A streamer that lets another thread at the session in the middle of a text, or this one."""

    def __init__(self, meddle: Callable[[], object], is_other_thread: bool = True) -> None:
        self._meddle = meddle
        self._is_other_thread = is_other_thread
        self.errors: list[BaseException | None] = []

    def put(self, value: Tensor) -> None:
        if self._is_other_thread:
            with ThreadPoolExecutor(1) as other:
                self.errors.append(other.submit(self._meddle).exception())
            return
        try:
            self._meddle()
        except UsageError as error:
            self.errors.append(error)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("is_other_thread", [True, False])
@pytest.mark.parametrize("deed", ["generate", "forward", "step", "rollback", "fork"])
def test_session_is_left_alone_while_a_text_is_generated(
    model: Any, tiny_models: Any, deed: str, is_other_thread: bool
) -> None:
    ids = make_ids(1)
    expected = tiny_models.get().reference.generate(ids, **GREEDY)

    with model.inference_session(max_length=64) as session:

        def roll_back() -> None:
            session.position = 1

        def forward() -> None:
            with model.use_session(session):
                model(ids)

        deeds: dict[str, Callable[[], object]] = {
            "generate": lambda: model.generate(ids, session=session, **GREEDY),
            "forward": forward,
            "step": lambda: session.step(torch.zeros(1, 1, 64)),
            "rollback": roll_back,
            "fork": session.fork,
        }
        meddler = Meddler(deeds[deed], is_other_thread)
        text = model.generate(ids, streamer=meddler, **GREEDY)

        assert torch.equal(text, expected)
        assert session.failovers == ()
        assert len(meddler.errors) > 1
        for error in meddler.errors:
            assert isinstance(error, UsageError)
            assert ("in use by another thread; open one" in str(error)) == is_other_thread
            assert ("generate() is running in this session" in str(error)) != is_other_thread
        assert model.generate(**GREEDY).shape == (1, 6)


def test_session_may_go_on_in_another_thread(model: Any) -> None:
    with model.inference_session(max_length=64) as session, ThreadPoolExecutor(1) as other:
        model.generate(make_ids(1), **GREEDY)

        assert other.submit(model.generate, session=session, **GREEDY).result().shape == (1, 6)


def test_forks_of_several_threads_take_turns(model: Any) -> None:
    with model.inference_session(max_length=64) as session, ThreadPoolExecutor(8) as others:
        model(make_ids(1))
        starting = threading.Barrier(8)

        def fork_at_once(_: int) -> Any:
            starting.wait(30)
            return session.fork()

        forks = list(others.map(fork_at_once, range(8)))

        assert [fork.position for fork in forks] == [5] * 8
        for fork in forks:
            fork.close()


def test_calls_of_one_session_may_have_different_numbers_of_rows(
    model: Any, tiny_models: Any
) -> None:
    reference = tiny_models.get().reference
    greedy, beams, batch = make_ids(1), make_ids(1, 7), make_ids(2)

    with model.inference_session(max_length=64) as session:
        for ids, options in ((greedy, GREEDY), (beams, BEAMS), (greedy, GREEDY), (batch, GREEDY)):
            session.position = 0
            text = model.generate(ids, **options)

            assert torch.equal(text, reference.generate(ids, **options))


def test_text_goes_on_with_another_number_of_rows(model: Any, tiny_models: Any) -> None:
    reference = tiny_models.get().reference
    text = make_ids(1)

    with model.inference_session(max_length=64):
        given: Tensor | None = text
        for options in (GREEDY, BEAMS, GREEDY):
            longer = reference.generate(text, **options)
            new = model.generate(given, **options)

            assert torch.equal(new, longer[:, -new.shape[1] :])
            text, given = longer, None


class Failing:
    """A streamer that fails in the middle of a text."""

    num_tokens = 0

    def put(self, value: Tensor) -> None:
        self.num_tokens += 1
        if self.num_tokens == 3:
            raise ZeroDivisionError

    def end(self) -> None: ...


@pytest.mark.parametrize("before", [GREEDY, BEAMS])
def test_failed_call_with_another_number_of_rows_leaves_the_session_as_it_was(
    model: Any, tiny_models: Any, swarm: LoopbackSwarm, before: dict[str, Any]
) -> None:
    text = tiny_models.get().reference.generate(make_ids(1), **before)
    with model.inference_session(max_length=64) as session:
        model.generate(make_ids(1), **before)
        position, num_rows = session.position, session.num_rows

        after = {"num_return_sequences": 2, "do_sample": True} if before is GREEDY else {}
        with pytest.raises(ZeroDivisionError):
            model.generate(streamer=Failing(), **GREEDY | after)

        assert (session.position, session.num_rows) == (position, num_rows)
        assert torch.equal(session.output_ids, text)
        expected = tiny_models.get().reference.generate(text, **before)
        assert torch.equal(model.generate(**before), expected[:, text.shape[1] :])
        pools = [look_into(peer).engine.pool for peer in swarm.peers]
        assert [pool.num_sessions for pool in pools] == [1, 1]


def test_peers_hold_no_caches_of_rows_that_are_gone(model: Any, swarm: LoopbackSwarm) -> None:
    with model.inference_session(max_length=64) as session:
        session.step(torch.zeros(1, 4, 64))
        session.position = 0
        session.step(torch.zeros(3, 4, 64))

        pools = [look_into(peer).engine.pool for peer in swarm.peers]
        assert [pool.num_sessions for pool in pools] == [1, 1]


def test_step_of_other_rows_in_the_middle_says_what_to_do(model: Any) -> None:
    with model.inference_session(max_length=64) as session:
        session.step(torch.zeros(1, 4, 64))
        for num_tokens in (0, 1):
            with pytest.raises(UsageError, match=r"session\.position = 0"):
                session.step(torch.zeros(2, num_tokens, 64))

        assert session.step(torch.zeros(1, 1, 64)).shape == (1, 1, 64)


@pytest.mark.parametrize(
    ("hidden", "hypo_ids", "words"),
    [
        ("x", None, "hidden states must be a tensor, not str"),
        (None, None, "hidden states must be a tensor, not NoneType"),
        (torch.zeros(1, 1, 64), [0], "hypo_ids must be a tensor, not list"),
    ],
)
def test_step_of_no_tensor_is_refused(model: Any, hidden: Any, hypo_ids: Any, words: str) -> None:
    with (
        model.inference_session(max_length=8) as session,
        pytest.raises(UsageError, match=words),
    ):
        session.step(hidden, hypo_ids=hypo_ids)


@pytest.mark.parametrize("rows", [[5], [0, 0], [-1]])
def test_row_map_that_cannot_be_is_refused_with_the_step_that_brings_it(
    model: Any, rows: list[int]
) -> None:
    with model.inference_session(max_length=8) as session:
        session.step(torch.zeros(1, 2, 64))

        with pytest.raises(UsageError, match="hypo_ids must name"):
            session.step(torch.zeros(1, 0, 64), hypo_ids=torch.tensor(rows))

        assert session.step(torch.zeros(1, 1, 64)).shape == (1, 1, 64)


def test_closing_the_model_ends_a_text_of_another_thread(model: Any, swarm: LoopbackSwarm) -> None:
    stands = threading.Event()

    def pause() -> None:
        swarm.network.pause("peer1")
        stands.set()

    with ThreadPoolExecutor(1) as other:
        text = other.submit(model.generate, make_ids(1), streamer=Meddler(pause), **GREEDY)
        assert stands.wait(60)
        model.close()

        with pytest.raises(UsageError, match="the client is closed"):
            text.result(60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_client_is_refused_in_a_forked_process_and_goes_on_in_the_first(model: Any) -> None:
    with model.inference_session(max_length=8) as session:
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # it must not hang
            try:
                session.step(torch.zeros(1, 1, 64))
            except UsageError as error:
                session.close()
                model.close()
                os._exit(42 if "fork" in str(error) else 1)
            finally:
                os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        assert session.step(torch.zeros(1, 1, 64)).shape == (1, 1, 64)
