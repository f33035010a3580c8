"""Spans that are trained: equal to plain PyTorch, and to themselves whoever computes what."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from training_runs import MODEL, load_plain, open_run

from shoal.kernels.linear.nf4 import has_bitsandbytes
from shoal.models.token_shards import TokenShards
from shoal.peer.engine.training.optimizers import SpanOptimizer
from shoal.peer.engine.training.span_state import digest_tensors
from shoal.peer.engine.training.trainable_span import NotFiniteError, TrainableSpan
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.errors import RefusedError
from shoal.protocol.limits import MAX_HELD_OUT_LOSS
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
WIDE = MODEL | {"hidden_size": 64, "intermediate_size": 96}
"""Whose matrices have 4,096 numbers or more: 8-bit AdamW keeps 32 bits of smaller ones."""

needs_bitsandbytes = pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")
EIGHT_BITS = pytest.param("adamw8bit", marks=needs_bitsandbytes)
FAMILIES = {"tied": MODEL, "untied": UNTIED, "gemma2": GEMMA, "opt": OPT}


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


def test_held_out_loss_is_that_of_plain_pytorch_and_changes_nothing(tmp_path: Path) -> None:
    model = MODEL | {"attention_dropout": 0.5}
    run, shards = open_run(tmp_path, model=model, num_updates=2, num_held_out=200)
    whole, undisturbed = WholeRun(run), WholeRun(run)
    measured = [whole.measure_held_out_loss(shards) for _ in whole.train(shards)]

    plain = load_plain(run, whole.read_weights()).eval()
    parts = [shards.read_held_out(run, index) for index in range(run.num_held_out_parts)]
    losses = list[float]()
    for tokens, labels in parts:
        logits = plain(tokens, use_cache=False).logits
        losses.append(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())

    assert len(losses) == 6
    assert measured[-1] == pytest.approx(sum(losses) / 6, rel=1e-6)
    assert measured[0] != measured[1] == whole.measure_held_out_loss(shards)
    for _ in undisturbed.train(shards):
        pass
    assert whole.compute_weights_digest() == undisturbed.compute_weights_digest()


def test_held_out_loss_of_a_model_that_overflows_is_the_largest(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path, num_held_out=200)
    whole = WholeRun(run)
    with torch.no_grad():
        for weight in whole.stages[0].read_weights().values():
            weight.fill_(math.nan)

    assert whole.measure_held_out_loss(shards) == pytest.approx(MAX_HELD_OUT_LOSS)


def test_held_out_part_of_another_update_is_refused(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path, num_held_out=200)
    span = TrainableSpan(run, Span(0, 2))
    tokens, _ = shards.read_held_out(run, 0)

    with pytest.raises(RefusedError, match="update 0 is under way, not 1"):
        span.evaluate(1, tokens)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", EIGHT_BITS])
def test_losses_follow_plain_pytorch(tmp_path: Path, optimizer: str) -> None:
    settings = {"name": optimizer, "learning_rate": 0.01, "weight_decay": 0.05, "clip_norm": 0.2}
    run, shards = open_run(tmp_path, num_updates=6, model=WIDE, optimizer=settings)
    whole = WholeRun(run)
    model = load_plain(run, whole.read_weights())
    weights = dict(model.named_parameters())
    matrices = {name: one for name, one in weights.items() if "layers" in name and one.ndim == 2}
    if optimizer != "muon":
        matrices.clear()
    # Ours: torch's rounds to bfloat16, where a last bit may become a step (test_muon.py).
    muon = SpanOptimizer(run.optimizer, matrices)
    others = [one for name, one in weights.items() if name not in matrices]
    plain: torch.optim.Optimizer = torch.optim.SGD(others, weight_decay=0.05)
    if optimizer == "adamw8bit":
        library: Any = pytest.importorskip("bitsandbytes")
        plain = library.optim.AdamW8bit(others, betas=(0.9, 0.95), weight_decay=0.05)
    elif optimizer != "sgd":
        plain = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.05)

    updates = list[int]()
    for update in whole.train(shards):
        updates.append(update.number)
        loss = compute_plain(model, run, shards, update.number)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        assert norm > 0.2
        factor = run.compute_learning_rate_factor(update.number)
        plain.param_groups[0]["lr"] = 0.01 * factor
        plain.step()
        muon.step({name: one.grad for name, one in matrices.items()}, factor)
        model.zero_grad()
        assert update.loss == pytest.approx(loss, rel=1e-5)
        assert update.gradient_norm == pytest.approx(float(norm), rel=1e-3)
    assert updates == list(range(6))
    if optimizer == "sgd":
        for name, weight in whole.read_weights().items():
            assert measure_error(weight, weights[name]) < 1e-6


def test_initial_weights_do_not_depend_on_the_stages(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path, stage_borders=[])
    cut, _ = open_run(tmp_path, stage_borders=[1, 3])

    one, three = WholeRun(run), WholeRun(cut)

    assert digest_tensors(one.read_weights()) == digest_tensors(three.read_weights())
    other, _ = open_run(tmp_path, seed=8)
    assert digest_tensors(WholeRun(other).read_weights()) != digest_tensors(one.read_weights())


class Replicas:
    """A run whose stages have several replicas that draw the parts among them.

    Passes of several parts are under way at once, in an order that is drawn, too. Some parts are
    counted by two replicas, of which one takes its gradients out again.
    """

    def __init__(self, run: TrainingRun, shards: TokenShards, num_replicas: int) -> None:
        self._run, self._shards = run, shards
        # The first replica keeps graphs, the others compute their forward passes again.
        self.stages = [
            [
                TrainableSpan(run, span, graph_bytes=0 if index else 2**30)
                for index in range(num_replicas)
            ]
            for span in run.list_stages(4)
        ]
        self._rng = random.Random(SEED)

    def train(self) -> None:
        for update in range(self._run.num_updates):
            opened = [
                self._compute(PartId(update, index)) for index in range(self._run.parts_per_update)
            ]
            while opened:
                passes = self._rng.choice(opened)
                if next(passes, None) is None:
                    opened.remove(passes)
            self._update()

    def _compute(self, part: PartId) -> Iterator[bool]:
        """Run the passes of a part, one between two yields."""
        inputs, labels = self._shards.read_part(self._run, part)
        (first, mate, *_), (last, twin, *_) = (
            self._rng.sample(replicas, len(replicas)) for replicas in self.stages
        )
        hidden = first.run_forward(part, inputs)
        yield True
        grads = last.run_loss(part, hidden, labels).input_grads_BTH
        assert grads is not None
        yield True
        if self._rng.random() < 0.5:
            twin.run_loss(part, hidden, labels)
            yield True
            self._rng.choice([last, twin]).discount(part, hidden, labels)
            mate.run_forward(part, inputs)
            yield True
            mate.run_backward(part, grads)
            yield True
            mate.discount(part, inputs, grads)
        yield True
        first.run_backward(part, grads)

    def _update(self) -> None:
        counted = [
            sorted(part for one in replicas for part in one.counted) for replicas in self.stages
        ]
        update = counted[0][0].update
        expected = [PartId(update, index) for index in range(self._run.parts_per_update)]
        assert counted == [expected, expected]
        names = {name for replicas in self.stages for name in replicas[0].sums}
        for name in names:
            first, *others = [
                replica.sums[name]
                for replicas in self.stages
                for replica in replicas
                if name in replica.sums
            ]
            for other in others:
                first.merge(other.units, other.num_addends)
            for other in others:
                other.load(first.units, first.num_addends)
        firsts = [replicas[0] for replicas in self.stages]
        norms = [one.measure_squared_norm(one.read_gradients()) for one in firsts]
        for replicas in self.stages:
            for replica in replicas:
                replica.apply_update(replica.read_gradients(), math.fsum(norms))


@pytest.mark.parametrize(
    ("optimizer", "num_replicas"),
    [("adamw", 2), ("muon", 3), pytest.param("adamw8bit", 2, marks=needs_bitsandbytes)],
)
def test_weights_have_one_digest_whoever_computes_the_parts(
    tmp_path: Path, optimizer: str, num_replicas: int
) -> None:
    run, shards = open_run(
        tmp_path,
        model=WIDE | {"attention_dropout": 0.1},
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon", EIGHT_BITS])
def test_joiner_continues_from_the_state_of_a_replica(tmp_path: Path, optimizer: str) -> None:
    settings = {"name": optimizer, "learning_rate": 0.01}
    changes = {"model": WIDE, "stage_borders": [], "optimizer": settings}
    run, shards = open_run(tmp_path, num_updates=3, **changes)
    whole = WholeRun(run)
    (mate,) = whole.stages
    updates = whole.train(shards)
    next(updates)
    joined = WholeRun(run)
    (joiner,) = joined.stages
    joined.compute_gradients(0, shards)  # of what it did before, nothing is left

    save_file(mate.read_state(), tmp_path / "state.safetensors")
    joiner.load_state(load_file(tmp_path / "state.safetensors"))

    assert joiner.compute_digest() == mate.compute_digest()
    assert not joiner.counted
    assert list(joined.train(shards)) == list(updates)
    assert joiner.compute_digest() == mate.compute_digest()
    assert joiner.update == 3


def test_digest_covers_more_than_the_weights(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path)
    span = TrainableSpan(run, Span(0, 2))
    state = {name: tensor.clone() for name, tensor in span.read_state().items()}
    digests = {span.compute_digest()}

    for name in ("exponents", "update", "optimizer/model.layers.0.mlp.up_proj.weight/exp_avg"):
        span.load_state(state | {name: state[name] + 1})
        digests.add(span.compute_digest())

    assert len(digests) == 4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"update": torch.tensor(5)}, "the run has 4 updates, no number 5"),
        ({"exponents": torch.full((19,), 99)}, "exponents that no sum has"),
        ({"weights/model.layers.0.mlp.up_proj.weight": torch.full((48, 32), float("nan"))},
         "the weights/model.layers.0.mlp.up_proj.weight are not finite"),
    ],
)  # fmt: skip
def test_state_that_cannot_be_one_of_the_span_changes_nothing(
    tmp_path: Path, changes: dict[str, Tensor], complaint: str
) -> None:
    run, _ = open_run(tmp_path)
    span, other = TrainableSpan(run, Span(0, 2)), TrainableSpan(run, Span(0, 2))
    state = {name: tensor.clone() for name, tensor in other.read_state().items()}
    state["weights/model.embed_tokens.weight"] += 1
    before = span.compute_digest()

    with pytest.raises(RefusedError, match=complaint):
        span.load_state(state | changes)

    assert span.compute_digest() == before


def test_kept_and_recomputed_passes_have_the_same_bits(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path, model=MODEL | {"attention_dropout": 0.3})
    kept, recomputed = TrainableSpan(run, Span(0, 2)), TrainableSpan(run, Span(0, 2), graph_bytes=0)
    parts = [PartId(0, index) for index in range(4)]

    torch.manual_seed(1)
    outputs = [kept.run_forward(part, shards.read_part(run, part)[0]) for part in parts]
    torch.manual_seed(2)
    for part, output in zip(parts, outputs, strict=True):
        drawn = torch.get_rng_state()
        again = recomputed.run_forward(part, shards.read_part(run, part)[0])
        assert torch.equal(again, output)
        assert torch.equal(torch.get_rng_state(), drawn)
    for part in parts:
        kept.run_backward(part, outputs[0])
    for part in reversed(parts):
        recomputed.run_backward(part, outputs[0])

    assert digest_tensors(kept.read_gradients()) == digest_tensors(recomputed.read_gradients())


def test_graphs_stay_within_their_budget(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    parts = [PartId(0, index) for index in range(4)]
    span = TrainableSpan(run, Span(0, 2))
    tokens, _ = shards.read_part(run, parts[0])
    outputs = span.run_forward(parts[0], tokens)
    assert span.graph_bytes > 4 * outputs.nbytes

    small = TrainableSpan(run, Span(0, 2), graph_bytes=2 * span.graph_bytes)
    for part in (*parts, parts[2]):
        small.run_forward(part, tokens)

    assert small.graph_bytes == 2 * span.graph_bytes
    small.run_backward(parts[0], outputs)
    assert small.graph_bytes == span.graph_bytes
    small.run_forward(parts[3], tokens)
    assert small.graph_bytes == 2 * span.graph_bytes


def test_graphs_of_several_peers_leave_as_much_free_as_each_has(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    parts = [PartId(0, index) for index in range(4)]
    tokens, _ = shards.read_part(run, parts[0])
    one = TrainableSpan(run, Span(0, 2))
    one.run_forward(parts[0], tokens)
    size = one.graph_bytes
    spans: list[TrainableSpan] = []

    def read_free_bytes() -> int:
        kept = sum(span.graph_bytes for span in spans)
        return 7 * size - kept - size  # with the graph that was just computed

    spans += [TrainableSpan(run, Span(0, 2), read_free_bytes=read_free_bytes) for _ in range(2)]
    for part in parts:
        for span in spans:
            span.run_forward(part, tokens)

    assert [span.graph_bytes for span in spans] == [2 * size, 2 * size]


def test_part_of_another_update_is_refused(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    span = TrainableSpan(run, Span(0, 2))
    tokens, _ = shards.read_part(run, PartId(1, 0))

    with pytest.raises(RefusedError, match="part 0 of update 1 comes while update 0 is under way"):
        span.run_forward(PartId(1, 0), tokens)
    with pytest.raises(RefusedError, match="part 4 of update 0: an update has 4 parts"):
        span.run_forward(PartId(0, 4), tokens)


def test_part_is_counted_once(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    first, last = TrainableSpan(run, Span(0, 2)), TrainableSpan(run, Span(2, 4))
    part = PartId(0, 0)
    tokens, labels = shards.read_part(run, part)
    hidden = first.run_forward(part, tokens)
    grads = last.run_loss(part, hidden, labels).input_grads_BTH
    assert grads is not None
    first.run_backward(part, grads)
    gradients = [digest_tensors(span.read_gradients()) for span in (first, last)]

    for again in (
        lambda: first.run_forward(part, tokens),
        lambda: first.run_backward(part, grads),
        lambda: last.run_loss(part, hidden, labels),
    ):
        with pytest.raises(RefusedError, match="part 0 of update 0 is counted already"):
            again()
    for other in (hidden + 1, hidden.bfloat16(), hidden[:1]):
        with pytest.raises(RefusedError, match="was counted with other inputs"):
            last.discount(part, other, labels)

    assert [digest_tensors(span.read_gradients()) for span in (first, last)] == gradients
    first.discount(part, tokens, grads)
    last.discount(part, hidden, labels)
    for span in (first, last):
        assert not span.counted
        assert all(not gradient.any() for gradient in span.read_gradients().values())
    with pytest.raises(RefusedError, match="part 0 of update 0 is not counted here"):
        last.discount(part, hidden, labels)
    with pytest.raises(RefusedError, match="part 0 of update 0 has had no forward pass here"):
        first.run_backward(part, grads)


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_refused_hidden_states_and_gradients_leave_no_trace(tmp_path: Path, factor: float) -> None:
    run, _ = open_run(tmp_path, stage_borders=[1, 3])
    span, part = TrainableSpan(run, Span(1, 3)), PartId(0, 0)
    hidden = torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32)

    with pytest.raises(RefusedError, match="the inputs are not finite"):
        span.run_forward(part, hidden * factor)
    span.run_forward(part, hidden)
    with pytest.raises(RefusedError, match="the output gradients are not finite"):
        span.run_backward(part, hidden * factor)

    assert not span.counted
    assert all(not gradient.any() for gradient in span.read_gradients().values())
    assert span.run_backward(part, hidden).input_grads_BTH is not None  # still under way


def test_gradients_that_become_infinite_leave_no_trace(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    span, part = TrainableSpan(run, Span(0, 2)), PartId(0, 0)
    tokens, _ = shards.read_part(run, part)
    huge = torch.full_like(span.run_forward(part, tokens), 3e38)

    with pytest.raises(RefusedError, match="the gradients of part 0 of update 0 of span 0:2 are"):
        span.run_backward(part, huge)

    assert not span.counted
    assert all(not gradient.any() for gradient in span.read_gradients().values())
    span.run_backward(part, huge * 1e-38)
    other = TrainableSpan(run, Span(0, 2))
    other.run_forward(part, tokens)
    other.run_backward(part, huge * 1e-38)
    assert digest_tensors(span.read_gradients()) == digest_tensors(other.read_gradients())


def test_outputs_that_are_not_finite_are_told_apart_from_bad_inputs(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    span, part = TrainableSpan(run, Span(0, 2)), PartId(0, 0)
    tokens, _ = shards.read_part(run, part)
    for weight in span.read_weights().values():
        weight.fill_(float("inf"))

    with pytest.raises(NotFiniteError, match="the outputs of part 0 of update 0 of span 0:2 are"):
        span.run_forward(part, tokens)
