"""Write a run that trains a small model to tell stories: `python examples/story_run.py stories`.

Then `shoal train stories/run.toml --out stories/model` lets the loss fall from 7.4 to about 4 nats
per token; the stories have an entropy of 0.18.
"""

import sys
from itertools import chain, count, islice
from pathlib import Path

from story_grammar import Storyteller
from transformers import AutoTokenizer

from shoal.models.token_shards import write_shard

BUNDLED = Path(__file__).resolve().parents[1] / "models" / "shoal-stories"
RUN = """name = "stories"
model = "{bundled}/config.json"
stage_borders = [4]
num_updates = 30
rows_per_part = 4
corpus.shards = [{{ path = "stories.bin", num_tokens = {num_tokens}, sha256 = "{sha256}" }}]
optimizer = {{ name = "muon", learning_rate = 0.01, adamw_learning_rate = 0.005 }}
schedule.warmup_updates = 3
"""


def write_run(folder: Path, seed: int = 0, parts: int = 8, length: int = 128) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.save_pretrained(folder / "model")
    stories = (Storyteller(f"run {seed}/{n}").tell().text + tokenizer.eos_token for n in count())
    encoded = (tokenizer.encode(story, add_special_tokens=False) for story in stories)
    tokens = islice(chain.from_iterable(encoded), 30 * parts * 4 * length + 1)
    shard = write_shard(folder / "stories.bin", tokens, len(tokenizer)).model_dump()
    sizes = f"seed = {seed}\nparts_per_update = {parts}\ncorpus.sequence_length = {length}\n"
    (folder / "run.toml").write_text(sizes + RUN.format(bundled=BUNDLED, **shard))


if __name__ == "__main__":
    write_run(Path(sys.argv[1]))
