"""How much is measured: for figures that one may quote, or only to see that everything runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Sizes of what is measured. Lengths are in tokens."""

    num_calls: int
    """Of how many calls the median is taken where one call takes long."""

    num_steps: int
    """The same for steps of one token."""

    load_seconds: float
    """How long many sessions step at once."""

    num_generated: int
    """Tokens of one text."""

    session_counts: tuple[int, ...]
    """How many sessions there are at once, in turn."""

    prompts: tuple[int, ...]
    """Lengths of prompts."""

    long_prompt: int
    """The prompt that somebody else's first token has to pass."""

    contexts: tuple[int, int]
    """A short and a long text to decode behind."""

    maximum: int
    """What sessions are opened for when their memory is measured."""

    lengths: tuple[int, int]
    """How far such sessions are used."""

    num_flooding: int
    """Sessions of the client that floods the peers."""

    texts: tuple[int, int]
    """Rows of a batch to train on, and their length."""

    has_targets: bool
    """Whether figures are held against targets, which are those of the benchmark model."""


FULL = Effort(
    num_calls=3,
    num_steps=100,
    load_seconds=5.0,
    num_generated=64,
    session_counts=(1, 2, 4, 8, 16, 32),
    prompts=(128, 512, 1024),
    long_prompt=4096,
    contexts=(100, 4000),
    maximum=8000,
    lengths=(100, 1000),
    num_flooding=32,
    texts=(8, 256),
    has_targets=True,
)

QUICK = Effort(
    num_calls=1,
    num_steps=10,
    load_seconds=0.2,
    num_generated=8,
    session_counts=(1, 8, 16),
    prompts=(32, 512),
    long_prompt=512,
    contexts=(20, 400),
    maximum=1000,
    lengths=(100, 500),
    num_flooding=4,
    texts=(4, 32),
    has_targets=False,
)
