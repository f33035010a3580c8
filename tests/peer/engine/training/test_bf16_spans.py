"""Spans that compute in bf16: as plain PyTorch does under autocast, and equal to themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from training_runs import MODEL, describe_run, load_plain, open_run

from shoal.peer.engine.training.numerics import has_bf16_products
from shoal.peer.engine.training.numerics_class import compute_class_digest
from shoal.peer.engine.training.run_plan import plan_run
from shoal.peer.engine.training.span_state import digest_tensors
from shoal.peer.engine.training.trainable_span import TrainableSpan
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.errors import UsageError
from shoal.protocol.runs.training_run import PartId, read_run
from shoal.protocol.spans import Span

needs_bf16 = pytest.mark.skipif(not has_bf16_products(), reason="needs instructions for bf16")
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 96,
    "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@needs_bf16
@pytest.mark.parametrize("model", [MODEL, GPT2], ids=["llama", "gpt2"])
def test_losses_follow_plain_pytorch_under_autocast(tmp_path: Path, model: dict[str, Any]) -> None:
    model = model | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    settings = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.05}
    run, shards = open_run(
        tmp_path, num_updates=6, model=model, optimizer=settings, precision="bf16"
    )  # fmt: skip
    exact, _ = open_run(tmp_path, num_updates=6, model=model, optimizer=settings)
    whole = WholeRun(run)
    plain = load_plain(run, whole.read_weights())
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.05)

    in_fp32 = [update.loss for update in WholeRun(exact).train(shards)]
    for update in whole.train(shards):
        loss = torch.zeros(())
        for index in range(run.parts_per_update):
            tokens, labels = shards.read_part(run, PartId(update.number, index))
            with torch.autocast("cpu", torch.bfloat16):
                logits = plain(tokens, use_cache=False).logits
            assert logits.dtype is torch.bfloat16
            part = functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
            )
            part = part / run.tokens_per_update
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * run.compute_learning_rate_factor(update.number)
        optimizer.step()
        optimizer.zero_grad()
        assert update.loss == pytest.approx(float(loss), rel=1e-3)
        assert update.gradient_norm == pytest.approx(float(norm), rel=1e-2)
        assert update.loss == pytest.approx(in_fp32[update.number], rel=2e-2)
        assert update.loss != in_fp32[update.number]
    assert all(one.dtype is torch.float32 for one in whole.read_weights().values())


@needs_bf16
def test_hidden_states_are_float32_and_passes_have_the_same_bits_again(tmp_path: Path) -> None:
    run, shards = open_run(
        tmp_path, model=MODEL | {"attention_dropout": 0.3}, precision="bf16"
    )  # fmt: skip
    part, found = PartId(0, 0), set[tuple[str, str]]()
    tokens, labels = shards.read_part(run, part)
    for graph_bytes in (2**30, 0):
        first = TrainableSpan(run, Span(0, 2), graph_bytes=graph_bytes)
        last = TrainableSpan(run, Span(2, 4))
        hidden = first.run_forward(part, tokens)
        grads = last.run_loss(part, hidden, labels).input_grads_BTH
        assert grads is not None
        assert hidden.dtype is grads.dtype is torch.float32
        first.run_backward(part, grads)
        first_digest, last_digest = (digest_tensors(one.read_gradients()) for one in (first, last))
        found.add((first_digest, last_digest))

    assert len(found) == 1


@needs_bf16
def test_class_digest_tells_what_is_computed_in() -> None:
    digests = {
        compute_class_digest(read_run(describe_run(precision=one)), num_threads=1)
        for one in ("fp32", "bf16")
    }

    assert len(digests) == 2


def test_processor_without_bf16_is_refused_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)

    compute_class_digest(read_run(describe_run()), num_threads=1)
    with pytest.raises(UsageError, match="precision: this machine's processor has no instructions"):
        compute_class_digest(read_run(describe_run(precision="bf16")), num_threads=1)


def test_plan_counts_the_weights_in_bf16() -> None:
    for one, other in zip(
        plan_run(read_run(describe_run(precision="bf16"))).stages,
        plan_run(read_run(describe_run())).stages,
        strict=True,
    ):
        assert one.cast_bytes == 2 * one.num_multiplied
        assert one.memory_bytes == other.memory_bytes + one.cast_bytes
