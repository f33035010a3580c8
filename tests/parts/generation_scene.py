"""Prompts for generate(), and what watches it."""

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

SEED = 1234


def make_ids(num_rows: int, num_tokens: int, seed: int = SEED) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (num_rows, num_tokens), generator=generator)


class Recorder(BaseStreamer):
    """Keeps what it is given; interrupts after so many calls if told to."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.values: list[Tensor] = []
        self.is_ended = False
        self._interrupt_after = interrupt_after

    def put(self, value: Tensor) -> None:
        self.values.append(value)
        if len(self.values) == self._interrupt_after:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.is_ended = True
