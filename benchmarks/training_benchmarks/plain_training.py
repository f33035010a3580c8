"""The references for training over peers: plain PyTorch in one process, and DDP in two."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from measuring.side_by_side import start_processes
from shoal.models.token_shards import TokenShards
from shoal.protocol.runs.training_run import PartId, TrainingRun

NUM_RANKS = 2


def train_plainly(run: TrainingRun, folder: Path, num_threads: int) -> Iterator[float]:
    """Train as anybody would, and yield the time after each update."""
    torch.set_num_threads(num_threads)
    return _train(run, folder, _make_model(run))


def train_distributed(run: TrainingRun, folder: Path) -> list[float]:
    """Train by DDP over gloo, on two ranks of one thread that share the parts of each update.

    Returns the time after each update, on the clock of `time.perf_counter`.
    """
    with start_processes(NUM_RANKS) as pool:
        times, *_ = pool.map(partial(_train_rank, run, folder), range(NUM_RANKS))
    return times


def _make_model(run: TrainingRun) -> Any:
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**run.model))
    return model.train()


def _train_rank(run: TrainingRun, folder: Path, rank: int) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder.absolute()}/ranks"
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=NUM_RANKS)
    try:
        return list(_train(run, folder, DistributedDataParallel(_make_model(run)), rank, NUM_RANKS))
    finally:
        distributed.destroy_process_group()


def _train(
    run: TrainingRun, folder: Path, model: Any, rank: int = 0, num_ranks: int = 1
) -> Iterator[float]:
    """Train on every `num_ranks`th part, and yield the time after each update."""
    shards = TokenShards.open(run.corpus, folder, run.model["vocab_size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.optimizer.learning_rate)
    indices = range(rank, run.parts_per_update, num_ranks)
    for update in range(run.num_updates):
        for index in indices:
            tokens, labels = shards.read_part(run, PartId(update, index))
            with _choose_sync(model, is_last=index == indices[-1]):
                logits = model(tokens, use_cache=False).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                (loss / len(indices)).backward()  # DDP takes the mean over the ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter()


def _choose_sync(model: Any, *, is_last: bool) -> AbstractContextManager[None]:
    """Have DDP average gradients in the last backward pass of an update only."""
    is_distributed = isinstance(model, DistributedDataParallel)
    return model.no_sync() if is_distributed and not is_last else nullcontext()
