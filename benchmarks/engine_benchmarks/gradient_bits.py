"""Whether the gradient of a part has the same bits in every process, and what changes them.

    make bench BENCHMARKS=engine_benchmarks.gradient_bits ARGS="--repeats 1000"

Exact training compares digests, so it stands on this. Each row is a process of its own, with one
thing changed. The first runs alone, the others two at a time. A row that differs from the first is
of another class of machine: its gradients are as good, and cannot be in the same exact run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from shoal.models.token_shards import TokenShards, write_shard
from shoal.peer.engine.training.span_state import digest_tensors
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.runs.training_run import read_run

_VOCABULARY = 1536
_BLOCKS = 4
_CASES = (
    ("as it is", {}, {}),
    ("again, beside another process", {}, {}),
    ("again, beside the one above", {}, {}),
    ("two threads", {"threads": 2}, {}),
    ("weights at odd addresses (+4 bytes)", {"shift": 1}, {}),
    ("weights at odd addresses (+20 bytes)", {"shift": 5}, {}),
    ("two stages", {"borders": [2]}, {}),
    ("four stages", {"borders": [1, 2, 3]}, {}),
    ("MKL's AVX2 code path", {}, {"MKL_CBWR": "AVX2"}),
    ("MKL's oldest code path", {}, {"MKL_CBWR": "COMPATIBLE"}),
    ("torch for AVX2", {}, {"ATEN_CPU_CAPABILITY": "avx2"}),
    ("torch for any processor", {}, {"ATEN_CPU_CAPABILITY": "default"}),
)


def _compute(hidden_size: int, repeats: int, threads: int, shift: int, borders: list[int]) -> str:
    """Return the digests of the gradients of a part, each once."""
    with tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, _VOCABULARY, (4_000,), generator=generator).tolist()
        shard = write_shard(Path(folder) / "tokens.bin", tokens, _VOCABULARY)
        run = read_run(
            {
                "name": "bits",
                "seed": 0,
                "model": _describe_model(hidden_size),
                "stage_borders": borders,
                "corpus": {"shards": [shard.model_dump()], "sequence_length": 128},
                "num_updates": 1,
                "parts_per_update": 1,
                "rows_per_part": 4,
                "optimizer": {"learning_rate": 0.001},
            }
        )
        shards = TokenShards.open(run.corpus, Path(folder), _VOCABULARY)
        whole = WholeRun(run, threads)
        _move_weights(whole, shift)
        digests = set[str]()
        for _ in range(repeats):
            whole.compute_gradients(0, shards)
            gradients = {k: v for stage in whole.stages for k, v in stage.read_gradients().items()}
            digests.add(digest_tensors(gradients)[:12])
            for stage in whole.stages:
                stage.load_state(stage.read_state())  # the update begins again
    return " ".join(sorted(digests))


def _describe_model(hidden_size: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": _BLOCKS,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 64,
        "tie_word_embeddings": False,
    }


def _move_weights(whole: WholeRun, shift: int) -> None:
    """Have all weights begin so many numbers behind an aligned address."""
    for stage in whole.stages:
        for weight in stage.modules.parameters.values():
            moved = torch.empty(weight.numel() + shift)[shift:].view(weight.shape)
            weight.data = moved.copy_(weight.data)
            assert (weight.data_ptr() % 64 != 0) == (shift != 0)


def main() -> None:
    """Run each case in its own process, two at a time, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        settings = {"threads": 1, "shift": 0, "borders": [], **options.case}
        print(_compute(options.hidden_size, options.repeats, **settings))
        return
    command = [sys.executable, "-P", __file__, "--hidden-size", str(options.hidden_size)]
    command += ["--repeats", str(options.repeats)]
    expected = ""
    for cases in (_CASES[:1], *(_CASES[pair : pair + 2] for pair in range(1, len(_CASES), 2))):
        processes = [
            subprocess.Popen(
                [*command, "--case", json.dumps(settings)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
            for _, settings, environment in cases
        ]
        outputs = [process.communicate()[0].strip() for process in processes]
        for (title, _, _), process, digests in zip(cases, processes, outputs, strict=True):
            if process.returncode != 0:
                raise SystemExit(f"{title}: exit code {process.returncode}")
            expected = expected or digests
            verdict = "equal" if digests == expected else "differs"
            print(f"{title:38} {digests:14} {verdict}", flush=True)


if __name__ == "__main__":
    main()
