"""Keys and values of one session, in memory that is committed as the session grows.

The budget of `kv_pool` counts what is really committed, in pages of `PAGE_TOKENS` tokens, and no
session pays for its maximum length. What these pages are says `kv_memory`.

Tensor suffixes: B rows of the session, G key-value heads, S tokens, T tokens of a step, D head size
(or, in memory, whatever `kv_layouts` keeps of that many numbers).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ....protocol.errors import CacheFullError, ErrorCode, LocalProtocolError, RefusedError
from ....protocol.fair_share import Holder
from ....protocol.spans import Span
from .common_prefixes import CommonPrefixes
from .kv_layouts import Heads
from .kv_memory import PAGE_TOKENS, SessionMemory, count_pages
from .prefix_copy import PrefixCopy

if TYPE_CHECKING:
    from .kv_pool import KVCachePool


class SessionCache:
    """One session's lease: keys and values of its rows in every block of its span.

    The first `length` tokens are valid. A step is `prepare`, then writing and reading, block by
    block or in `memory` itself, then `commit`; without the commit the length stays where `prepare`
    put it.
    At the first positions `prompts_LBPH` are added to the inputs of its blocks.
    `used_at` is when a step last came in; whoever takes one in may set it, on any thread.
    """

    def __init__(
        self,
        pool: "KVCachePool",
        span: Span,
        max_tokens: int,
        memory: SessionMemory,
        holder: Holder | None,
    ) -> None:
        self.span = span
        self.holder = holder
        self.max_tokens = max_tokens
        self.num_rows = memory.num_rows
        self.length = 0
        self.is_open = True
        self.prompts_LBPH: torch.Tensor | None = None
        self._pool = pool
        self.used_at = pool.now()
        self._memory: SessionMemory | None = memory
        self._layout = memory.layout
        self._page_bytes = PAGE_TOKENS * self.num_rows * len(span) * self._layout.token_bytes
        self._capacity = memory.capacity
        self._num_pages = 0
        # Tokens that must stay addressable: the length, and the step being computed.
        self._num_reserved_tokens = 0
        self._common_prefixes: CommonPrefixes | None = None  # before rows are moved first
        self._copy: PrefixCopy | None = None  # while the beginning is being copied
        self._copies_of_us: set[PrefixCopy] = set()

    def __repr__(self) -> str:
        state = f"{self.length}/{self.max_tokens} tokens" if self.is_open else "closed"
        return f"<SessionCache {self.span} x {self.num_rows} rows, {state}>"

    @property
    def keeps_integers(self) -> bool:
        """Whether keys and values are rounded to integers."""
        return self._layout.dtype is torch.int8

    @property
    def committed_bytes(self) -> int:
        """Bytes that this lease has taken from the budget."""
        return self._num_pages * self._page_bytes

    @property
    def spare_bytes(self) -> int:
        """Committed bytes above what is in use: rolled back, kept for growing again."""
        num_spare_pages = self._num_pages - count_pages(self._num_reserved_tokens)
        return max(0, num_spare_pages) * self._page_bytes

    def prepare(
        self,
        position: int,
        num_tokens: int,
        row_map: Sequence[int] | None = None,
        num_behind: int = 0,
    ) -> None:
        """Make ready for `num_tokens` tokens at `position`: roll back, reorder rows, reserve pages.

        New row i continues old row `row_map[i]`. Pages are reserved for `num_behind` tokens more,
        which will follow. Everything is checked first: an error, such as CacheFullError, leaves
        the cache as it was.
        """
        self._check_step(position, num_tokens + num_behind, row_map)
        self.touch()
        self._reserve(position + num_tokens + num_behind)
        self._truncate(position)
        if row_map is not None and list(row_map) != list(range(self.num_rows)):
            self._reorder(row_map)

    def begin_with(self, parent: "SessionCache", num_tokens: int) -> PrefixCopy:
        """Begin to copy the first tokens of another cache; `advance` the copy until it is done.

        Takes the pages for all of them. Raises RefusedError, before anything is changed, when
        there is no such prefix, or no room.
        """
        parent.check_is_open("the parent")
        if (parent.span, parent.num_rows) != (self.span, self.num_rows):
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"the parent has {parent.num_rows} rows of blocks {parent.span}, "
                f"not {self.num_rows} of {self.span}",
            )
        if type(parent._layout) is not type(self._layout):
            detail = "the parent's keys and values are kept in another format"
            raise RefusedError(ErrorCode.BAD_VALUES, detail)
        if num_tokens > parent.length:
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"a prefix of {num_tokens} tokens is more than the {parent.length} of the parent",
            )
        parent.touch()  # or it might have to make room
        self.prepare(0, num_tokens)
        if parent._common_prefixes is not None:
            self._common_prefixes = parent._common_prefixes.copy(num_tokens)
        self._copy = PrefixCopy(parent, self, num_tokens)
        parent._copies_of_us.add(self._copy)
        return self._copy

    def end_copy(self) -> None:
        """Owe the parent nothing any more: its prefix is here, or not wanted."""
        if self._copy is not None:
            self._copy.parent._copies_of_us.discard(self._copy)
            self._copy = None

    def check_is_open(self, name: str = "the session") -> None:
        """Raise RefusedError if this was closed; say so of `name`."""
        if not self.is_open:
            detail = (
                f"{name} was closed: by its client, or, when idle, for others who needed memory"
            )
            raise RefusedError(ErrorCode.UNKNOWN_SESSION, detail)

    def touch(self) -> None:
        """Note that the session is in use; its pages stay."""
        self.used_at = self._pool.now()

    @property
    def memory(self) -> SessionMemory:
        """Where the keys and values are; only reserved tokens may be touched."""
        assert self._memory is not None
        return self._memory

    def keys_values(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all that is reserved of a block, as it is kept; not to be changed."""
        return self.memory.read(block - self.span.start, self._num_reserved_tokens)

    def write(
        self, block: int, position: int, keys_BGTD: torch.Tensor, values_BGTD: torch.Tensor
    ) -> None:
        """Write keys and values of a block from `position` on."""
        pack = self._layout.pack
        self.memory.write(block - self.span.start, position, pack(keys_BGTD), pack(values_BGTD))

    def read(self, block: int, stop: int) -> Iterator[tuple[Heads, torch.Tensor, torch.Tensor]]:
        """Yield keys and values of a block up to `stop`, of some heads after others.

        What comes back is what was kept, also of the newest tokens: so it does not matter when
        they are read.
        """
        keys_BGSD, values_BGSD = self.memory.read(block - self.span.start, stop)
        for heads in self._layout.cut(self.num_rows, self.max_tokens):
            yield (
                heads,
                self._layout.unpack(keys_BGSD[*heads, :stop]),
                self._layout.unpack(values_BGSD[*heads, :stop]),
            )

    def put(
        self, block: int, position: int, keys_BGTD: torch.Tensor, values_BGTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values; return all up to them, as `read` does, but in one piece.

        Of integers that makes floats of a whole block, beside the budget.
        """
        self.write(block, position, keys_BGTD, values_BGTD)
        stop = position + keys_BGTD.shape[2]
        keys_BGSD, values_BGSD = (
            self._layout.unpack(states[:, :, :stop])
            for states in self.memory.read(block - self.span.start, stop)
        )
        return keys_BGSD, values_BGSD

    def commit(self, num_tokens: int) -> None:
        """Count the tokens that were written at `length` as valid."""
        if self.length + num_tokens > self._num_reserved_tokens:
            raise LocalProtocolError(f"{self!r}: {num_tokens} tokens were not prepared")
        self.length += num_tokens

    def abandon(self) -> None:
        """Drop what was prepared and not committed."""
        self._num_reserved_tokens = self.length

    def fall_back(self, position: int) -> None:
        """Forget the tokens from `position` on, and what was prepared: a step was refused.

        Its session's later steps stand on tokens that never came. They find a gap now, where they
        would have taken the old tokens, which the refused step was to replace, for its own.
        """
        self._truncate(min(self.length, position))
        self.abandon()

    def close(self) -> None:
        """Give everything back; closing twice is fine."""
        if not self.is_open:
            return
        self.is_open = False
        self.end_copy()
        self.memory.release()
        self._pool.give_back(self.committed_bytes)
        self._pool.forget(self)
        self._num_pages = self._num_reserved_tokens = self.length = 0
        self._memory = None

    def return_spare_pages(self) -> None:
        """Give pages above the reserved tokens back to where they came from, and the budget."""
        if self._memory is None or not self.spare_bytes:
            return
        num_pages = count_pages(self._num_reserved_tokens)
        self._memory.release_above(num_pages * PAGE_TOKENS)
        self._pool.give_back(self.spare_bytes)
        self._num_pages = num_pages

    def check_integrity(self) -> None:
        """Raise LocalProtocolError if lengths and pages contradict each other (a bug of ours)."""
        num_page_tokens = self._num_pages * PAGE_TOKENS
        if not self.length <= self._num_reserved_tokens <= num_page_tokens <= self._capacity:
            raise LocalProtocolError(f"{self!r} has {self._num_pages} pages")
        self.memory.check_integrity(num_page_tokens)

    def _check_step(self, position: int, num_tokens: int, row_map: Sequence[int] | None) -> None:
        self.check_is_open()
        if num_tokens < 1:
            raise RefusedError(ErrorCode.BAD_VALUES, "a step needs at least one token")
        if not 0 <= position <= self.length:
            # The session table answers gaps; this is what follows a step that was refused.
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"the step is at position {position}, the cache ends at {self.length}",
            )
        if position + num_tokens > self.max_tokens:
            raise RefusedError(
                ErrorCode.TOO_LONG,
                f"the session was opened for {self.max_tokens} tokens, this step would make it "
                f"{position + num_tokens}",
            )
        if row_map is not None and (
            len(row_map) != self.num_rows or not all(0 <= row < self.num_rows for row in row_map)
        ):
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"a row map of this session needs {self.num_rows} entries below {self.num_rows}",
            )

    def _reserve(self, num_tokens: int) -> None:
        num_pages = count_pages(num_tokens)
        missing_bytes = max(0, num_pages - self._num_pages) * self._page_bytes
        if missing_bytes:
            # While others are asked for spare pages, ours are none: they are about to be used.
            self._num_reserved_tokens, before = num_tokens, self._num_reserved_tokens
            try:
                largest_bytes = num_pages * self._page_bytes
                self._pool.make_room(self.holder, missing_bytes, largest_bytes)
                self._pool.reserve(self, num_pages * PAGE_TOKENS, missing_bytes)
            except CacheFullError:
                self._num_reserved_tokens = before
                raise
            self._pool.take(missing_bytes)
            self._num_pages = num_pages
        self._num_reserved_tokens = num_tokens

    def _truncate(self, length: int) -> None:
        self._note_change(length)
        self.length = length
        if self._common_prefixes is not None:
            self._common_prefixes.truncate(length)

    def _reorder(self, row_map: Sequence[int]) -> None:
        """Move the rows; what a row has in common with the one it replaces stays where it is."""
        prefixes = self._common_prefixes or CommonPrefixes(self.num_rows)
        start = prefixes.find_first_difference(row_map)
        self._note_change(start)
        moved = [row for row, source in enumerate(row_map) if row != source]
        sources = [row_map[row] for row in moved]
        self.memory.move_rows(moved, sources, start, self.length)
        prefixes.reorder(row_map, self.length)
        self._common_prefixes = prefixes

    def _note_change(self, position: int) -> None:
        for copy in self._copies_of_us:
            copy.note_change(position)
