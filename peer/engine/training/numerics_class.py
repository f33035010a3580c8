"""Which machines compute the updates of a run with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.shells.shell_opening import open_shell
from ....protocol.runs.training_run import PartId, TrainingRun
from ....protocol.spans import Span
from .trainable_span import TrainableSpan

_PART = PartId(0, 0)


def compute_class_digest(run: TrainingRun, num_threads: int) -> str:
    """Return a digest that peers have in common if they compute a run alike, bit for bit.

    It is that of a block in the middle of the model after one update of one part, all in the shapes
    and with the optimizer of the run, so that large models take seconds and no memory for their
    ends. The inputs are random numbers.
    """
    num_blocks = len(open_shell(run.model).layers)
    middle = num_blocks // 2
    span = TrainableSpan(run, Span(middle, middle + 1), num_threads=num_threads)
    pass_random_part(run, span, _PART)
    gradients = span.read_gradients()
    span.apply_update(gradients, span.measure_squared_norm(gradients))
    return span.compute_digest()


def pass_random_part(run: TrainingRun, span: TrainableSpan, part: PartId) -> None:
    """Count a part in the shapes of a run, of random numbers that follow from its seed."""
    generator = torch.Generator().manual_seed(run.derive_seed("class"))
    shape = (run.rows_per_part, run.corpus.sequence_length)
    modules = span.modules

    def draw_tokens() -> Tensor:
        return torch.randint(0, modules.vocabulary_size, shape, generator=generator)

    def draw_hidden() -> Tensor:
        return torch.randn(*shape, modules.hidden_size, generator=generator)

    inputs = draw_tokens() if modules.is_first else draw_hidden()
    if modules.is_last:
        span.run_loss(part, inputs, draw_tokens())
    else:
        span.run_forward(part, inputs)
        span.run_backward(part, draw_hidden() / run.tokens_per_update)
