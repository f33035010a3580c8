"""Write a run of a small model: `python examples/story_run.py FOLDER [SEED UPDATES PARTS LENGTH]`.

Then `shoal train FOLDER/run.toml --out FOLDER/model` lets the loss fall from 7.4 to about 4 nats.
"""

import sys
from pathlib import Path

from story_grammar import Storyteller
from transformers import AutoTokenizer

from shoal.models.token_shards import write_shard

BUNDLED = Path(__file__).resolve().parents[1] / "models" / "shoal-stories"


def write_run(folder: Path, seed: int = 0, updates: int = 30, parts: int = 8, length: int = 128):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.save_pretrained(folder / "model")
    num_tokens, tokens, nats = updates * parts * 4 * length + 1, list[int](), list[float]()
    while len(tokens) < num_tokens:
        story = Storyteller(f"run {seed}/{len(nats)}").tell()
        tokens += tokenizer.encode(story.text + tokenizer.eos_token, add_special_tokens=False)
        nats.append(story.nats)
    shard = write_shard(folder / "stories.bin", tokens[:num_tokens], len(tokenizer))
    (folder / "run.toml").write_text(f"""name = "stories"
model = "{BUNDLED}/config.json"
seed = {seed}
stage_borders = [4]
num_updates = {updates}
parts_per_update = {parts}
rows_per_part = 4
optimizer = {{ name = "muon", learning_rate = 0.01, adamw_learning_rate = 0.005 }}
schedule.warmup_updates = 3
corpus = {{ sequence_length = {length}, entropy = {sum(nats) / len(tokens)}, shards = [
    {{ path = "{shard.path}", num_tokens = {num_tokens}, sha256 = "{shard.sha256}" }}] }}""")


if __name__ == "__main__":
    write_run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
