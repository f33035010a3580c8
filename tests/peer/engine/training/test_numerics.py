"""Equal bits: what threads change, what they do not, and a digest that tells."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from training_runs import MODEL, describe_run, open_run

from shoal.peer.engine.training.numerics import computing_alike, set_num_threads
from shoal.peer.engine.training.numerics_class import compute_class_digest
from shoal.peer.engine.training.span_state import digest_tensors
from shoal.peer.engine.training.trainable_span import TrainableSpan
from shoal.protocol.runs.training_run import PartId, read_run
from shoal.protocol.spans import Span

LAYER_NORMS = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = MODEL | {"model_type": "gpt_oss", "hidden_size": 256, "head_dim": 32}
EXPERTS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}


def compute_digests(run_of: tuple[Any, Any], num_threads: int, repeats: int) -> set[str]:
    """Return the digests of the gradients of a part, each once."""
    run, shards = run_of
    part, found = PartId(0, 0), set[str]()
    span = TrainableSpan(run, Span(0, 1), num_threads=num_threads)
    tokens, labels = shards.read_part(run, part)
    for _ in range(repeats):
        span.run_loss(part, tokens, labels)
        found.add(digest_tensors(span.read_gradients()))
        span.discount(part, tokens, labels)
    return found


def test_experts_have_one_gradient_with_several_threads(tmp_path: Path) -> None:
    run_of = open_run(tmp_path, model=EXPERTS, stage_borders=[], rows_per_part=16)

    assert len(compute_digests(run_of, num_threads=4, repeats=6)) == 1


def test_span_has_its_own_threads_and_leaves_those_of_others(tmp_path: Path) -> None:
    run_of = open_run(tmp_path, model=LAYER_NORMS | {"n_layer": 1}, stage_borders=[])
    before = torch.get_num_threads()
    with_three = compute_digests(run_of, num_threads=3, repeats=1)

    try:
        torch.set_num_threads(2)
        again = compute_digests(run_of, num_threads=3, repeats=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

    assert not torch.are_deterministic_algorithms_enabled()
    assert again == with_three
    assert compute_digests(run_of, num_threads=1, repeats=1) != with_three


def test_class_digest_differs_where_updates_do() -> None:
    run = read_run(describe_run(model=LAYER_NORMS, rows_per_part=8))
    muon = describe_run(optimizer={"learning_rate": 0.01}, model=LAYER_NORMS, rows_per_part=8)
    digest = compute_class_digest(run, num_threads=1)

    assert compute_class_digest(run, num_threads=1) == digest
    assert compute_class_digest(run, num_threads=2) != digest  # LayerNorm
    assert compute_class_digest(read_run(muon), num_threads=1) != digest


def test_class_digest_is_that_of_any_model_however_small() -> None:
    digests = {
        compute_class_digest(
            read_run(describe_run(model=MODEL | {"num_hidden_layers": num_blocks})), num_threads=1
        )
        for num_blocks in (1, 2, 4)
    }

    assert len(digests) == 3


def test_no_other_thread_changes_the_settings_of_one_that_trains() -> None:
    begun, is_set = threading.Event(), threading.Event()
    before = torch.get_num_threads()

    def serve() -> None:
        begun.set()
        set_num_threads(3)
        is_set.set()

    thread = threading.Thread(target=serve)
    with computing_alike(2):
        thread.start()
        begun.wait()
        was_set = is_set.wait(0.05)
    thread.join()
    set_num_threads(before)

    assert not was_set
    assert is_set.is_set()
