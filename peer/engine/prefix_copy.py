"""A prefix on its way from one cache into another, piece by piece.

Tensor suffixes: N heads of all rows, keys and values of all blocks, S tokens, W elements of a head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...protocol.errors import ErrorCode, RefusedError

if TYPE_CHECKING:
    from .kv_cache import SessionCache

PIECE_BYTES = 2**21
"""What is copied at once, and every step that waits waits for: about a millisecond on the machine
of the benchmarks, an eighth of what a token takes there in 8 blocks."""


class PrefixCopy:
    """Copies the first tokens of a parent's cache into a new one, which is empty up to the end.

    The parent may go on in between. One that loses any of these tokens, or moves them between its
    rows, ends the copy: what comes out is the prefix as it was at the beginning, or nothing.
    """

    def __init__(self, parent: SessionCache, cache: SessionCache, num_tokens: int) -> None:
        self.parent = parent
        self._cache = cache
        self._num_tokens = num_tokens
        self._is_intact = True
        self._pieces = deque(self._cut())

    def __repr__(self) -> str:
        return f"<PrefixCopy of {self._num_tokens} tokens of {self.parent!r}>"

    def note_change(self, position: int) -> None:
        """Note that the parent's tokens from `position` on are no longer what they were."""
        if position < self._num_tokens:
            self._is_intact = False

    def advance(self) -> bool:
        """Copy one more piece; return whether it was the last one, and the tokens count.

        Raises RefusedError when there is nothing to copy from any more, or into.
        """
        self.parent.check_is_open("the parent")
        self._cache.check_is_open("the fork")
        if not self._is_intact:
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"the first {self._num_tokens} tokens of the parent changed before they were "
                "copied: it was rolled back, or its rows were moved; fork it before or after that",
            )
        # Both are in use, or they might have to make room.
        self.parent.touch()
        self._cache.touch()
        source_NSW, target_NSW = (
            cache.states_LCBGSD.flatten(0, 3) for cache in (self.parent, self._cache)
        )
        heads, tokens = self._pieces.popleft()
        target_NSW[heads, tokens].copy_(source_NSW[heads, tokens])
        if self._pieces:
            return False
        self._cache.commit(self._num_tokens)
        self._cache.end_copy()
        return True

    def _cut(self) -> Iterator[tuple[slice, slice]]:
        """Yield the heads and tokens of each piece: many short heads, or a part of a long one."""
        *_, head_width = self._cache.states_LCBGSD.shape
        num_heads = self._cache.states_LCBGSD.flatten(0, 3).shape[0]
        token_bytes = head_width * self._cache.states_LCBGSD.itemsize
        tokens_at_once = min(self._num_tokens, max(1, PIECE_BYTES // token_bytes))
        heads_at_once = max(1, PIECE_BYTES // (tokens_at_once * token_bytes))
        for head in range(0, num_heads, heads_at_once):
            for token in range(0, self._num_tokens, tokens_at_once):
                stop = min(token + tokens_at_once, self._num_tokens)
                yield slice(head, head + heads_at_once), slice(token, stop)
