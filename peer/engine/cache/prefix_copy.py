"""A prefix on its way from one cache into another, piece by piece."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ....protocol.errors import ErrorCode, RefusedError

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
        self._pieces = deque(cache.memory.cut_prefix(num_tokens, PIECE_BYTES))

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
        self._cache.memory.copy_piece(self.parent.memory, self._pieces.popleft())
        if self._pieces:
            return False
        self._cache.commit(self._num_tokens)
        self._cache.end_copy()
        return True
