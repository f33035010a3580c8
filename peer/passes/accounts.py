"""The accounts that passes, uploads and updates of a peer share."""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.ids import ModelId
from ..accounts.adapter_shelf import AdapterShelf
from ..accounts.budgets import PassBudget
from ..accounts.shared_bytes import SharedBytes


class TrainingAccounts:
    """Memory for training, who holds how much of it, and how much work is under way."""

    def __init__(
        self,
        model_id: ModelId,
        num_bytes: int,
        shelf: AdapterShelf,
        read_free_bytes: Callable[[], int],
        note_change: Callable[[], None],
    ) -> None:
        """`num_bytes` is the memory for passes, 0 where none are taken; `read_free_bytes` returns
        what is left where the blocks are computed.
        """
        self.model_id = model_id
        self.budget = PassBudget(num_bytes)
        self.shelf = shelf
        self.read_free_bytes = read_free_bytes
        self.tensors = SharedBytes(self.budget.tensor_bytes, times_free=3)
        """Memory for tensors of passes on their way, and for adapters that are fetched."""
        self.num_running = 0
        """Passes and updates that come in, wait, are computed or answered."""
        self.is_draining = False
        self._note_change = note_change

    def begin(self) -> None:
        """Note that a pass or an update has begun."""
        self.num_running += 1

    def end(self) -> None:
        """Note that one is over."""
        self.num_running -= 1
        self._note_change()
