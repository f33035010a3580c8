"""A client that trains as fast as it can: `finetune.py` measures another one beside it.

Run as `python -m shoal.cli.benchmarks.training_client` by `start_training_client`. Says when it has
joined, trains from one line on stdin to the next, then says how fast.
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch

from ...client import AutoDistributedModelForCausalLM
from .benchmark_model import BenchmarkModel
from .clients import SwarmAddress
from .helper_process import HelperProcess


def start_training_client(address: SwarmAddress, num_rows: int, num_tokens: int) -> HelperProcess:
    """Start the process; it joins the swarm and waits."""
    return HelperProcess(
        "training_client",
        str(address.model.directory),
        " ".join(address.initial_peers),
        str(num_rows),
        str(num_tokens),
    )


def _main(directory: str, initial_peers: str, num_rows: str, num_tokens: str) -> None:
    torch.set_num_threads(1)
    model, peers = BenchmarkModel.open(Path(directory)), initial_peers.split()
    with AutoDistributedModelForCausalLM.from_pretrained(directory, initial_peers=peers) as remote:
        print(json.dumps("joined"), flush=True)
        sys.stdin.readline()
        is_over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), is_over.set()), daemon=True).start()
        started_at, num_batches = time.perf_counter(), 0
        while not is_over.is_set():
            inputs_BTH = model.make_hidden(int(num_tokens), int(num_rows)).requires_grad_()
            remote.transformer.h(inputs_BTH).sum().backward()
            num_batches += 1
        seconds = time.perf_counter() - started_at
    print(json.dumps(num_batches * int(num_rows) * int(num_tokens) / seconds), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
