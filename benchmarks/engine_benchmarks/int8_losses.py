"""Held-out losses of a run in int8 mode beside those of plain PyTorch (B3), for several seeds.

    make bench BENCHMARKS=engine_benchmarks.int8_losses

Two stages with two peers each train in this process, over a network in memory. The plain loop has
the same initial weights, parts and optimizer. Printed are the held-out losses of both in nats per
token, and their relative difference; the losses of other seeds show how far runs differ anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from engine_benchmarks.training_losses import train_plainly, write_run
from shoal.cli.benchmarking.figure import describe_machine
from shoal.models.token_shards import TokenShards
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.peer.runs.run_peer import RunPeer
from shoal.peer.runs.run_resources import RunPeerConfig, make_compute
from shoal.protocol.identity import Identity
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.memory.loopback import LoopbackNetwork
from shoal.protocol.net.memory.memory_directory import MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.runs.run_record import sign_run
from shoal.protocol.runs.training_run import PartId, TrainingRun

_NUM_PEERS = 4
_HELD_OUT_PARTS = 16
_LINE = "{:>6} {:>12} {:>12} {:>12}"


async def _train_int8(run: TrainingRun, folder: Path) -> dict[str, Tensor]:
    """Return the weights at the end of a run over peers of stage 0 and 1."""
    network, store, clock = LoopbackNetwork(), MemoryDirectoryStore(), SystemClock()
    weights = asyncio.get_running_loop().create_future()
    over = asyncio.Event()
    record = sign_run(Identity.generate(), run)

    async def serve(number: int) -> None:
        config = RunPeerConfig(record, folder, (number % 2,), number == 0, pause_seconds=0.02)
        host = MemoryNetwork(network, store, clock, f"peer{number}")
        async with RunPeer.join(config, host, clock, compute=compute) as peer:

            async def until() -> None:
                await peer.loop.wait_until_over()
                if number == 0:
                    weights.set_result((await peer.loop.fetch_weights())[0])
                    over.set()
                await over.wait()

            await peer.serve(until())

    with ExitStack() as stack:
        compute = make_compute(stack)  # one for all: torch's settings belong to the process
        async with asyncio.TaskGroup() as tasks:
            for number in range(_NUM_PEERS):
                tasks.create_task(serve(number))
    return weights.result()


def _measure_held_out(run: TrainingRun, shards: TokenShards, weights: dict[str, Tensor]) -> float:
    """Return the loss on parts behind those of the last update."""
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**run.model))
    model.load_state_dict(weights, strict=False)
    model.eval()
    losses = list[float]()
    with torch.inference_mode():
        for index in range(_HELD_OUT_PARTS):
            update, rest = divmod(index, run.parts_per_update)
            tokens, labels = shards.read_part(run, PartId(run.num_updates + update, rest))
            logits = model(tokens, use_cache=False).logits
            losses.append(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    return statistics.mean(losses)


def main() -> None:
    """Train in both ways with each seed, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    options = parser.parse_args()
    print(describe_machine())
    print(
        f"{options.updates} updates of {options.parts} parts of 4 x 128 tokens, "
        f"{options.blocks} blocks, {options.optimizer}\n"
    )
    print(_LINE.format("seed", "plain", "int8", "difference"), flush=True)
    plain_losses = list[float]()
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run, shards = write_run(
                folder, options.optimizer, options.updates, options.parts,
                num_held_out=_HELD_OUT_PARTS, seed=seed, mode="int8", num_blocks=options.blocks,
            )  # fmt: skip
            start = {key: weight.clone() for key, weight in WholeRun(run).read_weights().items()}
            _, plain_weights = train_plainly(run, shards, start, num_threads=1)
            plain = _measure_held_out(run, shards, plain_weights)
            int8 = _measure_held_out(run, shards, asyncio.run(_train_int8(run, folder)))
        plain_losses.append(plain)
        difference = f"{100 * (int8 - plain) / plain:+.2f} %"
        print(_LINE.format(seed, f"{plain:.4f}", f"{int8:.4f}", difference), flush=True)
    spread = (max(plain_losses) - min(plain_losses)) / statistics.mean(plain_losses)
    print(f"\nplain losses of the seeds differ by {100 * spread:.2f} %")


if __name__ == "__main__":
    main()
