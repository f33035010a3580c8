"""Runs of tiny models over random tokens, for tests of training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shoal.models.token_shards import TokenShards, write_shard
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.runs.training_run import TrainingRun, read_run

VOCABULARY = 96
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
NO_SHARD = {"path": "none", "num_tokens": 10_001, "sha256": "0" * 64}


def describe_run(**changes: Any) -> dict[str, Any]:
    """Return the content of a run file, with some settings replaced."""
    content = {
        "name": "test",
        "seed": 7,
        "model": MODEL,
        "stage_borders": [2],
        "corpus": {"shards": [NO_SHARD], "sequence_length": 16},
        "num_updates": 4,
        "parts_per_update": 4,
        "rows_per_part": 2,
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.05},
        "schedule": {"warmup_updates": min(1, changes.get("num_updates", 4) - 1)},
    }
    return content | changes


def open_run(
    folder: Path, *, num_held_out: int = 0, **changes: Any
) -> tuple[TrainingRun, TokenShards]:
    """Write a corpus of random tokens; return a run over it, and the corpus.

    It has so many tokens more that are held out.
    """
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (2_000,), generator=generator).tolist()
    shards = [
        write_shard(folder / f"{number}.bin", piece, VOCABULARY).model_dump()
        for number, piece in enumerate((tokens[:700], tokens[700:]))
    ]
    corpus: dict[str, Any] = {"shards": shards, "sequence_length": 16}
    if num_held_out:
        tokens = torch.randint(0, VOCABULARY, (num_held_out,), generator=generator).tolist()
        held_out = write_shard(folder / "held-out.bin", tokens, VOCABULARY)
        corpus["held_out"] = [held_out.model_dump()]
    run = read_run(describe_run(corpus=corpus, **changes))
    return run, TokenShards.open(run.corpus, folder, VOCABULARY)


def load_plain(run: TrainingRun, weights: dict[str, Tensor]) -> Any:
    """Return transformers' model of a run with these weights."""
    config = CONFIG_MAPPING[run.model["model_type"]].from_dict(dict(run.model))
    model = AutoModelForCausalLM.from_config(config)  # with sdpa, where it has that
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.train()


def train_alone(run: TrainingRun, shards: TokenShards) -> str:
    """Return the digest of the weights that one process comes to."""
    whole = WholeRun(run)
    for _ in whole.train(shards):
        pass
    return whole.compute_weights_digest()


def write_tokenizer(folder: Path) -> list[dict[str, str]]:
    """Write a tokenizer of one token per word, w0 to w95; return what a run file says of it."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return [
        {"path": name, "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
        for name in ("tokenizer.json", "tokenizer_config.json")
    ]


def write_run(
    folder: Path, model: str = "config.json", num_updates: int = 2, num_held_out: int = 0
) -> Path:
    """Write a run file of two stages, its corpus, and the config.json that it names."""
    run, _ = open_run(folder, num_held_out=num_held_out)
    shards = "".join(
        f'[[corpus.{name}]]\npath = "{shard.path}"\nnum_tokens = {shard.num_tokens}\n'
        f'sha256 = "{shard.sha256}"\n'
        for name in ("shards", "held_out")
        for shard in getattr(run.corpus, name)
    )
    files = "".join(
        f'[[corpus.tokenizer]]\npath = "{file["path"]}"\nsha256 = "{file["sha256"]}"\n'
        for file in write_tokenizer(folder)
    )
    (folder / "config.json").write_text(json.dumps(MODEL))
    file = folder / "run.toml"
    file.write_text(
        f'name = "test"\nseed = 7\nmodel = "{model}"\nstage_borders = [2]\n'
        f"num_updates = {num_updates}\nparts_per_update = 2\nrows_per_part = 2\n"
        f"[optimizer]\nlearning_rate = 0.01\n[corpus]\nsequence_length = 16\n{shards}{files}"
    )
    return file
