"""A session that a peer holds for a client."""

import asyncio
from dataclasses import dataclass, field

from ...protocol.fair_share import Holder
from ...protocol.ids import NO_CAPABILITY, Capability
from ...protocol.session.table import SessionState
from ...protocol.spans import Span
from ...protocol.tensors import WireDtype
from ..accounts.adapter_shelf import Kept
from ..engine.cache.kv_cache import SessionCache
from ..engine.compute_thread import ComputedStep
from ..pushing.outlet import Outlet


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
    outlet: Outlet
    capability: Capability = NO_CAPABILITY
    adapter: Kept | None = None
    running: set[asyncio.Future[ComputedStep]] = field(default_factory=set)
    num_prompt_bytes: int = 0
    used_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.used_at = self.opened_at
