"""The cache of a batch that is padded on the left: one session for the rows of each length."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...protocol.limits import MAX_BATCH_ROWS
from ..session.inference_session import InferenceSession
from .remote_cache import RemoteCache

# Shape suffixes: B rows, T tokens, H hidden size.


class _Part(NamedTuple):
    """The rows of a batch whose texts begin in one column, and the cache of their session."""

    start: int
    rows: list[int]
    cache: RemoteCache


class PaddedCache(RemoteCache):
    """Represents the KV caches of a batch that is padded on the left, within a `with` block.

    Peers know no padding, and a session has one position for all of its rows. So rows whose texts
    begin in the same column share a session, in which they are computed as if they were alone; all
    sessions step at the same time. They are opened by the first step, when the rows are known:
    generate() repeats them for beams.
    """

    def __init__(self, open_session: Callable[[int], InferenceSession]) -> None:
        """`open_session` opens one for texts that begin in the given column."""
        super().__init__()
        self._open_session = open_session
        self._parts: list[_Part] = []
        self._threads = ThreadPoolExecutor(MAX_BATCH_ROWS)
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()
        self._threads.shutdown()

    @property
    def is_bound(self) -> bool:
        """True: it opens its own sessions."""
        return True

    def run(
        self,
        hidden_BTH: Tensor,
        mask_BT: Tensor | None,
        run: Callable[[Tensor, RemoteCache], Tensor],
    ) -> Tensor:
        """Run the next tokens of each part. Outputs of padding are zero."""
        assert mask_BT is not None  # of the whole text so far
        is_first = not self._parts
        if is_first:
            self._begin(mask_BT)
        steps = [
            self._threads.submit(
                copy_context().run,  # where the active adapter is
                partial(_run_without_gradient, run),
                hidden_BTH[part.rows, part.start if is_first else 0 :],
                part.cache,
            )
            for part in self._parts
        ]
        wait(steps)  # also where one of them fails: the sessions are closed then
        outputs = [step.result() for step in steps]
        num_tokens = max(output.shape[1] for output in outputs)
        output_BTH = outputs[0].new_zeros(len(hidden_BTH), num_tokens, hidden_BTH.shape[2])
        for part, output in zip(self._parts, outputs, strict=True):
            output_BTH[part.rows, num_tokens - output.shape[1] :] = output
        return output_BTH

    def _begin(self, mask_BT: Tensor) -> None:
        starts = [int(start) for start in (mask_BT == 0).sum(1)]
        for start in sorted(set(starts)):
            rows = [row for row, its_start in enumerate(starts) if its_start == start]
            session = self._opened.enter_context(self._open_session(start))
            self._parts.append(_Part(start, rows, RemoteCache(session)))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of each row in the peers' caches, with its padding."""
        return max((part.start + part.cache.get_seq_length() for part in self._parts), default=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See RemoteCache.reorder_cache(). The beams of a row have its length."""
        for part in self._parts:
            rows = [part.rows.index(int(beam_idx[row])) for row in part.rows]
            part.cache.reorder_cache(torch.tensor(rows))

    def _rollback(self, num_tokens: int) -> None:
        for part in self._parts:
            part.cache._rollback(max(0, num_tokens - part.start))


@torch.no_grad()
def _run_without_gradient(
    run: Callable[[Tensor, RemoteCache], Tensor], hidden_BTH: Tensor, cache: RemoteCache
) -> Tensor:
    """Run one part: threads do not inherit that gradients are off."""
    return run(hidden_BTH, cache)
