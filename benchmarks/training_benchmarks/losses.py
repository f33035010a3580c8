"""Losses of exact training beside those of a plain PyTorch loop, update by update.

    make bench BENCHMARKS=training_benchmarks.losses
    make bench BENCHMARKS=training_benchmarks.losses ARGS="--optimizers adamw --parts 4"

Both train the bundled architecture from the same weights on the same parts. The plain loop runs
with one thread and with two, as it may differ from itself, too. Its Muon is ours; in another row it
is torch's, which rounds to bfloat16. Printed are the largest relative differences of losses, and
that of all weights at the end, to the plain loop with one thread. Loops of one thread run two at a
time, each in a process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from measuring.program import run_program
from measuring.report import TargetFigure, at_most
from measuring.side_by_side import compute_side_by_side
from shoal.cli.benchmarking.figure import describe_machine
from shoal.models.token_shards import TokenShards, write_shard
from shoal.peer.engine.training.numerics import computing_alike
from shoal.peer.engine.training.optimizers import SpanOptimizer
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.runs.training_run import Mode, PartId, TrainingRun, read_run

_CONFIG = Path(__file__).parents[2] / "models" / "shoal-stories" / "config.json"
_RATES = {"adamw": 0.003, "muon": 0.01, "sgd": 0.1}
_LINE = "{:10} {:28} {:>12} {:>12} {:>12}"
_PLAIN, _EXACT = "plain, 1 thread", "exact"
_TWO_THREADS, _TORCHS_MUON = "plain, 2 threads", "plain, torch's Muon"
_FIRST = 20
_TELL_UPDATES = 20


def write_run(
    folder: Path,
    optimizer: str,
    num_updates: int,
    num_parts: int,
    *,
    num_held_out: int = 0,
    seed: int = 0,
    mode: Mode = "exact",
    num_blocks: int = 8,
) -> tuple[TrainingRun, TokenShards]:
    """Return a run over tokens of which nine in ten follow from the one before.

    The corpus has as many more parts as are to be held out.
    """
    model = json.loads(_CONFIG.read_text()) | {"num_hidden_layers": num_blocks}
    vocabulary_size = model["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    num_tokens = (num_updates * num_parts + num_held_out) * 4 * 128 + 1
    followers = torch.randperm(vocabulary_size, generator=generator).tolist()
    tokens = torch.randint(0, vocabulary_size, (num_tokens,), generator=generator).tolist()
    is_drawn = (torch.rand(num_tokens, generator=generator) < 0.1).tolist()
    for index in range(1, num_tokens):
        if not is_drawn[index]:
            tokens[index] = followers[tokens[index - 1]]
    shard = write_shard(folder / "tokens.bin", tokens, vocabulary_size)
    run = read_run(
        {
            "name": "losses",
            "seed": seed,
            "mode": mode,
            "model": model,
            "stage_borders": [num_blocks // 2],
            "corpus": {"shards": [shard.model_dump()], "sequence_length": 128},
            "num_updates": num_updates,
            "parts_per_update": num_parts,
            "rows_per_part": 4,
            "optimizer": {"name": optimizer, "learning_rate": _RATES[optimizer]},
            "schedule": {"warmup_updates": min(3, num_updates - 1)},
        }
    )
    return run, TokenShards.open(run.corpus, folder, vocabulary_size)


def train_plainly(
    run: TrainingRun,
    shards: TokenShards,
    weights: dict[str, Tensor],
    num_threads: int = 1,
    has_torchs_muon: bool = False,
    note: Callable[[int], None] = lambda num_updates: None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of an ordinary loop from these weights, and the weights at its end.

    `note` is told how many updates are over.
    """
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**run.model))
    model.load_state_dict(weights, strict=False)
    model.train()
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    is_muon = run.optimizer.name == "muon"
    matrices = {key: one for key, one in named.items() if is_muon and _is_matrix(key, one)}
    others = [one for key, one in named.items() if key not in matrices]
    optimizers = [_make_optimizer(run, others)]
    if has_torchs_muon:
        muon = torch.optim.Muon(matrices.values(), weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
        matrices.clear()
    ours = SpanOptimizer(run.optimizer, matrices)
    losses = list[float]()
    with computing_alike(num_threads):
        for update in range(run.num_updates):
            loss = 0.0
            for index in range(run.parts_per_update):
                tokens, labels = shards.read_part(run, PartId(update, index))
                logits = model(tokens, use_cache=False).logits
                part = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                (part / run.parts_per_update).backward()
                loss += part.item() / run.parts_per_update
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm)
            factor = run.compute_learning_rate_factor(update)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = run.optimizer.learning_rate * factor
                optimizer.step()
            gradients = {key: one.grad for key, one in matrices.items() if one.grad is not None}
            ours.step(gradients, factor)
            model.zero_grad()
            losses.append(loss)
            note(len(losses))
    return losses, {name: weight.detach() for name, weight in named.items()}


def _is_matrix(name: str, weight: Tensor) -> bool:
    return "layers" in name and weight.ndim == 2


def _make_optimizer(run: TrainingRun, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    if run.optimizer.name == "sgd":
        return torch.optim.SGD(weights, weight_decay=0.0)
    return torch.optim.AdamW(weights, betas=run.optimizer.betas, weight_decay=0.0)


def _measure_losses(losses: list[float], plain: list[float]) -> float:
    pairs = zip(losses, plain, strict=True)
    return max(abs(one - other) / other for one, other in pairs)


def _measure_weights(weights: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    difference = sum(float((weights[name] - plain[name]).square().sum()) for name in plain)
    return (difference / sum(float(weight.square().sum()) for weight in plain.values())) ** 0.5


def tell_progress(title: str, num_updates: int, num_done: int) -> None:
    """Print now and then how far a training is, where it does not mix with the table."""
    if num_done and num_done % _TELL_UPDATES == 0:
        print(f"{title}: {num_done} of {num_updates} updates", file=sys.stderr, flush=True)


_Trained = tuple[list[float], dict[str, Any]]
"""Losses, and weights as arrays of numpy: tensors that a process sends end with it."""


def _train(optimizer: str, way: str, num_updates: int, num_parts: int) -> _Trained:
    """Train in one of the ways."""
    note = partial(tell_progress, f"{optimizer}, {way}", num_updates)
    with tempfile.TemporaryDirectory() as folder:
        run, shards = write_run(Path(folder), optimizer, num_updates, num_parts)
        whole = WholeRun(run)
        start = {key: weight.clone() for key, weight in whole.read_weights().items()}
        if way == _EXACT:
            losses = list[float]()
            for update in whole.train(shards):
                losses.append(update.loss)
                note(len(losses))
            weights = whole.read_weights()
        else:
            num_threads = 2 if way == _TWO_THREADS else 1
            losses, weights = train_plainly(
                run, shards, start, num_threads, has_torchs_muon=way == _TORCHS_MUON, note=note
            )
    return losses, {name: weight.numpy() for name, weight in weights.items()}


def _train_all(
    optimizers: Iterable[str], num_updates: int, num_parts: int
) -> dict[str, dict[str, _Trained]]:
    """Train in all ways; return what came of each, by optimizer."""
    ways = [(optimizer, way) for optimizer in optimizers for way in (_PLAIN, _EXACT)]
    ways += [("muon", _TORCHS_MUON)] if "muon" in optimizers else []
    alone = [(optimizer, _TWO_THREADS) for optimizer in optimizers]
    found: dict[str, dict[str, _Trained]] = {optimizer: {} for optimizer in optimizers}
    for some, num_at_once in ((ways, 2), (alone, 1)):
        jobs = {key: partial(_train, *key, num_updates, num_parts) for key in some}
        for (optimizer, way), trained in compute_side_by_side(jobs, num_at_once):
            found[optimizer][way] = trained
    return found


def _print_table(optimizer: str, found: dict[str, _Trained]) -> None:
    plain, plain_weights = found.pop(_PLAIN)
    start = {name: torch.from_numpy(weight) for name, weight in plain_weights.items()}
    first = every = 0.0
    for way, (losses, arrays) in found.items():
        weights = {name: torch.from_numpy(weight) for name, weight in arrays.items()}
        measured = (
            _measure_losses(losses[:_FIRST], plain[:_FIRST]),
            _measure_losses(losses, plain),
            _measure_weights(weights, start),
        )
        print(_LINE.format(optimizer, way, *(f"{one:.1e}" for one in measured)))
        if way == _EXACT:
            first, every, _ = measured
    print(f"{optimizer:10} loss from {plain[0]:.3f} to {plain[-1]:.3f}")
    for name, value, bound in (("first 20", first, 1e-5), ("all", every, 1e-3)):
        figure = TargetFigure(f"{optimizer}: exact, {name} losses", value, "", at_most(bound))
        print(figure.to_line(), flush=True)


def main() -> None:
    """Train with each optimizer in each way, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--optimizers", nargs="+", choices=_RATES, default=list(_RATES))
    options = parser.parse_args()
    print(describe_machine())
    print(f"{options.updates} updates of {options.parts} parts of 4 x 128 tokens\n", flush=True)
    found = _train_all(options.optimizers, options.updates, options.parts)
    print(_LINE.format("optimizer", "beside plain, 1 thread", "20 losses", "all losses", "weights"))
    for optimizer, ways in found.items():
        _print_table(optimizer, ways)


if __name__ == "__main__":
    run_program(main)
