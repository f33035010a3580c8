"""Spans that are trained: equal to plain PyTorch, and to themselves whoever computes what."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from training_runs import MODEL, open_run
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shoal.models.corpora.token_shards import TokenShards
from shoal.peer.engine.training.trainable_span import TrainableSpan, digest_tensors
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.errors import RefusedError
from shoal.protocol.runs.training_run import PartId, TrainingRun
from shoal.protocol.spans import Span

SEED = 5
UNTIED = MODEL | {"tie_word_embeddings": False}
GEMMA = MODEL | {
    "model_type": "gemma2",
    "head_dim": 8,
    "sliding_window": 8,
    "final_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 8,
}
OPT = {
    "model_type": "opt",
    "vocab_size": MODEL["vocab_size"],
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
    "init_std": 0.2,
}
FAMILIES = {"tied": MODEL, "untied": UNTIED, "gemma2": GEMMA, "opt": OPT}


def load_plain(run: TrainingRun, weights: dict[str, Tensor]) -> Any:
    """Return transformers' model of a run with these weights."""
    config = CONFIG_MAPPING[run.model["model_type"]].from_dict(dict(run.model))
    model = AutoModelForCausalLM.from_config(config)  # with sdpa, where it has that
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.train()


def compute_plain(model: Any, run: TrainingRun, shards: TokenShards, update: int) -> float:
    """Leave the gradients of an update in a model, and return its loss."""
    loss = 0.0
    for index in range(run.parts_per_update):
        tokens, labels = shards.read_part(run, PartId(update, index))
        logits = model(tokens, use_cache=False).logits
        part = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        part = part / run.tokens_per_update
        part.backward()
        loss += part.item()
    return loss


def measure_error(one: Tensor, other: Tensor) -> float:
    difference = (one - other.detach()).norm()
    # Some gradients are nothing but rounding: no bias of keys changes a softmax.
    return float(difference / other.detach().norm().clamp(min=1e-5))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_an_update_are_those_of_plain_pytorch(tmp_path: Path, family: str) -> None:
    run, shards = open_run(tmp_path, model=FAMILIES[family])
    whole = WholeRun(run)
    model = load_plain(run, whole.read_weights())

    loss = whole.compute_gradients(0, shards)
    plain_loss = compute_plain(model, run, shards, 0)

    assert loss == pytest.approx(plain_loss, rel=1e-6)
    plain = {name: weight.grad for name, weight in model.named_parameters()}
    gradients = {
        name: gradient
        for stage in whole.stages
        for name, gradient in stage.read_gradients().items()
    }
    assert gradients.keys() == plain.keys()
    errors = {name: measure_error(gradients[name], plain[name]) for name in plain}
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_losses_follow_plain_pytorch(tmp_path: Path, optimizer: str) -> None:
    settings = {"name": optimizer, "learning_rate": 0.01, "weight_decay": 0.05}
    run, shards = open_run(tmp_path, num_updates=6, optimizer=settings)
    whole = WholeRun(run)
    model = load_plain(run, whole.read_weights())
    optimizers = make_plain_optimizers(model, optimizer)

    updates = list[int]()
    for update in whole.train(shards):
        updates.append(update.number)
        loss = compute_plain(model, run, shards, update.number)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for plain in optimizers:
            for group in plain.param_groups:
                group["lr"] = 0.01 * run.choose_rate_fraction(update.number)
            plain.step()
            plain.zero_grad()
        # Muon iterates in bfloat16, where a last bit of a gradient may become a rounding step.
        assert update.loss == pytest.approx(loss, rel=1e-4 if optimizer == "muon" else 1e-5)
        assert update.gradient_norm == pytest.approx(float(norm), rel=1e-3)
    assert updates == list(range(6))
    if optimizer == "sgd":
        weights = dict(model.named_parameters())
        for name, weight in whole.read_weights().items():
            assert measure_error(weight, weights[name]) < 1e-6


def make_plain_optimizers(model: Any, name: str) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [
        weight for key, weight in named if name == "muon" and "layers" in key and weight.ndim == 2
    ]
    chosen = set(matrices)
    others = [weight for _, weight in named if weight not in chosen]
    if name == "sgd":
        return [torch.optim.SGD(others, lr=0.01, weight_decay=0.05)]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.05)
    ]
    if matrices:
        muon = torch.optim.Muon(
            matrices, lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        )
        made.append(muon)
    return made


def test_initial_weights_do_not_depend_on_the_stages(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path, stage_borders=[])
    cut, _ = open_run(tmp_path, stage_borders=[1, 3])

    one, three = WholeRun(run), WholeRun(cut)

    assert digest_tensors(one.read_weights()) == digest_tensors(three.read_weights())
    other, _ = open_run(tmp_path, seed=8)
    assert digest_tensors(WholeRun(other).read_weights()) != digest_tensors(one.read_weights())


class Replicas:
    """A run whose stages have several replicas that draw the parts among them."""

    def __init__(self, run: TrainingRun, shards: TokenShards, num_replicas: int) -> None:
        self._run, self._shards = run, shards
        self.stages = [
            [TrainableSpan(run, span) for _ in range(num_replicas)] for span in run.list_stages(4)
        ]
        self._rng = random.Random(SEED)

    def train(self) -> None:
        for update in range(self._run.num_updates):
            order = list(range(self._run.parts_per_update))
            self._rng.shuffle(order)
            for index in order:
                self._compute(PartId(update, index))
            self._update()

    def _compute(self, part: PartId) -> None:
        inputs, labels = self._shards.read_part(self._run, part)
        first, last = (self._rng.choice(replicas) for replicas in self.stages)
        hidden = first.run_forward(part, inputs)
        grads = last.run_loss(part, hidden, labels).input_grads_BTH
        assert grads is not None
        first.run_backward(part, grads)

    def _update(self) -> None:
        names = {name for replicas in self.stages for name in replicas[0].sums}
        for name in names:
            holders = [
                replica.sums[name]
                for replicas in self.stages
                for replica in replicas
                if name in replica.sums
            ]
            units = torch.stack([holder.units for holder in holders]).sum(0)
            for holder in holders:
                holder.units.copy_(units)
        gradients = [replicas[0].read_gradients() for replicas in self.stages]
        norms = dict[str, float]()
        for replicas, own in zip(self.stages, gradients, strict=True):
            norms |= replicas[0].measure_norms(own)
        for replicas in self.stages:
            for replica in replicas:
                replica.apply_update(replica.read_gradients(), norms.values())


@pytest.mark.parametrize(("optimizer", "num_replicas"), [("adamw", 2), ("muon", 3)])
def test_weights_have_one_digest_whoever_computes_the_parts(
    tmp_path: Path, optimizer: str, num_replicas: int
) -> None:
    run, shards = open_run(
        tmp_path,
        model=MODEL | {"attention_dropout": 0.1},
        optimizer={"name": optimizer, "learning_rate": 0.01},
    )
    whole = WholeRun(run)
    for _ in whole.train(shards):
        pass

    replicas = Replicas(run, shards, num_replicas)
    replicas.train()

    expected = [stage.compute_digest() for stage in whole.stages]
    for stage, digest in zip(replicas.stages, expected, strict=True):
        assert {replica.compute_digest() for replica in stage} == {digest}


def test_part_of_another_update_is_refused(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    span = TrainableSpan(run, Span(0, 2))
    tokens, _ = shards.read_part(run, PartId(1, 0))

    with pytest.raises(RefusedError, match="part 0 of update 1 comes while update 0 is under way"):
        span.run_forward(PartId(1, 0), tokens)


@pytest.mark.parametrize("spoil", [lambda grads: grads / 0, lambda grads: grads * float("nan")])
def test_gradients_that_are_not_finite_leave_no_trace(
    tmp_path: Path, spoil: Callable[[Tensor], Tensor]
) -> None:
    run, shards = open_run(tmp_path)
    span = TrainableSpan(run, Span(0, 2))
    part = PartId(0, 0)
    hidden = span.run_forward(part, shards.read_part(run, part)[0])

    with pytest.raises(RefusedError, match="are not finite"):
        span.run_backward(part, spoil(torch.ones_like(hidden)))

    assert not span.counted
    assert all(not gradient.any() for gradient in span.read_gradients().values())
