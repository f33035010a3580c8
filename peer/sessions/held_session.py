"""A session that a peer holds for a client, and what the sessions of a peer share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ...protocol.fair_share import Holder
from ...protocol.ids import NO_CAPABILITY, Capability, ModelId
from ...protocol.net.clock import Clock
from ...protocol.session.table import SessionState
from ...protocol.spans import Span
from ...protocol.tensors import WireDtype
from ..accounts.adapter_shelf import AdapterShelf, Kept
from ..accounts.shared_bytes import SharedBytes
from ..engine.cache.kv_cache import SessionCache
from ..engine.compute_thread import ComputedStep
from ..pushing.session_outputs import PushResources, SessionOutputs

_SPEED_SMOOTHING = 0.05
"""Weight of the newest step: the average looks back over some twenty."""

_SPEED_SECONDS = 30.0
"""How long after the last step that decodes its speed is the present one."""


@dataclass(slots=True)
class HeldSession:
    """A session and its cache; closed by the stream that opened it.

    One with a `capability` is part of a chain: who pushes to it has to show that, and everything
    it has to say goes to the stream that opened it.

    `used_at` is when it was last stepped, on whatever stream; `holder` is who opened it, as
    `fair_share` counts; `adapter` changes all of its rows; `running` are the steps of it in the
    engine. The clock is the service's.
    """

    state: SessionState
    cache: SessionCache
    span: Span
    dtype: WireDtype
    opened_at: float
    holder: Holder
    outputs: SessionOutputs
    capability: Capability = NO_CAPABILITY
    adapter: Kept | None = None
    running: set[asyncio.Future[ComputedStep]] = field(default_factory=set)
    num_prompt_bytes: int = 0
    used_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.used_at = self.opened_at


@dataclass(eq=False)
class SessionResources:
    """Resources that the sessions of a peer share with each other and with its other workloads."""

    model_id: ModelId
    max_sessions: int
    shelf: AdapterShelf
    pushing: PushResources
    prompts: SharedBytes
    """Memory for deep prompts."""
    note_change: Callable[[], None]
    """To be called when a session is over, or does not wait any more."""


class LoadedSpeed:
    """How fast one session decodes beside all others, as its steps are computed.

    Without the time that they wait: announcements tell that separately.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._noted_at = float("-inf")

    @property
    def steps_per_second(self) -> float | None:
        """Steps through the whole span; None where nobody has decoded of late."""
        is_recent = self._clock.now() - self._noted_at <= _SPEED_SECONDS
        return 1 / self._seconds if is_recent and self._seconds > 0 else None

    def note(self, compute_seconds: float, span_fraction: float) -> None:
        """Note a step of one token of one row through a part of the span."""
        seconds = compute_seconds / span_fraction
        is_first = self.steps_per_second is None
        self._seconds += (1.0 if is_first else _SPEED_SMOOTHING) * (seconds - self._seconds)
        self._noted_at = self._clock.now()
