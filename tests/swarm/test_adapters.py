"""Adapters that peers apply and clients train: gradients are peft's, whoever is lost on the way."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_scene import (
    FOUR_HOPS,
    ONE_HOP,
    REPLICAS,
    assert_close,
    make_adapter,
    open_with_peft,
    swarm_of,
)
from memory_swarm import look_into
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.client.adapters import adapter_versions
from shoal.client.training.lora import LoraAdapter
from shoal.peer.engine.adapters.adapter_store import AdapterStore
from shoal.peer.engine.passes.pass_memory import PassBudget
from shoal.protocol.errors import ErrorCode, RefusedError, UsageError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.ids import AdapterId

peft = pytest.importorskip("peft")

# peft's own affair.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]

TOKENS = torch.arange(60).view(3, 20) % 128


def list_peft_gradients(model: Any) -> dict[str, Tensor]:
    return {
        name.replace(".default", ""): matrix.grad
        for name, matrix in model.named_parameters()
        if "lora_" in name
    }


def compute_loss(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens, labels=tokens).loss


def assert_learns_like_peft(adapter: LoraAdapter, theirs: Any) -> None:
    expected = list_peft_gradients(theirs)
    assert adapter.named_matrices().keys() == expected.keys()
    for name, matrix in adapter.named_matrices().items():
        assert_close(matrix.grad, expected[name])


@pytest.mark.parametrize("spans", [ONE_HOP, FOUR_HOPS], ids=["one hop", "four hops"])
@pytest.mark.parametrize("variant", ["llama", "gpt2", "bloom"])
def test_outputs_and_gradients_are_those_of_peft(
    tiny_models: Any, spans: Sequence[tuple[int, int]], variant: str, tmp_path: Path
) -> None:
    with swarm_of(tiny_models, spans, variant) as (_, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(variant), adapter, tmp_path)
        with model.use_adapter(adapter):
            loss = compute_loss(model)
        loss.backward()
        expected = compute_loss(theirs)
        expected.backward()

        assert_close(loss, expected)
        assert_learns_like_peft(adapter, theirs)


def test_head_is_adapted_at_the_client(tiny_models: Any, tmp_path: Path) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        adapter = make_adapter(model, target_modules=["v_proj", "lm_head"])
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        model.active_adapter = adapter
        compute_loss(model).backward()
        compute_loss(theirs).backward()

        assert_learns_like_peft(adapter, theirs)


def test_training_is_that_of_peft(tiny_models: Any, tmp_path: Path) -> None:
    """Each step of the optimizer makes a new adapter, and peers forget the old one."""
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (swarm, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        ours_optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.01)
        matrices = [matrix for matrix in theirs.parameters() if matrix.requires_grad]
        their_optimizer = torch.optim.AdamW(matrices, lr=0.01)
        for _ in range(5):
            losses = []
            for trained, optimizer in ((model, ours_optimizer), (theirs, their_optimizer)):
                optimizer.zero_grad()
                ours = {"active_adapter": adapter} if trained is model else {}
                loss = trained(TOKENS, labels=TOKENS, **ours).loss
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert abs(losses[0] - losses[1]) < 1e-4 * losses[1]
        assert [len(look_into(peer).adapters) for peer in swarm.peers] == [1, 1]

        adapter.save(tmp_path / "after")
        again = LoraAdapter.load(tmp_path / "after", model)
        with torch.no_grad():
            assert_close(model(TOKENS, active_adapter=again).logits, theirs(TOKENS).logits)


def test_rows_with_different_adapters_share_a_batch(tiny_models: Any, tmp_path: Path) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        one, other = make_adapter(model, 1), make_adapter(model, 2, rank=5)
        rows = [one, other, None]
        logits = model(TOKENS, active_adapter=rows).logits
        logits.square().sum().backward()

        for row, adapter in enumerate(rows[:2]):
            theirs = open_with_peft(tiny_models.get(), adapter, tmp_path / str(row))
            expected = theirs(TOKENS[row : row + 1]).logits
            expected.square().sum().backward()
            assert_close(logits[row : row + 1], expected)
            assert_learns_like_peft(adapter, theirs)
        assert_close(logits[2:], tiny_models.get().reference(TOKENS[2:]).logits)


def test_two_adapters_of_the_same_numbers_have_gradients_of_their_own(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        one, same = make_adapter(model), make_adapter(model)
        copied = copy.deepcopy(one)
        with model.use_adapter([one, same, copied]):
            logits = model(TOKENS).logits
        logits[0].square().sum().backward()

        name = next(iter(one.named_matrices()))
        learned = [adapter.named_matrices()[name].grad for adapter in (one, same, copied)]
        assert [bool(gradient is not None and gradient.any()) for gradient in learned] == [
            True, False, False
        ]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "between"])
def test_lost_peer_is_replaced_by_one_that_gets_the_adapter(
    tiny_models: Any, when: str, tmp_path: Path
) -> None:
    with swarm_of(tiny_models, REPLICAS) as (swarm, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        compute_loss(theirs).backward()
        model.active_adapter = adapter
        compute_loss(model)  # whoever is asked has it now
        if when == "before":
            swarm.network.kill("peer0")
            swarm.network.kill("peer3")
        loss = compute_loss(model)
        if when == "between":
            swarm.network.kill("peer0")
            swarm.network.kill("peer3")
        loss.backward()

        assert_learns_like_peft(adapter, theirs)


def test_peer_that_has_forgotten_an_adapter_gets_it_again(tiny_models: Any, tmp_path: Path) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (swarm, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        compute_loss(theirs).backward()
        model.active_adapter = adapter
        compute_loss(model)
        for peer in swarm.peers:
            look_into(peer).adapters = AdapterStore(look_into(peer).clock, 2**29)
        loss = compute_loss(model)
        for peer in swarm.peers:
            look_into(peer).adapters = AdapterStore(look_into(peer).clock, 2**29)
        loss.backward()

        assert_learns_like_peft(adapter, theirs)


def test_gradients_are_those_of_the_adapter_that_forward_used(
    tiny_models: Any, tmp_path: Path
) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        compute_loss(theirs).backward()
        model.active_adapter = adapter
        loss = compute_loss(model)
        with torch.no_grad():
            for matrix in adapter.parameters():
                matrix.mul_(0.5)
            compute_loss(model)  # peers have the new one, in place of the old one
        loss.backward()

        assert_learns_like_peft(adapter, theirs)


def test_checkpoint_computes_again_with_the_adapter_of_the_first_time(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (_, model):
        adapter, blocks = make_adapter(model), model.transformer.h
        matrices = list(adapter.parameters())
        hidden = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        with model.use_adapter(adapter):
            expected = torch.autograd.grad(blocks(hidden).sum(), [hidden, *matrices])

        def run(hidden: Tensor) -> Tensor:
            with model.use_adapter(adapter):
                return blocks(hidden)

        for _ in range(2):
            checkpoint(run, hidden, use_reentrant=False).sum().backward()
        found = [tensor.grad for tensor in (hidden, *matrices)]
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, 2 * theirs)


def test_checkpoint_that_lost_its_adapter_loses_no_gradients_silently(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        adapter, blocks = make_adapter(model), model.transformer.h
        hidden = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        with model.use_adapter(adapter):
            output = checkpoint(blocks, hidden, use_reentrant=False)
        with pytest.raises(UsageError, match="a pass with other adapters than the first time"):
            output.sum().backward()

        model.active_adapter = adapter
        output = checkpoint(blocks, hidden, use_reentrant=False)
        with torch.no_grad():
            next(adapter.parameters()).mul_(0.5)
        with pytest.raises(UsageError, match="a pass with other adapters than the first time"):
            output.sum().backward()


def test_reentrant_checkpoint_takes_no_adapters(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        adapter, blocks = make_adapter(model), model.transformer.h
        hidden = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        with (
            model.use_adapter(adapter),
            pytest.raises(UsageError, match="use_reentrant=False"),
        ):
            checkpoint(blocks, hidden, use_reentrant=True)

        output = checkpoint(blocks, hidden, use_reentrant=True)
        with model.use_adapter(adapter), pytest.raises(UsageError, match="use_reentrant=False"):
            output.sum().backward()


def test_frozen_adapter_changes_rows_and_gets_no_gradients(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        adapter = make_adapter(model).requires_grad_(False)
        model.active_adapter = adapter
        hidden = model.get_input_embeddings()(TOKENS).requires_grad_()
        model(inputs_embeds=hidden).logits.sum().backward()

        assert hidden.grad is not None
        assert all(matrix.grad is None for matrix in adapter.parameters())


def test_adapter_of_another_model_never_leaves_the_client(tiny_models: Any, tmp_path: Path) -> None:
    LoraAdapter.create(tiny_models.get("gpt2").reference).save(tmp_path)
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        with pytest.raises(UsageError, match="this model has no linear"):
            model.load_adapter(tmp_path)
        with pytest.raises(UsageError, match="2 active adapters do not fit 3 rows"):
            model(TOKENS, active_adapter=[None, None])
        with pytest.raises(UsageError, match="active_adapter must be a LoraAdapter"):
            model.active_adapter = 7  # type: ignore[assignment]
        for folder in ("my-adapter", Path("my-adapter")):
            with pytest.raises(
                UsageError,
                match=r"'my-adapter' is not the digest .* LoraAdapter\.load\(folder, model\)",
            ):
                model(TOKENS, active_adapter=folder)  # pyright: ignore[reportArgumentType]


def test_name_that_is_neither_a_folder_nor_a_digest_is_called_so(tiny_models: Any) -> None:
    complaint = "'my-adapter' is neither an existing folder nor an id on the Hub .* nor the digest"
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        model.config.active_adapter = "my-adapter"
        with pytest.raises(UsageError, match=complaint):
            model(TOKENS)
        model.config.active_adapter = None
        with pytest.raises(UsageError, match=complaint):
            model.open_adapter(Path("my-adapter"))
        with pytest.raises(UsageError, match="active_adapter must be a LoraAdapter"):
            model.open_adapter(7)  # pyright: ignore[reportArgumentType]


def test_adapter_that_finds_no_room_is_refused_in_one_sentence(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP, failover_timeout_seconds=600.0) as (swarm, model):
        (peer,) = swarm.peers
        look_into(peer).adapters = AdapterStore(look_into(peer).clock, 1000)
        model.active_adapter = make_adapter(model)
        with pytest.raises(RefusedError, match="this peer accepts at most") as refusal:
            compute_loss(model)
        assert refusal.value.code is ErrorCode.NO_ROOM_FOR_ADAPTER
        with pytest.raises(RefusedError, match="this peer accepts at most"):
            model.generate(TOKENS[:1], max_new_tokens=2)


def test_adapter_that_is_too_large_for_a_peer_is_refused_with_advice(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.client.adapters.adapter_versions.MAX_ADAPTER_BYTES", 1000)
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        model.active_adapter = make_adapter(model)
        with pytest.raises(UsageError, match=r"in blocks 0:4, and a peer takes .* a lower rank"):
            compute_loss(model)
        with pytest.raises(UsageError, match="a lower rank"):
            model.generate(TOKENS[:1], max_new_tokens=2, do_sample=False)


def test_folder_is_opened_with_the_model(tiny_models: Any, tmp_path: Path) -> None:
    reference = tiny_models.get().reference
    theirs = open_with_peft(tiny_models.get(), make_adapter(reference), tmp_path)
    with (
        swarm_of(tiny_models, ONE_HOP, active_adapter=str(tmp_path)) as (_, model),
        torch.no_grad(),
    ):
        assert_close(model(TOKENS).logits, theirs(TOKENS).logits)
        assert_close(model(TOKENS, active_adapter=None).logits, reference(TOKENS).logits)
        assert isinstance(model.active_adapter, LoraAdapter)


@pytest.mark.slow
def test_published_adapter_is_used_by_its_digest(tiny_models: Any, tmp_path: Path) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4)), failover_timeout_seconds=2.0) as (_, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        digest = model.publish_adapter(adapter)
        assert digest == model.publish_adapter(adapter)
        with model.use_adapter(digest), torch.no_grad():
            assert_close(model(TOKENS).logits, theirs(TOKENS).logits)
            text = model.generate(TOKENS[:1], max_new_tokens=8, do_sample=False)
            expected = theirs.generate(TOKENS[:1], max_new_tokens=8, do_sample=False)
            assert isinstance(text, Tensor)
            assert torch.equal(text, expected)
        with pytest.raises(RefusedError, match="this peer has no adapter") as refusal:
            model(TOKENS, active_adapter="ab" * 32)
        assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER


def test_published_adapter_counts_once_where_it_is_used_by_its_digest(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (swarm, model), torch.no_grad():
        adapter, shared = make_adapter(model), look_into(swarm.peers[0]).adapters.shared
        digest = model.publish_adapter(adapter)
        num_bytes = shared.used_bytes
        model(TOKENS, active_adapter=digest)
        assert shared.used_bytes == num_bytes
        model(TOKENS, active_adapter=adapter)
        assert shared.used_bytes > 1.9 * num_bytes


@pytest.mark.slow
def test_digest_is_taken_however_it_was_copied(tiny_models: Any) -> None:
    with (
        swarm_of(tiny_models, ONE_HOP, failover_timeout_seconds=2.0) as (_, model),
        torch.no_grad(),
    ):
        digest = model.publish_adapter(make_adapter(model))
        expected = model(TOKENS, active_adapter=digest).logits
        for copied in (digest.upper(), f" {digest}\n"):
            assert torch.equal(model(TOKENS, active_adapter=copied).logits, expected)
            rows = model(TOKENS, active_adapter=[copied, digest, None]).logits
            assert_close(rows[:2], expected[:2])
            with model.use_adapter(copied), model.transformer.h.inference_session(max_length=4):
                assert model.active_adapter == digest
                model(TOKENS[:1, :2])
                with model.use_adapter(digest):  # which is the one of the session
                    model(TOKENS[:1, 2:4])
            model.active_adapter = copied
            assert (model.active_adapter, model.config.active_adapter) == (digest, digest)
            model.active_adapter = None
            model.config.active_adapter = copied
            assert torch.equal(model(TOKENS).logits, expected)
            assert model.config.active_adapter == digest
            model.config.active_adapter = None
        model.withdraw_adapter(f" {digest.upper()}")
        with pytest.raises(RefusedError, match="this peer has no adapter"):
            model(TOKENS, active_adapter=digest)


@pytest.mark.slow
def test_published_adapter_is_withdrawn_by_name_and_with_the_model(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdrawn: list[str] = []
    withdraw = AdapterStore.withdraw

    def note_and_withdraw(self: AdapterStore, name: AdapterId, tenant: Tenant) -> bool:
        withdrawn.append(name.hex())
        return withdraw(self, name, tenant)

    monkeypatch.setattr(AdapterStore, "withdraw", note_and_withdraw)
    monkeypatch.setattr("shoal.client.publishing.publisher.WITHDRAWAL_SECONDS", 60.0)
    with (
        swarm_of(tiny_models, ((0, 2), (2, 4)), failover_timeout_seconds=2.0) as (_, model),
        torch.no_grad(),
    ):
        one, other = [model.publish_adapter(make_adapter(model, seed)) for seed in (1, 2)]
        with pytest.raises(UsageError, match="was not published here"):
            model.withdraw_adapter("ab" * 32)
        with model.use_adapter(one), model.transformer.h.inference_session(max_length=4):
            model(TOKENS[:1, :2])
            model.withdraw_adapter(one)
            model(TOKENS[:1, 2:4])
        with pytest.raises(RefusedError) as refusal:
            model(TOKENS, active_adapter=one)
        assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER
        model(TOKENS, active_adapter=other)
        assert withdrawn == [one, one]

    assert withdrawn[2:] == [other, other]


def test_adapter_too_large_to_train_is_refused_before_anything_is_computed(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassBudget, "max_gradient_bytes", 2**14)
    with swarm_of(tiny_models, ONE_HOP, failover_timeout_seconds=1.0) as (swarm, model):
        adapter = model.active_adapter = make_adapter(model)
        with torch.no_grad():
            model(TOKENS[:, :4])  # which it may be used for
        (peer,) = swarm.peers
        num_heads = len(look_into(peer).adapters)
        for scale in (1.0, 0.5):  # as it was brought already, and as another one
            with torch.no_grad():
                for matrix in adapter.parameters():
                    matrix.mul_(scale)
            with pytest.raises(
                RefusedError, match=r"memory to train 4,096 numbers .* smaller rank"
            ):
                compute_loss(model)
        assert len(look_into(peer).adapters) == num_heads
        model.optimizer_at_peers(adapter)
        with pytest.raises(RefusedError, match=r"memory to train 4,096 numbers"):
            compute_loss(model)


def test_what_cannot_be_published_is_refused(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP, failover_timeout_seconds=1.0) as (_, model):
        head = make_adapter(model, target_modules=["v_proj", "lm_head"])
        with pytest.raises(UsageError, match="every client has a head of its own"):
            model.publish_adapter(head)
        for given in ("ad1", Path("folder"), None, [head], torch.nn.Linear(2, 2), "ab" * 32):
            complaint = r"publish_adapter\(\) takes a LoraAdapter, not .*"
            if isinstance(given, str | Path):
                complaint += "; load an adapter from a folder with"
            with pytest.raises(UsageError, match=complaint):
                model.publish_adapter(given)  # pyright: ignore[reportArgumentType]
            with pytest.raises(UsageError, match="an optimizer at peers takes a LoraAdapter"):
                model.optimizer_at_peers(given)  # pyright: ignore[reportArgumentType]
        for given in (head, None, 7, "folder"):
            with pytest.raises(
                UsageError, match=r"not the digest of .*; publish_adapter\(\) returns it"
            ):
                model.withdraw_adapter(given)  # pyright: ignore[reportArgumentType]
        digest = model.publish_adapter(make_adapter(model))
        with (
            model.use_adapter([make_adapter(model), digest, None]),
            pytest.raises(UsageError, match="make two calls"),
        ):
            compute_loss(model)


def test_adapters_are_cut_and_hashed_where_nobody_waits(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    make = adapter_versions.make_adapter_id

    def note_and_make(*files: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return make(*files)

    monkeypatch.setattr(adapter_versions, "make_adapter_id", note_and_make)
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (_, model):
        model.active_adapter = adapter = make_adapter(model)
        compute_loss(model).backward()
        model.publish_adapter(adapter)
        model.generate(TOKENS[:1, :4], max_new_tokens=2)

    assert len(threads) == 2
    assert not [name for name in threads if "client" in name]
