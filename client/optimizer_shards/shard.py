"""The part of an optimizer that one peer holds, and all that is needed to go on at another peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...protocol.ids import NO_ADAPTER, AdapterId
from ...protocol.messages.adapters import GradientSum, OptimizerSettings
from ...protocol.spans import Span
from ..adapters.adapter_versions import PublishedAdapter
from ..adapters.learned_states import LearnedState
from ..passes.microbatches import Texts
from ..routing.route import Hop


@dataclass(frozen=True)
class AppliedUpdate:
    """The settings of one update, the same for all blocks of an adapter."""

    settings: OptimizerSettings
    factor: float


@dataclass(frozen=True)
class LoggedPass:
    """A backward pass whose gradients a peer has accumulated, as it was asked for."""

    span: Span
    texts: Texts
    grads_BTH: Tensor
    part: int

    @property
    def num_bytes(self) -> int:
        """Memory that the log keeps for it."""
        prompts = self.texts.prompts_LBPH
        num_bytes = self.texts.hidden_BTH.nbytes + self.grads_BTH.nbytes
        return num_bytes + (0 if prompts is None else prompts.nbytes)


@dataclass
class LoggedUpdate:
    """The passes of one update, in order; of the last one in a log it is not known yet."""

    number: int
    passes: list[LoggedPass] = field(default_factory=list[LoggedPass])
    applied: AppliedUpdate | None = None


@dataclass(eq=False)
class Shard:
    """Some blocks and their peer: `saved`, and then everything in `log`, is what that peer has.

    Without a `hop` no peer holds it, and the next request for it finds one.
    """

    span: Span
    saved: LearnedState
    log: list[LoggedUpdate]
    hop: Hop | None = None
    name: AdapterId = NO_ADAPTER
    weights: str | None = None
    square_sum: float | None = None
    """Of the gradients accumulated so far; None where they are not measured."""

    @property
    def held_at(self) -> Hop:
        """The hop whose peer trains it."""
        assert self.hop is not None
        return self.hop

    def make_hop(self, span: Span) -> Hop:
        """Return its peer for some of the blocks."""
        return Hop(self.held_at.peer, span)

    @property
    def is_empty(self) -> bool:
        """Whether the adapter changes nothing in these blocks."""
        return not self.saved.matrices

    @property
    def num_updates(self) -> int:
        """How many updates it has behind it."""
        return self.saved.num_updates + len(self.log) - 1

    @property
    def num_bytes(self) -> int:
        """Memory of the log."""
        return sum(one.num_bytes for update in self.log for one in update.passes)

    @property
    def gradients(self) -> GradientSum:
        """The gradients that its peer has accumulated for the next update."""
        parts = tuple(sorted(one.part for one in self.log[-1].passes))
        return GradientSum(self.name, self.log[-1].number, parts)

    def cut(self, hop: Hop) -> Shard:
        """Return what of it belongs to the blocks of a hop, as it was saved."""
        log = [LoggedUpdate(self.log[0].number)]
        saved, weights = self.saved.cut(hop.span), hop.peer.weights
        return Shard(hop.span, saved, log, hop, self.name, weights)

    def name_rows(self, texts: Texts) -> Texts:
        """Return texts whose rows have the adapter by the name that it has at its peer."""
        if self.is_empty:
            return replace(texts, adapters=(), trains_adapters=False)
        known = PublishedAdapter(self.name)
        rows = tuple(None if one is None else known for one in texts.adapters)
        return replace(texts, adapters=rows)

    def note_pass(self, logged: LoggedPass) -> None:
        """Note that gradients were accumulated."""
        self.log[-1].passes.append(logged)
        self.square_sum = None

    def note_update(self, applied: AppliedUpdate, name: AdapterId) -> None:
        """Note that an update was made, and what came of it is called so."""
        self.log[-1].applied = applied
        self.log.append(LoggedUpdate(self.log[-1].number + 1))
        self.name, self.square_sum = name, None

    def note_saved(self, saved: LearnedState) -> None:
        """Note what is known to be there: what led to it is not needed any more."""
        self.saved, self.log = saved, self.log[-1:]

    def drop_gradients(self, number: int) -> None:
        """Begin with another sum of gradients."""
        self.log[-1] = LoggedUpdate(number)
        self.square_sum = None


def list_stages(shards: Sequence[Shard], span: Span) -> list[tuple[Shard, Span]]:
    """Return which of the shards have some of these blocks, and which."""
    found = ((shard, shard.span.overlap(span)) for shard in shards)
    return [(shard, part) for shard, part in found if part is not None]
