"""Steps that wait for the compute thread, and what becomes of them."""

import asyncio
import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...protocol.errors import ErrorCode, RefusedError, ShoalError
from ...protocol.session.table import find_rest
from .scheduler import WaitingStep
from .steps import StepWork

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The hidden states a step led to, and how long it waited and computed."""

    hidden_BTH: Tensor
    queue_seconds: float
    compute_seconds: float


@dataclass(slots=True)
class Job:
    """A step and how far it has come: prompts are computed in parts."""

    work: StepWork
    holder: tuple[str, str]
    future: asyncio.Future[ComputedStep]
    submitted_at: float
    compute_seconds: float = 0.0
    num_done: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.work.num_tokens == 1

    def describe(self) -> WaitingStep:
        """Return what the policy may know."""
        num_tokens = self.work.num_tokens - self.num_done
        return WaitingStep(
            id(self.work.cache), self.holder, self.work.num_rows, num_tokens, self.is_decoding
        )

    def take(self, num_tokens: int) -> StepWork:
        """Return the next part."""
        return self.work.cut(self.num_done, num_tokens)

    def advance(self, num_tokens: int, output_BTH: Tensor, seconds: float) -> bool:
        """Note a part's result, and what computing took; return whether it was the last one."""
        self.num_done += num_tokens
        self.compute_seconds += seconds
        if self.work.last_token_only:
            self.outputs.clear()
        self.outputs.append(output_BTH)
        return self.num_done == self.work.num_tokens

    def fail(self) -> None:
        """Take the cache back to what is left after a step that failed."""
        self.work.cache.fall_back(find_rest(self.work.position, self.work.row_map))

    def finish(self, now: float) -> ComputedStep | ShoalError:
        """Return the result of the whole step, or an error if there is no memory to join it in."""
        parts = self.outputs
        try:
            hidden_BTH = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        except Exception:
            _logger.exception("the parts of a step could not be joined")
            self.fail()
            return RefusedError(ErrorCode.INTERNAL, "the peer failed to put the step together")
        queue_seconds = now - self.submitted_at - self.compute_seconds
        return ComputedStep(hidden_BTH, queue_seconds, self.compute_seconds)


@dataclass(slots=True)
class Iteration:
    """Steps, and parts of steps, that are computed together: what is urgent first."""

    parts: list[tuple[Job, StepWork]]
    num_urgent: int
    interrupted_seconds: float = 0.0

    @property
    def is_filling(self) -> bool:
        """Whether it gives way to what is urgent."""
        return len(self.parts) > self.num_urgent
