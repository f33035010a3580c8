"""Write generated stories as a file of token ids, for `story_run.py`."""

from pathlib import Path

from story_grammar import Storyteller

from shoal.models.token_shards import write_shard


def write_stories(file: Path, tokenizer, key: str, num_tokens: int) -> tuple[str, float]:
    """Write so many tokens; return the entry of a run file, and the nats per token."""
    tokens, nats = list[int](), list[float]()
    while len(tokens) < num_tokens:
        story = Storyteller(f"{key}/{len(nats)}").tell()
        tokens += tokenizer.encode(story.text + tokenizer.eos_token, add_special_tokens=False)
        nats.append(story.nats)
    digest = write_shard(file, tokens[:num_tokens], len(tokenizer)).sha256
    entry = f'{{ path = "{file.name}", num_tokens = {num_tokens}, sha256 = "{digest}" }}'
    return entry, sum(nats) / len(tokens)
