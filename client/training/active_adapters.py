"""The adapters of the rows of a call, in a model or some of its blocks.

Tensor suffixes: B rows, T tokens, H hidden, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from ...protocol.errors import UsageError
from ...protocol.ids import ADAPTER_ID_BYTES, AdapterId, parse_adapter_id
from ...protocol.messages.adapters import find_block
from ...protocol.spans import Span
from ..adapters.adapter_versions import (
    AdapterVersion,
    PublishedAdapter,
    RowAdapters,
    SentAdapter,
    ShardedVersion,
)
from .lora import LoraAdapter

Adapter = LoraAdapter | str
"""An adapter of this process, or the digest of a published one."""

OwnVersion = AdapterVersion | ShardedVersion
"""The state of an adapter of this process at one time; its optimizer may run at peers."""

AdapterChoice = Adapter | Sequence[Adapter | None] | None
"""One for all rows, or one for each row."""


@dataclass(frozen=True)
class ChosenAdapters:
    """The adapters of some rows and their parameters. Empty `rows`: no row has an adapter."""

    rows: RowAdapters = ()
    sources: Mapping[OwnVersion, LoraAdapter] = field(default_factory=dict[OwnVersion, LoraAdapter])
    is_trained: bool = False
    """Whether gradients of them will be asked for."""

    def list_parameters(self, span: Span) -> list[tuple[OwnVersion, str, nn.Parameter]]:
        """Return all matrices of some blocks."""
        return [
            (version, name, matrix)
            for version, source in self.sources.items()
            for name, matrix in source.named_parameters()
            if (block := find_block(name)) is not None and block in span
        ]


NO_ADAPTERS = ChosenAdapters()

DIGEST = f"the digest of a published adapter, which has {2 * ADAPTER_ID_BYTES} hexadecimal digits"
"""How messages name and describe a digest."""


class ActiveAdapters:
    """The adapters that are active: those of a `with` in this thread or task, or the default."""

    def __init__(self) -> None:
        self.are_used = False
        """Whether any adapter was ever made active; until then there is nothing to ask for."""
        self.default: AdapterChoice = None
        self.before_use: Callable[[], None] = lambda: None
        """Called before the active adapters are read."""
        self._active: ContextVar[tuple[AdapterChoice] | None] = ContextVar(
            "active adapters", default=None
        )

    @property
    def choice(self) -> AdapterChoice:
        """The active adapters."""
        self.before_use()
        active = self._active.get()
        return self.default if active is None else active[0]

    def set_default(self, choice: AdapterChoice) -> None:
        """Make adapters active outside of any `use()`; None: none."""
        self.default = choice
        self.are_used |= choice is not None

    @contextmanager
    def use(self, choice: AdapterChoice) -> Iterator[None]:
        """Make adapters active inside of the `with`; None: none. Raises UsageError for others."""
        token = self._active.set((read_choice(choice),))
        self.are_used |= choice is not None
        try:
            yield
        finally:
            self._active.reset(token)

    def take(self, num_rows: int) -> ChosenAdapters:
        """Return the adapters of so many rows, as they are now."""
        rows = self._list_rows(num_rows)
        if not any(adapter is not None for adapter in rows):
            return NO_ADAPTERS
        sent: dict[Adapter, SentAdapter] = {}
        sources: dict[OwnVersion, LoraAdapter] = {}
        for adapter in dict.fromkeys(rows):
            if isinstance(adapter, LoraAdapter):
                remote = adapter.remote_optimizer
                version = adapter.take_version() if remote is None else remote.take_version()
                sent[adapter] = version
                sources[version] = adapter
            elif adapter is not None:
                sent[adapter] = PublishedAdapter(read_digest(adapter))
        is_trained = torch.is_grad_enabled() and any(version.is_trained for version in sources)
        if is_trained and len(sources) < len(sent):
            raise UsageError(
                "rows with an adapter to train cannot share a call with rows that use a published "
                "adapter; make two calls"
            )
        if any(isinstance(one, ShardedVersion) for one in sources) and len(sent) > 1:
            raise UsageError(
                "an adapter whose optimizer runs at the peers must be the only adapter of a call; "
                "other rows may have none"
            )
        chosen = tuple(None if one is None else sent[one] for one in rows)
        return ChosenAdapters(chosen, sources, is_trained)

    def take_for_session(self) -> SentAdapter | None:
        """Return the adapter of a session that is opened now; raises UsageError for several."""
        if isinstance(self.choice, list | tuple):
            raise UsageError("all rows of a session share one adapter; make only one active for it")
        if isinstance(self.choice, LoraAdapter):
            return self.choice.take_version()  # which is fetched, if peers train it
        rows = self.take(1).rows
        return rows[0] if rows else None

    def check_session(self, adapter: object) -> None:
        """Raise UsageError if the active adapter is not the one of the session."""
        if adapter is not self.choice and adapter != self.choice:
            raise UsageError(
                "the active adapter is not the one that the session was opened with; open another "
                "session, or make that adapter active"
            )

    def change_logits(self, hidden_BTH: Tensor) -> Tensor | None:
        """Return the change of logits [B, T, V] by adapters, in float32, or None."""
        rows = self._list_rows(len(hidden_BTH))
        heads = {one: one.get_head() for one in rows if isinstance(one, LoraAdapter)}
        if not any(heads.values()):
            return None
        changes: list[Tensor | None] = []
        for row, adapter in enumerate(rows):
            head = heads[adapter] if isinstance(adapter, LoraAdapter) else None
            changes.append(None if head is None else head.compute(hidden_BTH[row]))
        zeros = torch.zeros_like(next(change for change in changes if change is not None))
        return torch.stack([zeros if change is None else change for change in changes])

    def _list_rows(self, num_rows: int) -> list[Adapter | None]:
        choice = self.choice
        if choice is None or isinstance(choice, LoraAdapter | str):
            return [choice] * num_rows
        if len(choice) != num_rows:
            raise UsageError(
                f"{len(choice)} active adapters do not fit {num_rows} rows; give one per row"
            )
        return list(choice)


def read_choice(choice: Any) -> AdapterChoice:
    """Return the adapters of rows, with digests normalized; raises UsageError for anything else."""
    if not isinstance(choice, list | tuple):
        return _read_adapter(choice)
    given = list(cast("Sequence[Any]", choice))
    read = [_read_adapter(adapter) for adapter in given]
    return choice if read == given else read


def _read_adapter(adapter: Any) -> Adapter | None:
    if adapter is None or isinstance(adapter, LoraAdapter):
        return adapter
    if isinstance(adapter, str) and (name := parse_adapter_id(adapter)) is not None:
        return name.hex()
    if isinstance(adapter, str | PathLike):
        raise UsageError(
            f"{str(cast('Any', adapter))!r:.80} is not {DIGEST}; load an adapter from a folder "
            "or the Hub with LoraAdapter.load(folder, model) or model.load_adapter(folder)"
        )
    raise UsageError(
        "active_adapter must be a LoraAdapter, the digest of a published one, or a list with one "
        f"for each row, not {adapter!r:.60}"
    )


def is_digest(given: object) -> TypeGuard[str]:
    """Return whether it may name a published adapter."""
    return isinstance(given, str) and parse_adapter_id(given) is not None


def read_digest(text: object) -> AdapterId:
    """Return the name of a published adapter; raises UsageError for anything else."""
    adapter = parse_adapter_id(text) if isinstance(text, str) else None
    if adapter is None:
        raise UsageError(f"{text!r:.80} is not {DIGEST}; publish_adapter() returns it")
    return adapter
