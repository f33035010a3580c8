"""Adapters that peers train: the numbers are those of torch's optimizers, whoever is lost."""

from __future__ import annotations

import copy
import itertools
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_scene import FOUR_HOPS, ONE_HOP, REPLICAS, assert_close, make_adapter, swarm_of
from memory_swarm import look_into
from torch import Tensor, nn

from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.adapters import learned_states
from shoal.client.finetuning.dataset import Dataset, Example
from shoal.client.finetuning.finetune_run import FinetuneRun, RunConfig, Updated
from shoal.client.finetuning.learners import make_learner
from shoal.client.training.lora import LoraAdapter
from shoal.peer.engine.adapters.adapter_store import AdapterStore
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import ErrorCode, RefusedError, UsageError

NUM_UPDATES = 4
OPTIONS = {
    "adamw": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
}
LOCAL = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def draw_tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 128, (3, 20), generator=generator)


def learn(
    model: Any,
    adapter: LoraAdapter,
    optimizer: Any,
    *,
    num_updates: int = NUM_UPDATES,
    num_batches: int = 1,
    max_norm: float | None = None,
    between: Callable[[int, str], None] = lambda number, when: None,
) -> list[float]:
    """Train as one does with torch; return the losses."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / (2 * num_updates))
    losses: list[float] = []
    for number in range(num_updates):
        optimizer.zero_grad()
        for batch in range(num_batches):
            tokens = draw_tokens(number * num_batches + batch)
            loss = model(tokens, labels=tokens, active_adapter=adapter).loss
            between(number, "forward")
            (loss / num_batches).backward()
            losses.append(loss.item())
        between(number, "backward")
        if max_norm is not None and adapter.remote_optimizer is not None:
            optimizer.clip_grad_norm(max_norm)
        elif max_norm is not None:
            nn.utils.clip_grad_norm_(adapter.parameters(), max_norm)
        optimizer.step()
        between(number, "update")
        schedule.step()
    return losses


def learn_here(model: Any, adapter: LoraAdapter, kind: str, **settings: Any) -> list[float]:
    return learn(model, adapter, LOCAL[kind](adapter.parameters(), **OPTIONS[kind]), **settings)


def assert_same(ours: LoraAdapter, theirs: LoraAdapter) -> None:
    expected = theirs.state_dict()
    for name, matrix in ours.state_dict().items():
        assert_close(matrix, expected[name])


def assert_same_losses(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one - other) < 1e-4 * abs(other)


@pytest.mark.parametrize(
    "spans",
    [pytest.param(ONE_HOP, marks=pytest.mark.thorough, id="one hop"),
     pytest.param(FOUR_HOPS, id="four hops")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.thorough)])
def test_training_at_peers_is_that_of_torch(
    tiny_models: Any, spans: Sequence[tuple[int, int]], kind: str
) -> None:
    with swarm_of(tiny_models, spans) as (_, model):
        ours, theirs = make_adapter(model), make_adapter(model)
        optimizer = model.optimizer_at_peers(ours, kind, **OPTIONS[kind])
        losses = learn(model, ours, optimizer, num_batches=2, max_norm=0.05)
        expected = learn_here(model, theirs, kind, num_batches=2, max_norm=0.05)

        assert_same_losses(losses, expected)
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("weights", "wire_dtype"),
    [
        ("int8", "auto"),
        ("fp32", "fp16"),
        pytest.param("int8", "int8", marks=pytest.mark.thorough),
        pytest.param("fp32", "bf16", marks=pytest.mark.thorough),
        pytest.param("bf16", "auto", marks=pytest.mark.thorough),
    ],
)
def test_training_at_coarse_peers_over_a_coarse_line_is_that_at_the_client(
    tiny_models: Any, weights: str, wire_dtype: str
) -> None:
    directory, tokens = tiny_models.get().directory, draw_tokens(1)
    swarm = LoopbackSwarm(directory, ((0, 2), (2, 4)), weights=weights)
    with AutoDistributedModelForCausalLM.from_pretrained(
        directory, connect=swarm.connect, torch_dtype="float32", wire_dtype=wire_dtype
    ) as model:
        losses: list[list[float]] = []
        for is_at_peers in (True, False):
            adapter = make_adapter(model)
            optimizer = (
                model.optimizer_at_peers(adapter, "adamw", lr=0.02)
                if is_at_peers
                else torch.optim.AdamW(adapter.parameters(), lr=0.02)
            )
            losses.append([])
            for _ in range(6):
                optimizer.zero_grad()
                loss = model(tokens, labels=tokens, active_adapter=adapter).loss
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
        ours, theirs = losses

        assert ours[-1] < 0.9 * ours[0]
        # Gradients of the adapter travel in 16 bits to a client, and to nobody here.
        assert ours == pytest.approx(theirs, rel=0.01)


def test_learned_states_are_packed_and_read_where_nobody_waits(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def note_and_do(do: Callable[[Any], Any], file: Any) -> Any:
        threads.append(threading.current_thread().name)
        return do(file)

    for name in ("_encode", "_decode"):
        do = getattr(learned_states, name)
        monkeypatch.setattr(learned_states, name, partial(note_and_do, do))
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (_, model):
        adapter = make_adapter(model)
        optimizer = model.optimizer_at_peers(adapter, "sgd", **OPTIONS["sgd"])
        learn(model, adapter, optimizer, num_updates=1)
        adapter.pull()

    assert len(threads) >= 4
    assert not [name for name in threads if "client" in name]


def kill_shard_peers(swarm: Any) -> None:
    """Kill all peers that train something."""
    for peer in list_shard_peers(swarm):
        swarm.network.kill(peer)


def list_shard_peers(swarm: Any) -> list[str]:
    """Return the hosts of all peers that train something."""
    return [f"peer{n}" for n, peer in enumerate(swarm.peers) if len(look_into(peer).adapters)]


@pytest.mark.parametrize(
    "when",
    [pytest.param("forward", marks=pytest.mark.thorough),
     "backward",
     pytest.param("update", marks=pytest.mark.thorough)],
)  # fmt: skip
def test_homes_that_are_killed_take_nothing_with_them(tiny_models: Any, when: str) -> None:
    with swarm_of(tiny_models, REPLICAS) as (swarm, model):
        theirs, ours = make_adapter(model), make_adapter(model)
        expected = learn_here(model, theirs, "adamw", max_norm=0.05)
        for peer in swarm.peers:
            look_into(peer).adapters = AdapterStore(look_into(peer).clock, 2**29)

        def kill(number: int, now: str) -> None:
            if (number, now) == (2, when):
                kill_shard_peers(swarm)

        optimizer = model.optimizer_at_peers(ours, "adamw", **OPTIONS["adamw"])
        losses = learn(model, ours, optimizer, max_norm=0.05, between=kill)

        assert_same_losses(losses, expected)
        assert_same(ours, theirs)
        failovers = model.transformer.h.take_failovers()
        lost = {swarm.peers.index(swarm.find(one.lost.peer.peer_id)) for one in failovers}
        assert len(lost) == 2
        for one in failovers:
            (hop,) = one.replacements
            assert hop.span == one.lost.span


@pytest.mark.thorough
def test_peer_that_has_forgotten_an_adapter_learns_it_again(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (swarm, model):
        theirs, ours = make_adapter(model), make_adapter(model)
        expected = learn_here(model, theirs, "sgd")

        def forget(number: int, now: str) -> None:
            if (number, now) in ((1, "backward"), (2, "update")):
                for peer in swarm.peers:
                    look_into(peer).adapters = AdapterStore(look_into(peer).clock, 2**29)

        optimizer = model.optimizer_at_peers(ours, "sgd", **OPTIONS["sgd"])
        assert_same_losses(learn(model, ours, optimizer, between=forget), expected)
        assert_same(ours, theirs)


@pytest.mark.slow
def test_shard_peer_is_replaced_by_several_peers(tiny_models: Any) -> None:
    """What went into the later ones was never sent to them: it is computed again."""
    with swarm_of(tiny_models, ((0, 4), (0, 1), (1, 4))) as (swarm, model):
        theirs, ours = make_adapter(model), make_adapter(model)
        expected = learn_here(model, theirs, "adamw", num_batches=2)
        for peer in swarm.peers:
            look_into(peer).adapters = AdapterStore(look_into(peer).clock, 2**29)

        for other in (1, 2):
            look_into(swarm.peers[other]).is_draining = True
        optimizer = model.optimizer_at_peers(ours, "adamw", **OPTIONS["adamw"])

        def kill(number: int, now: str) -> None:
            for other in (1, 2):
                look_into(swarm.peers[other]).is_draining = False
            if (number, now) == (2, "backward"):
                assert list_shard_peers(swarm) == ["peer0"]
                swarm.network.kill("peer0")

        losses = learn(model, ours, optimizer, num_batches=2, between=kill)
        assert_same_losses(losses, expected)
        assert_same(ours, theirs)


def test_gradients_of_zero_grad_are_gone_and_no_gradients_change_nothing(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (_, model):
        adapter = make_adapter(model)
        before = copy.deepcopy(adapter.state_dict())
        optimizer = model.optimizer_at_peers(adapter, "sgd", lr=1.0)
        optimizer.step()
        tokens = draw_tokens(1)
        model(tokens, labels=tokens, active_adapter=adapter).loss.backward()
        optimizer.zero_grad()
        optimizer.step()

        for name, matrix in adapter.state_dict().items():
            assert torch.equal(matrix, before[name])


@pytest.mark.thorough
def test_what_was_learned_is_saved_used_and_taken_over_by_torch(
    tiny_models: Any, tmp_path: Path
) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (_, model):
        ours, theirs = make_adapter(model), make_adapter(model)
        optimizer = model.optimizer_at_peers(ours, "adamw", **OPTIONS["adamw"])
        local = torch.optim.AdamW(theirs.parameters(), **OPTIONS["adamw"])
        learn(model, ours, optimizer, num_updates=2)
        learn(model, theirs, local, num_updates=2)
        ours.save(tmp_path)
        assert_same(LoraAdapter.load(tmp_path, model), theirs)
        with model.use_adapter(ours):
            text = model.generate(draw_tokens(1)[:1], max_new_tokens=4, do_sample=False)
        with model.use_adapter(theirs):
            expected = model.generate(draw_tokens(1)[:1], max_new_tokens=4, do_sample=False)
        assert isinstance(text, Tensor)
        assert isinstance(expected, Tensor)
        assert torch.equal(text, expected)

        # Torch goes on where peers were, and peers where torch was.
        state = optimizer.state_dict()
        optimizer.close()
        taken = torch.optim.AdamW(ours.parameters(), **OPTIONS["adamw"])
        taken.load_state_dict(state)
        learn(model, ours, taken, num_updates=2)
        learn(model, theirs, local, num_updates=2)
        assert_same(ours, theirs)
        again = model.optimizer_at_peers(ours, "adamw", **OPTIONS["adamw"])
        again.load_state_dict(taken.state_dict())
        learn(model, ours, again, num_updates=2)
        learn(model, theirs, local, num_updates=2)
        assert_same(ours, theirs)


class RefusingOnce(AdapterStore):
    """The adapters of a peer that refuses the first update."""

    has_refused = False

    def replace(self, name: Any, new_name: Any, tenant: Any, updated: Any) -> None:
        if self.has_refused:
            return super().replace(name, new_name, tenant, updated)
        self.has_refused = True
        raise RefusedError(ErrorCode.BAD_VALUES, "as the test says")


def test_interrupted_step_is_completed_or_started_over_and_never_saved(tiny_models: Any) -> None:
    """Some blocks have the update by then, and others do not."""
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (swarm, model):
        ours, theirs = make_adapter(model), make_adapter(model)
        before = copy.deepcopy(ours.state_dict())
        learn_here(model, theirs, "sgd", num_updates=1)
        optimizer = model.optimizer_at_peers(ours, "sgd", **OPTIONS["sgd"])

        def begin_step() -> None:
            peer = look_into(swarm.peers[1])
            peer.adapters = RefusingOnce(peer.clock, 2**29)
            tokens = draw_tokens(0)
            model(tokens, labels=tokens, active_adapter=ours).loss.backward()
            with pytest.raises(RefusedError):
                optimizer.step()
            for use in (ours.state_dict, optimizer.state_dict):
                with pytest.raises(UsageError, match="call it again"):
                    use()

        begin_step()
        optimizer.restart()
        optimizer.zero_grad()
        optimizer.step()
        for name, matrix in ours.state_dict().items():
            assert torch.equal(matrix, before[name])

        begin_step()
        optimizer.step()
        assert_same(ours, theirs)


class TakingNotes(AdapterStore):
    """The adapters of a peer, which says when it has made an update."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_updated = threading.Event()

    def replace(self, name: Any, new_name: Any, tenant: Any, updated: Any) -> None:
        super().replace(name, new_name, tenant, updated)
        self.has_updated.set()


def test_gradients_of_a_step_that_some_peers_took_cannot_be_dropped(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (swarm, model):
        ours, theirs = make_adapter(model), make_adapter(model)
        learn_here(model, theirs, "sgd", num_updates=1)
        optimizer = model.optimizer_at_peers(ours, "sgd", **OPTIONS["sgd"])
        first, second = map(look_into, swarm.peers)
        first.adapters = TakingNotes(first.clock, 2**29)
        second.adapters = RefusingOnce(second.clock, 2**29)
        tokens = draw_tokens(0)
        model(tokens, labels=tokens, active_adapter=ours).loss.backward()
        optimizer.clip_grad_norm(1e9)  # `step()` asks for nothing but updates then
        swarm.network.pause("peer1")
        with ThreadPoolExecutor(1) as threads:
            step = threads.submit(optimizer.step)
            assert first.adapters.has_updated.wait(60)
            swarm.network.resume("peer1")
            with pytest.raises(RefusedError):
                step.result()

        with pytest.raises(UsageError, match="call it again"):
            optimizer.zero_grad()

        optimizer.step()
        assert_same(ours, theirs)


def test_gradients_of_a_step_that_no_peer_took_can_be_dropped(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (swarm, model):
        ours, theirs = make_adapter(model), make_adapter(model)
        learn_here(model, theirs, "sgd", num_updates=1)
        optimizer = model.optimizer_at_peers(ours, "sgd", **OPTIONS["sgd"])
        peer = look_into(swarm.peers[0])
        peer.adapters = RefusingOnce(peer.clock, 2**29)
        other_tokens = draw_tokens(7)
        model(other_tokens, labels=other_tokens, active_adapter=ours).loss.backward()
        with pytest.raises(RefusedError):
            optimizer.step()

        optimizer.zero_grad()

        learn(model, ours, optimizer, num_updates=1)
        assert_same(ours, theirs)


def test_graph_of_before_an_update_is_not_gone_back_through(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        adapter = make_adapter(model)
        optimizer = model.optimizer_at_peers(adapter, "sgd")
        tokens = draw_tokens(1)
        losses = [model(tokens, labels=tokens, active_adapter=adapter).loss for _ in range(2)]
        losses[0].backward()
        optimizer.step()
        with pytest.raises(UsageError, match=r"call backward\(\) before step\(\)"):
            losses[1].backward()


def test_gradients_that_are_no_numbers_are_refused_by_name_and_change_nothing(
    tiny_models: Any,
) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (_, model):
        adapter = make_adapter(model)
        before = copy.deepcopy(adapter.state_dict())
        optimizer = model.optimizer_at_peers(adapter, "sgd", lr=1.0)
        tokens = draw_tokens(1)
        loss = model(tokens, labels=tokens, active_adapter=adapter).loss
        with pytest.raises(RefusedError, match="finite"):
            (loss * 1e38 * 1e4).backward()
        model(tokens, labels=tokens, active_adapter=adapter).loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        for name, matrix in adapter.state_dict().items():
            assert torch.equal(matrix, before[name])


def test_what_peers_cannot_do_is_refused_at_once(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        adapter = make_adapter(model)
        with pytest.raises(UsageError, match="peers run adamw or sgd, not 'lion'"):
            model.optimizer_at_peers(adapter, "lion")
        with pytest.raises(UsageError, match="sgd has no option betas"):
            model.optimizer_at_peers(adapter, "sgd", betas=(0.9, 0.9))
        with pytest.raises(UsageError, match="learning rate"):
            model.optimizer_at_peers(adapter, lr=-1.0)
        with pytest.raises(UsageError, match="the adapter of the head stays at the client"):
            model.optimizer_at_peers(make_adapter(model, target_modules=["v_proj", "lm_head"]))
        model.optimizer_at_peers(adapter)
        with pytest.raises(UsageError, match="already has an optimizer at peers"):
            model.optimizer_at_peers(adapter)
        with pytest.raises(UsageError, match="the only adapter of a call"):
            model(draw_tokens(1), active_adapter=[adapter, make_adapter(model), None])


@pytest.mark.thorough
def test_run_at_peers_is_that_at_the_client_and_goes_on_from_a_checkpoint(
    tiny_models: Any, tmp_path: Path
) -> None:
    texts = [draw_tokens(number)[0].tolist() for number in range(8)]
    examples = [Example(array("i", text), array("b", [1] * len(text))) for text in texts]
    dataset, config = Dataset(examples, [], padding_id=0), RunConfig(4, 0.01, 2, eval_period=2)
    losses: dict[bool, list[float]] = {}
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (_, model):

        def make_run(is_at_peers: bool) -> FinetuneRun:
            learner = make_learner(model, rank=3, alpha=6, is_trained_at_peers=is_at_peers)
            return FinetuneRun(learner, dataset, config, tmp_path / str(is_at_peers))

        for is_at_peers in (False, True):
            run = make_run(is_at_peers)
            events = run.learn()
            updates = [event for event in itertools.islice(events, 4) if isinstance(event, Updated)]
            if is_at_peers:  # another client goes on from the milestone after two updates
                run = make_run(is_at_peers)
                run.resume()
                events = run.learn()
            updates += [event for event in events if isinstance(event, Updated)]
            losses[is_at_peers] = [update.loss for update in updates]
            run.save_result()
        assert_same_losses(losses[True], losses[False])
        folders = [tmp_path / str(is_at_peers) for is_at_peers in (True, False)]
        # Within 1e-6 but for a number or two: AdamW takes a whole step for a gradient near zero,
        # where rounding decides on its sign.
        ours, theirs = (LoraAdapter.load(folder, model).state_dict() for folder in folders)
        for name, matrix in ours.items():
            assert_close(matrix, theirs[name], tolerance=1e-3)
