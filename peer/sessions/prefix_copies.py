"""Prefixes that forks begin with, copied on the compute thread between two iterations of it.

However many and long they are, a piece at a time: steps go in between. Addresses take turns, at
each its clients, and of each the forks one after the other, so that nobody waits for a flood.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

from ...protocol.fair_share import Holder
from ..engine.cache.kv_cache import PrefixCopy
from ..streams.workload import Compute


@dataclass(eq=False, slots=True)
class _Waiting:
    """A copy that is under way, or will be."""

    copy: PrefixCopy
    holder: Holder
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)


class PrefixCopies:
    """All copies that are under way at a peer, of which the compute thread has one piece at most.

    Owned by the event loop.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._waiting: list[_Waiting] = []  # in order of arrival
        # When each address and each holder of those that wait came, or had its last turn.
        self._had_turn: dict[str | Holder, int] = {}
        self._num_turns = 0
        self._is_copying = False

    def __repr__(self) -> str:
        return f"<PrefixCopies: {len(self._waiting)} under way>"

    async def finish(self, copy: PrefixCopy, holder: Holder) -> None:
        """Bring a copy to its end. Raises RefusedError when its parent does not last as long.

        Whoever is cancelled here, or gets an error, closes the cache behind it on the compute
        thread: a piece may be on its way into it.
        """
        waiting = _Waiting(copy, holder)
        self._waiting.append(waiting)
        for key in (holder.address, holder):
            self._had_turn.setdefault(key, self._num_turns)
        self._go_on()
        try:
            await waiting.done
        finally:
            self._waiting.remove(waiting)
            for key in (holder.address, holder):
                if all(key not in (other.holder.address, other.holder) for other in self._waiting):
                    del self._had_turn[key]

    def _go_on(self) -> None:
        """Have the next piece copied, unless one is being copied now."""
        candidates = [waiting for waiting in self._waiting if not waiting.done.done()]
        if self._is_copying or not candidates:
            return
        chosen = min(candidates, key=self._find_last_turn)
        self._num_turns += 1
        for key in (chosen.holder.address, chosen.holder):
            self._had_turn[key] = self._num_turns
        self._is_copying = True
        self._compute.call(chosen.copy.advance).add_done_callback(partial(self._note, chosen))

    def _find_last_turn(self, waiting: _Waiting) -> tuple[int, int]:
        return self._had_turn[waiting.holder.address], self._had_turn[waiting.holder]

    def _note(self, waiting: _Waiting, piece: asyncio.Future[bool]) -> None:
        """Note that a piece was copied, or could not be."""
        self._is_copying = False
        error = piece.exception()
        if not waiting.done.done():  # or nobody waits any more
            if error is not None:
                waiting.done.set_exception(error)
            elif piece.result():
                waiting.done.set_result(None)
        self._go_on()
