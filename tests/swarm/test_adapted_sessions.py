"""Sessions with adapters: what is generated is peft's, in any company, whoever is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_scene import assert_close, make_adapter, open_with_peft, swarm_of
from memory_swarm import look_into
from torch import Tensor

from shoal.peer.engine.adapters.adapter_store import AdapterStore
from shoal.protocol.errors import UsageError

# peft's own affair.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

TWO_HOPS = ((0, 2), (2, 4))
REPLICAS = ((0, 2), (0, 2), (2, 4), (2, 4))
PROMPT = torch.arange(12)[None] * 7 % 128


@pytest.mark.parametrize("delivery", ["chain", "star"])
@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "lm_head"]])
def test_text_is_that_of_peft(
    tiny_models: Any, delivery: str, targets: Any, tmp_path: Path
) -> None:
    with swarm_of(tiny_models, TWO_HOPS, delivery=delivery) as (_, model):
        adapter = make_adapter(model, target_modules=targets)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        expected = theirs.generate(PROMPT, max_new_tokens=20, do_sample=False)

        found = model.generate(PROMPT, max_new_tokens=20, do_sample=False, active_adapter=adapter)
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected)
        plain = tiny_models.get().reference.generate(PROMPT, max_new_tokens=20, do_sample=False)
        without = model.generate(PROMPT, max_new_tokens=20, do_sample=False)
        assert isinstance(without, Tensor)
        assert torch.equal(without, plain)


def test_padded_batch_is_that_of_peft(tiny_models: Any, tmp_path: Path) -> None:
    """Rows of different lengths have sessions in threads of their own."""
    mask = torch.ones(2, PROMPT.shape[1], dtype=torch.long)
    mask[0, :5] = 0
    options: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 8}
    prompts = PROMPT.repeat(2, 1) * mask
    with swarm_of(tiny_models, TWO_HOPS) as (_, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        expected = theirs.generate(prompts, do_sample=False, **options)

        found = model.generate(prompts, do_sample=False, active_adapter=adapter, **options)

        assert isinstance(found, Tensor)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("lost", ["peer", "adapter"])
def test_text_goes_on_when_something_is_lost(tiny_models: Any, lost: str, tmp_path: Path) -> None:
    with swarm_of(tiny_models, REPLICAS) as (swarm, model):
        adapter = make_adapter(model)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        expected = theirs.generate(PROMPT, max_new_tokens=20, do_sample=False)
        with model.use_adapter(adapter), model.inference_session(max_length=64):
            model.generate(PROMPT, max_new_tokens=8, do_sample=False)
            if lost == "peer":
                swarm.network.kill("peer0")
                swarm.network.kill("peer2")
            else:  # what replaces the others has forgotten it, too
                for peer in swarm.peers:
                    look_into(peer).adapters = AdapterStore(look_into(peer).clock, 2**29)
                swarm.network.kill("peer1")
                swarm.network.kill("peer3")
            model.generate(max_new_tokens=12, do_sample=False)
            session = model.active_session
            assert session is not None
            assert session.output_ids is not None
            assert torch.equal(session.output_ids, expected)


def test_forks_keep_the_adapter_and_others_cannot_be_used(tiny_models: Any, tmp_path: Path) -> None:
    with swarm_of(tiny_models, TWO_HOPS) as (_, model):
        adapter, other = make_adapter(model), make_adapter(model, 2)
        theirs = open_with_peft(tiny_models.get(), adapter, tmp_path)
        with torch.no_grad():
            expected = theirs(PROMPT).logits
        with model.use_adapter(adapter), model.inference_session(max_length=64) as session:
            model(PROMPT[:, :8])
            with session.fork() as fork, model.use_session(fork):
                assert_close(model(PROMPT[:, 8:]).logits, expected[:, 8:])
            for choice in (None, other, [adapter]):
                with pytest.raises(UsageError, match="the active adapter is not the one"):
                    model(PROMPT[:, 8:], active_adapter=choice)
        with (
            model.use_adapter([adapter]),
            pytest.raises(UsageError, match="all rows of a session share one adapter"),
            model.inference_session(max_length=64),
        ):
            pass


def test_peer_keeps_the_adapter_of_a_session(tiny_models: Any) -> None:
    """Also when its client has replaced it since; and no longer than the session."""
    with swarm_of(tiny_models, ((0, 4),)) as (swarm, model):
        adapter, adapter_store = make_adapter(model), look_into(swarm.peers[0]).adapters
        with model.use_adapter(adapter), model.inference_session(max_length=64):
            model(PROMPT[:, :8])
            held = adapter_store.shared.used_bytes
            with torch.no_grad():
                next(adapter.parameters()).add_(1.0)
            with model.use_session(None):
                model(PROMPT)  # with what it has become
            assert adapter_store.shared.used_bytes == 2 * held
            model(PROMPT[:, 8:])
        model(PROMPT, active_adapter=None)  # behind the end of the session
        assert adapter_store.shared.used_bytes == held
