"""Train the bundled demo model, a small Llama that tells short stories, from scratch on one core.

    python examples/train_demo_model.py --out models/shoal-stories --seed 0 --minutes 46

writes an ordinary transformers directory. Training text comes from `story_grammar.py` without
end, so no story is seen twice; progress and learning rates follow the clock, so a run gives the
same kind of model and not the same bits. `--resume` with a new seed goes on from what is in the
directory, with the Muon phases alone.

The bundled weights took 70 minutes on one busy core, in three pieces: an AdamW run, stopped after
28 minutes, the Muon phases from its last checkpoint (18 minutes, with cosines where the table
below has straight lines), and 24 minutes of `--resume --seed 1000001`. They saw about 19 M tokens
in about 8,700 updates. Held-out loss: 0.1996 nats per token (perplexity 1.221); entropy of the same
text: 0.1784 (1.195).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from story_grammar import Storyteller
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CARD_FILE = Path(__file__).with_name("demo_model_card.md")
VOCABULARY_SIZE = 1536
BOS, EOS = "<s>", "</s>"
NUM_TOKENIZER_STORIES = 4000
NUM_WARMUP_UPDATES = 100
SAVE_SECONDS = 240.0
NUM_HELD_OUT_ROWS = 16
HELD_OUT_LETTERS = 20_000


@dataclass(frozen=True)
class Phase:
    """A part of the training time with its own batches, optimizer and learning rates."""

    time_fraction: float
    row_length: int
    num_rows: int
    with_muon: bool
    rate_fractions: tuple[float, float]  # at the start and at the end of the phase


# Short rows teach sentences cheaply, long ones how one story follows another. AdamW alone was slow
# to learn that a name is a copy of an earlier name; Muon (Jordan et al., 2024) took over from it.
PHASES = (
    Phase(0.28, 256, 8, with_muon=False, rate_fractions=(1.0, 0.73)),
    Phase(0.33, 512, 8, with_muon=False, rate_fractions=(0.73, 0.13)),
    Phase(0.16, 512, 4, with_muon=True, rate_fractions=(1.0, 1.0)),
    Phase(0.10, 512, 4, with_muon=True, rate_fractions=(1.0, 0.63)),
    Phase(0.13, 1024, 2, with_muon=True, rate_fractions=(0.63, 0.01)),
)
MUON_FRACTION = sum(phase.time_fraction for phase in PHASES if not phase.with_muon)
ADAMW_RATE = 5e-3
MUON_RATE, MUON_ADAMW_RATE = 3e-3, 1.5e-3  # for the matrices of the blocks, and for all the rest


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of whole stories, and what their generator says they cost in nats."""

    rows: list[list[int]]
    nats: float

    @property
    def num_tokens(self) -> int:
        """The number of predicted tokens: all but the first of each row."""
        return sum(len(row) - 1 for row in self.rows)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on stories that are used for nothing else."""
    teller = Storyteller(f"tokenizer-{seed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (teller.tell().text for _ in range(NUM_TOKENIZER_STORIES)), trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0), (EOS, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """Build the untrained model: 8 layers of width 128, grouped-query attention, tied head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.04,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def training_rows(
    tokenizer: PreTrainedTokenizerFast, seed: int, length: int
) -> Iterator[list[int]]:
    """Yield rows of `length + 1` tokens without end; each is one fresh run of stories.

    Of the short rows, half begin in the middle of a story: else a model would rarely see an end.
    """
    row = 0
    while True:
        name = f"train-{seed}-{length}-{row}"
        skip = random.Random(name).randrange(300) if length <= 256 and row % 2 else 0
        ids, teller = [0], Storyteller(name)
        while len(ids) < skip + length + 1:
            ids += encode_story(tokenizer, teller.tell().text)
        yield ids[skip : skip + length + 1]
        row += 1


def encode_story(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode one story and the token that ends it."""
    return [*tokenizer.encode(text, add_special_tokens=False), 1]


def held_out_rows(tokenizer: PreTrainedTokenizerFast, limit: int = 1024) -> HeldOut:
    """Build rows of at most `limit` tokens from seeds that training never uses."""
    rows: list[list[int]] = []
    nats = 0.0
    for number in range(NUM_HELD_OUT_ROWS):
        teller, row = Storyteller(f"heldout-{number}"), [0]
        while True:
            story = teller.tell()
            ids = encode_story(tokenizer, story.text)
            if len(row) + len(ids) > limit:
                break
            row += ids
            nats += story.nats
        rows.append(row)
    return HeldOut(rows, nats)


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, held_out: HeldOut) -> float:
    """Return the mean negative log-likelihood in nats per token."""
    model.eval()
    total = 0.0
    for row in held_out.rows:
        ids = torch.tensor([row])
        total += float(model(input_ids=ids, labels=ids).loss) * (len(row) - 1)
    model.train()
    return total / held_out.num_tokens


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the directory so that a reader sees each file either as it was or as it will be."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in sorted(Path(scratch).iterdir()):
            file.chmod(0o644)
            os.replace(file, out / file.name)


def write_held_out_text(tokenizer: PreTrainedTokenizerFast, out: Path) -> HeldOut:
    """Write `heldout.txt`, whole stories each followed by the end token, and return its entropy.

    Tokenizing the file as it stands gives the beginning token, the stories and their ends.
    """
    teller = Storyteller("heldout-text")
    text, nats = "", 0.0
    while len(text) < HELD_OUT_LETTERS:
        story = teller.tell()
        text += story.text + EOS
        nats += story.nats
    out.mkdir(parents=True, exist_ok=True)
    (out / "heldout.txt").write_text(text, encoding="utf-8")
    return HeldOut([tokenizer.encode(text)], nats)


def choose_phase(progress: float) -> tuple[Phase, float]:
    """Return the phase at this fraction of the training time, and its rate fraction there."""
    phase = PHASES[0]
    for following in PHASES[1:]:
        if progress < phase.time_fraction:
            break
        progress -= phase.time_fraction
        phase = following
    start, stop = phase.rate_fractions
    return phase, start + (stop - start) * min(1.0, progress / phase.time_fraction)


def build_optimizers(model: LlamaForCausalLM, with_muon: bool) -> list[torch.optim.Optimizer]:
    """Build AdamW for all parameters, or Muon for the matrices of the blocks and AdamW else."""
    if not with_muon:
        return [
            torch.optim.AdamW(
                model.parameters(), lr=ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.05, fused=True
            )
        ]
    named = list(model.named_parameters())
    is_matrix = [name.startswith("model.layers") and value.ndim == 2 for name, value in named]
    matrices = [value for (_, value), is_one in zip(named, is_matrix, strict=True) if is_one]
    others = [value for (_, value), is_one in zip(named, is_matrix, strict=True) if not is_one]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=MUON_ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def in_windows(text: HeldOut, length: int = 1024) -> HeldOut:
    """Cut one long row into windows of `length` tokens, each but the first without context."""
    row = text.rows[0]
    starts = range(0, len(row) - 1, length - 1)
    return HeldOut([row[start : start + length] for start in starts], text.nats)


class Training:
    """One training run against the clock; `run` writes usable directories on the way."""

    def __init__(self, out: Path, seed: int, minutes: float, resume: bool = False) -> None:
        self._out = out
        self._seconds = minutes * 60
        self._first_progress = MUON_FRACTION if resume else 0.0
        if resume:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
            self._model = LlamaForCausalLM.from_pretrained(out).train()
        else:
            self._tokenizer = train_tokenizer(seed)
            self._model = build_model(seed)
        self._streams = {
            length: training_rows(self._tokenizer, seed, length)
            for length in {phase.row_length for phase in PHASES}
        }
        self._with_muon = False
        self._optimizers = self._start_optimizers(self._with_muon)
        self._num_tokens = 0

    def run(self) -> None:
        """Train until the time is over, save, and write the model card."""
        write_held_out_text(self._tokenizer, self._out)
        started = saved = time.monotonic()
        update, smooth = 0, 0.0
        while (elapsed := time.monotonic() - started) < self._seconds:
            progress = self._first_progress
            progress += (1 - self._first_progress) * elapsed / self._seconds
            loss = self._update(progress, update)
            smooth = loss if update == 0 else 0.98 * smooth + 0.02 * loss
            if update % 100 == 0:
                print(f"{elapsed:6.0f} s  update {update:5}  loss {smooth:.4f}", flush=True)
            if time.monotonic() - saved > SAVE_SECONDS:
                save(self._model, self._tokenizer, self._out)
                saved = time.monotonic()
            update += 1
        save(self._model, self._tokenizer, self._out)
        self._report(update, time.monotonic() - started)

    def _start_optimizers(self, with_muon: bool) -> list[tuple[torch.optim.Optimizer, float]]:
        """Return new optimizers with their peak rates."""
        optimizers = build_optimizers(self._model, with_muon)
        return [(optimizer, optimizer.param_groups[0]["lr"]) for optimizer in optimizers]

    def _update(self, progress: float, update: int) -> float:
        phase, rate_fraction = choose_phase(progress)
        rate_fraction *= min(1.0, (update + 1) / NUM_WARMUP_UPDATES)
        if phase.with_muon and not self._with_muon:
            self._with_muon, self._optimizers = True, self._start_optimizers(with_muon=True)
        stream = self._streams[phase.row_length]
        batch = torch.tensor([next(stream) for _ in range(phase.num_rows)])
        with torch.autocast("cpu", torch.bfloat16):
            logits = self._model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer, peak_rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak_rate * rate_fraction
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._num_tokens += batch[:, 1:].numel()
        return float(loss.detach())

    def _report(self, num_updates: int, seconds: float) -> None:
        held_out = held_out_rows(self._tokenizer)
        text = write_held_out_text(self._tokenizer, self._out)
        figures = {
            "num_parameters": sum(p.numel() for p in self._model.parameters()),
            "num_updates": num_updates,
            "num_tokens": self._num_tokens,
            "minutes": round(seconds / 60, 1),
            "loss": round(mean_loss(self._model, held_out), 4),
            "entropy": round(held_out.nats / held_out.num_tokens, 4),
            "num_held_out_tokens": held_out.num_tokens,
            "text_entropy": round(text.nats / text.num_tokens, 4),
            "num_text_tokens": text.num_tokens,
            "text_loss": round(mean_loss(self._model, in_windows(text)), 4),
        }
        print(json.dumps(figures), flush=True)
        (self._out / "README.md").write_text(model_card(figures), encoding="utf-8")


def model_card(figures: dict[str, float]) -> str:
    """Return the README of the model directory with the figures of this run filled in."""
    perplexities = {
        "perplexity": math.exp(figures["loss"]),
        "floor_perplexity": math.exp(figures["entropy"]),
    }
    return CARD_FILE.read_text(encoding="utf-8").format(**figures, **perplexities)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=46.0, help="wall-clock training time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from the model in --out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Training(options.out, options.seed, options.minutes, options.resume).run()


if __name__ == "__main__":
    main()
