"""Remote blocks as one module, and the peers that serve them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...protocol.errors import ErrorCode, RefusedError, UsageError
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter
from ..concurrency.portal import Portal
from ..routing.route import Failover, Hop
from ..routing.route_finder import RouteFinder
from ..session.deep_prompts import check_prompts
from ..session.inference_session import (
    InferenceSession,
    OpenRemote,
    check_is_session,
    leave_out_dummy,
)
from ..settings.client_config import (
    ClientConfig,
    make_whole,
)
from ..training.active_adapters import ActiveAdapters, ChosenAdapters, read_digest
from ..training.autograd import PassRunner
from ..training.lora import LoraAdapter, check_is_adapter
from ..training.peer_optimizer import PeerOptimizer
from .distributed_config import DistributedConfig, find_origin
from .sequence_info import RemoteSpanInfo, SequenceManagerState, describe_sequence, locate

# Shape suffixes: B rows, T tokens, H hidden size.

UID_DELIMITER = "."
"""Separates the name of a model from the index of a block."""

MODES = ("min_latency", "max_throughput")


class SwarmClient(Protocol):
    """A member of one model's swarm, as remote blocks see it; see `Client`."""

    passes: PassRunner
    portal: Portal
    swarm: RouteFinder

    @property
    def config(self) -> ClientConfig: ...
    @property
    def is_closed(self) -> bool: ...
    def open_session(
        self, max_length: int, span: Span, kv_format: str | None, adapter: SentAdapter | None
    ) -> InferenceSession: ...
    def make_opener(
        self, max_length: int, span: Span, kv_format: str | None, adapter: SentAdapter | None
    ) -> OpenRemote: ...
    def close(self) -> None: ...


class RemoteSequential(nn.Module):
    """A span of remote blocks, used like an `nn.Sequential` of them.

    A call continues the active session, if there is one; otherwise it makes one stateless pass.
    Slices are views of the same client with a span of their own. A session is active for the thread
    or task that activated it, and for this object only. Slices share `adapters`. Close a
    RemoteSequential that you created, or use it in a `with` block; that of a model is closed with
    the model.
    """

    def __init__(
        self,
        config: DistributedConfig | PreTrainedConfig,
        *,
        sequence_manager: RemoteSequenceManager | None = None,
        dht: object = None,
        start_block: int | None = None,
        end_block: int | None = None,
    ) -> None:
        """Join a swarm for some blocks of its model, by default all.

        `config` may also be that of an open model. With a `sequence_manager`, use its blocks and
        its client. Without initial peers, join through those of `dht`. Raises UsageError for blocks
        that the model does not have, and the errors of `config.join()`.
        """
        if sequence_manager is not None:
            if (start_block, end_block) != (None, None):
                raise UsageError(
                    "sequence_manager already names the blocks; leave out start_block and end_block"
                )
            _warn_of_overrides(type(sequence_manager))
            self._set_up(sequence_manager, config)
            return
        origin = find_origin(config)
        num_blocks = origin.num_hidden_layers
        start = 0 if start_block is None else make_whole("start_block", start_block)
        stop = num_blocks if end_block is None else make_whole("end_block", end_block)
        if not 0 <= start < stop <= num_blocks:
            raise UsageError(
                f"blocks {start}:{stop} do not exist: the model has blocks 0:{num_blocks}"
            )
        manager = RemoteSequenceManager.over(origin.join(dht), Span(start, stop), config)
        self._set_up(manager, config)

    @classmethod
    def over(cls, manager: RemoteSequenceManager, config: Any) -> RemoteSequential:
        """Return a manager's blocks; the caller closes its client. `config` is the model's."""
        blocks = cls.__new__(cls)
        blocks._set_up(manager, config)
        return blocks

    def _set_up(self, manager: RemoteSequenceManager, config: Any) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.adapters = ActiveAdapters()
        self.sequence_manager = manager
        """The peers that serve these blocks."""
        self._client = manager.client
        self._span = span = manager.span
        self._hidden_size: int = config.hidden_size
        self._active_session: ContextVar[InferenceSession | None] = ContextVar(
            f"active session of blocks {span}", default=None
        )

    def close(self) -> None:
        """Leave the swarm; all objects that share the client become unusable."""
        self.sequence_manager.shutdown()

    def __enter__(self) -> RemoteSequential:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows for this module."""
        return f"blocks {self._span} on other machines"

    @property
    def span(self) -> Span:
        """The blocks that this module runs."""
        return self._span

    def __len__(self) -> int:
        return len(self._span)

    def __iter__(self) -> Iterator[RemoteSequential]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> RemoteSequential:
        """Return one block, or several in a row, as a RemoteSequential.

        Raises IndexError outside of the span and UsageError for an empty or uneven slice.
        """
        blocks = RemoteSequential.over(self.sequence_manager[index], self.config)
        blocks.adapters = self.adapters
        return blocks

    def forward(
        self,
        inputs: Tensor,
        prompts: Tensor | None = None,
        hypo_ids: Tensor | None = None,
        *,
        last_token_only: bool = False,
    ) -> Tensor:
        """Run hidden states [B, T, H] through the blocks; with `last_token_only`, return [B, 1, H].

        With an active session the call continues it, and no gradients flow. Without one, all tokens
        go through in one stateless pass, which is differentiable and gives the same values under
        `no_grad`. `prompts`, [L, B, P, H] or [L, 1, P, H], are added to the first P inputs of each
        of the L blocks. An empty tensor in their place, PETALS' DUMMY, stands for None.
        """
        hidden_BTH = inputs
        if prompts is not None or hypo_ids is not None:
            prompts, hypo_ids = leave_out_dummy(prompts), leave_out_dummy(hypo_ids)
        self.check_hidden(hidden_BTH)
        if self.active_session is not None:
            with torch.no_grad():
                return self._step(hidden_BTH, prompts, hypo_ids, last_token_only)
        if hidden_BTH.numel() == 0:
            return hidden_BTH
        output_BTH = self._run_stateless(hidden_BTH, prompts, hypo_ids)
        return output_BTH[:, -1:] if last_token_only else output_BTH

    def _run_stateless(
        self, hidden_BTH: Tensor, prompts: Tensor | None, hypo_ids: Tensor | None
    ) -> Tensor:
        """Make a pass, or use a session of its own where no pass is possible or needed."""
        adapters = self.adapters.take(len(hidden_BTH))
        wants_gradients = torch.is_grad_enabled() and hidden_BTH.requires_grad
        needs_pass = prompts is not None or wants_gradients or bool(adapters.rows)
        if needs_pass or self._client.passes.can_run(self._span, hidden_BTH):
            try:
                return self._run_pass(hidden_BTH, prompts, hypo_ids, adapters)
            except RefusedError as error:
                if needs_pass or error.code is not ErrorCode.OUT_OF_MEMORY:
                    raise
        with torch.no_grad():
            return self._step(hidden_BTH, None, hypo_ids, last_token_only=False)

    def _run_pass(
        self,
        hidden_BTH: Tensor,
        prompts: Tensor | None,
        hypo_ids: Tensor | None,
        adapters: ChosenAdapters,
    ) -> Tensor:
        if hypo_ids is not None:
            raise UsageError("hypo_ids reorders the rows of a session; open a session to use it")
        if prompts is not None:
            check_prompts(prompts, len(self._span), hidden_BTH)
        return self._client.passes.run(self._span, hidden_BTH, prompts, adapters)

    def _step(
        self,
        hidden_BTH: Tensor,
        prompts: Tensor | None,
        hypo_ids: Tensor | None,
        last_token_only: bool,
    ) -> Tensor:
        active = self.active_session
        if active is not None:
            self.check_adapter(active)
        with nullcontext(active) if active else self.open_session(hidden_BTH.shape[1]) as session:
            output = session.step(
                hidden_BTH.to("cpu"), prompts, hypo_ids, last_token_only=last_token_only
            )
        return output.to(hidden_BTH.device)

    def check_adapter(self, session: InferenceSession) -> None:
        """Raise UsageError if the active adapter is not the one of the session."""
        self.adapters.before_use()
        if self.adapters.are_used or session.adapter is not None:
            self.adapters.check_session(session.adapter)

    def check_hidden(self, hidden_BTH: Tensor) -> None:
        """Raise UsageError unless the tensor can hold hidden states of this model."""
        if hidden_BTH.ndim != 3 or hidden_BTH.shape[2] != self._hidden_size:
            raise UsageError(
                f"hidden states must have shape [rows, tokens, {self._hidden_size}], "
                f"got {list(hidden_BTH.shape)}"
            )
        if not hidden_BTH.is_floating_point():
            raise UsageError(
                f"hidden states must be floating point numbers, got {hidden_BTH.dtype}"
            )

    def take_recent_hops(self) -> list[Hop]:
        """Return the hops of stateless passes since the last call."""
        runner = self._client.passes
        return runner.wait_for(runner.remote.take_recent_hops())

    def take_failovers(self) -> list[Failover]:
        """Return the failovers of stateless passes since the last call."""
        runner = self._client.passes
        return runner.wait_for(runner.remote.take_failovers())

    def optimizer_at_peers(
        self, adapter: LoraAdapter, kind: str = "adamw", **options: Any
    ) -> PeerOptimizer:
        """Return an optimizer that trains an adapter at the peers which apply it.

        `kind` is "adamw" or "sgd", with the options and defaults of torch's. Raises UsageError for
        other kinds, and for an adapter of the head.
        """
        runner = self._client.passes
        shards = runner.wait_for(runner.remote.make_sharded_optimizer())
        return PeerOptimizer(shards, runner.wait_for, adapter, kind, **options)

    def publish_adapter(self, adapter: LoraAdapter) -> str:
        """Publish an adapter as it is now, and return the digest by which anyone can use it.

        A few peers hold it, from which all others fetch it when they are asked for it, until it is
        withdrawn or the model is closed; up to five minutes longer where they do not hear of that.
        A later state of the same adapter, published for the same blocks, replaces it in the same
        way.

        Returns when each block has a holder, after ten minutes at the latest. A warning names the
        blocks that have none. Raises UsageError unless it is a LoraAdapter, and for one of the
        head, which is computed at the client; and the refusal of the peers if none of them holds
        it.
        """
        adapter = check_is_adapter(adapter, "publish_adapter()")
        if adapter.get_head() is not None:
            raise UsageError(
                "an adapter of the head cannot be published: every client has a head of its own"
            )
        version = adapter.take_version()
        leaves = version.publish(self._span)
        if leaves is None:
            raise UsageError(f"the adapter changes nothing in blocks {self._span}")
        runner = self._client.passes
        publishing = runner.remote.publisher.publish(leaves, self._span, version.lineage)
        runner.wait_for(publishing)
        return leaves.manifest.name.hex()

    def withdraw_adapter(self, digest: str) -> None:
        """Withdraw a published adapter: peers forget it.

        Sessions and passes that use it come to their end. A warning says how many peers could not
        be told; to call it again, or to close the model, tells those, and where nobody is left to
        be told nothing happens. Raises UsageError for the digest of anything that was not published
        here, or so long ago that a thousand others have come and gone since.
        """
        runner = self._client.passes
        runner.wait_for(runner.remote.publisher.withdraw(read_digest(digest)))

    def open_session(self, max_length: int, kv_format: str | None = None) -> InferenceSession:
        """Open a session over these blocks without making it active; the caller closes it."""
        adapter = self.adapters.take_for_session()
        session = self._client.open_session(max_length, self._span, kv_format, adapter)
        session.adapter = self.adapters.choice
        return session

    @contextmanager
    def inference_session(
        self, *, max_length: int, kv_format: str | None = None
    ) -> Iterator[InferenceSession]:
        """Open a session of at most `max_length` tokens per row, active within the `with` block."""
        with self.open_session(max_length, kv_format) as session, self.use_session(session):
            yield session

    @contextmanager
    def use_session(self, session: InferenceSession | None) -> Iterator[InferenceSession | None]:
        """Make a session active within the `with` block; None makes calls stateless."""
        if session is not None:
            check_is_session(session)
        token = self._active_session.set(session)
        try:
            yield session
        finally:
            self._active_session.reset(token)

    @property
    def active_session(self) -> InferenceSession | None:
        """The session that calls continue, or None."""
        return self._active_session.get()

    @property
    def position(self) -> int:
        """Tokens per row in the active session; 0 without one."""
        session = self.active_session
        return 0 if session is None else session.position


class RemoteSequenceManager:
    """The peers that serve consecutive blocks. Created from blocks, or to create them.

    A read-only view: the client chooses routes by its own measurements, and nothing here changes
    that. Shut it down if you created it, or close the blocks made from it.
    """

    def __init__(
        self,
        config: DistributedConfig | PreTrainedConfig,
        block_uids: Sequence[str],
        *,
        dht: object = None,
    ) -> None:
        """Join a swarm for the blocks in `block_uids`.

        `config` may also be that of an open model. The client has a directory of its own, found
        through `config.initial_peers`, or those of `dht`. Raises UsageError unless the blocks exist
        and are consecutive.
        """
        origin = find_origin(config)
        span = _read_uids(block_uids, origin)
        self._set_up(origin.join(dht), span, config)

    @classmethod
    def over(cls, client: SwarmClient, span: Span, config: Any) -> RemoteSequenceManager:
        """Return one for blocks over a client that the caller closes."""
        manager = cls.__new__(cls)
        manager._set_up(client, span, config)
        return manager

    def _set_up(self, client: SwarmClient, span: Span, config: Any) -> None:
        self.config = config
        self.client = client
        self.span = span

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, index: int | slice) -> RemoteSequenceManager:
        """Return the same for fewer blocks; raises what `take_blocks` does."""
        return self.over(self.client, take_blocks(self.span, index), self.config)

    @property
    def portal(self) -> Portal:
        """The thread and event loop of the client."""
        return self.client.portal

    def make_opener(self, max_length: int) -> OpenRemote:
        """Return what `InferenceSession(sequence_manager, max_length)` opens."""
        return self.client.make_opener(max_length, self.span, None, None)

    @property
    def block_uids(self) -> tuple[str, ...]:
        """The names of the blocks."""
        prefix = self.client.swarm.book.view.model_id + UID_DELIMITER
        return tuple(f"{prefix}{block}" for block in range(self.span.start, self.span.stop))

    @property
    def state(self) -> SequenceManagerState:
        """The newest known state; sends no request."""
        sequence_info = describe_sequence(self.client.swarm.book.view, self.span, self.block_uids)
        return SequenceManagerState(sequence_info, self.client.swarm.book.avoided)

    @property
    def rpc_info(self) -> dict[str, Any]:
        """The live state of a peer that serves the first block; raises RouteError without one."""
        first = Span(self.span.start, self.span.start + 1)
        peer = self._plan_hops(first)[0].peer
        return {
            "peer_id": peer.peer_id,
            "version": peer.software,
            "cache_tokens_available": peer.free_kv_tokens,
            "inference_rps": peer.decode_steps_per_second,
            "torch_dtype": peer.compute_dtype,
            "quant_type": peer.weights,
        }

    def make_sequence(
        self,
        start_index: int = 0,
        end_index: int | None = None,
        *,
        mode: str = "min_latency",
        cache_tokens_needed: int | None = None,
    ) -> list[RemoteSpanInfo]:
        """Return a route that a session might take now; raises RouteError with missing blocks.

        Passes of fine-tuning ("max_throughput") have no fixed route: each hop is chosen when it is
        needed. This returns one of many.
        """
        if mode not in MODES:
            raise UsageError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if start_index == (len(self) if end_index is None else end_index):
            return []
        span = take_blocks(self.span, slice(start_index, end_index))
        hops = self._plan_hops(span, float(cache_tokens_needed or 0))
        return [locate(hop.peer, hop.span, self.span) for hop in hops]

    def _plan_hops(self, span: Span, needed_kv_tokens: float = 0.0) -> Sequence[Hop]:
        """Read the directory and return a route that a session might take now.

        Prefers peers with room for `needed_kv_tokens` tokens of all rows.
        """
        route = self.client.portal.run(
            self.client.swarm.wait_for_route(
                span,
                float("-inf"),
                0.0,
                (self.client.config.weights,),
                needed_kv_tokens=needed_kv_tokens,
            )
        )
        return route.hops

    def update(self, *, wait: bool = True) -> None:
        """Read the directory now; the client also reads it before each route."""
        self.client.portal.run(self.client.swarm.book.refresh())

    def is_alive(self) -> bool:
        """Return whether the client is still in the swarm."""
        return not self.client.is_closed

    def shutdown(self) -> None:
        """Leave the swarm; blocks and models that share the client become unusable."""
        self.client.close()


def take_blocks(span: Span, index: int | slice) -> Span:
    """Return one block of a span, or several consecutive ones, counted from its first.

    Raises IndexError outside of the span and UsageError for an empty slice or one with a step.

    >>> take_blocks(Span(2, 6), slice(1, -1)), take_blocks(Span(2, 6), -1)
    (Span(start=3, stop=5), Span(start=5, stop=6))
    """
    try:
        blocks = range(span.start, span.stop)[index]
    except IndexError:
        raise IndexError(f"there is no block {index}: these are {len(span)} blocks") from None
    except TypeError as error:
        raise UsageError(
            f"a block is chosen by its number or a slice, not {index!r:.40}"
        ) from error
    if isinstance(blocks, int):
        return Span(blocks, blocks + 1)
    if not blocks or blocks.step != 1:
        raise UsageError(f"{index} does not select consecutive blocks of {span}")
    return Span(blocks.start, blocks.stop)


_NEVER_CALLED = (
    "get_request_metadata", "get_retry_delay", "make_sequence", "on_request_failure",
    "on_request_success", "rpc_info", "update",
)  # fmt: skip
"""What PETALS calls on a sequence manager, and nothing here does."""


def _warn_of_overrides(kind: type[RemoteSequenceManager]) -> None:
    base = RemoteSequenceManager
    overridden = [
        name for name in _NEVER_CALLED if getattr(kind, name, None) is not getattr(base, name, None)
    ]
    if overridden:
        warnings.warn(
            f"nothing calls {', '.join(overridden)} of {kind.__name__}: a client chooses peers and "
            "formats by its own settings and measurements",
            stacklevel=3,  # the caller of RemoteSequential()
        )


def _read_uids(block_uids: Sequence[str], config: DistributedConfig) -> Span:
    prefix = config.dht_prefix + UID_DELIMITER
    names = {f"{prefix}{block}": block for block in range(config.num_hidden_layers)}
    blocks = [names.get(uid) for uid in block_uids]
    start = blocks[0] if blocks else None
    if start is None or blocks != list(range(start, start + len(blocks))):
        raise UsageError(
            "block_uids must name consecutive blocks, as "
            f"f'{{config.dht_prefix}}{UID_DELIMITER}{{index}}' with an index below "
            f"{config.num_hidden_layers}; got {list(block_uids)!r:.200}"
        )
    return Span(start, start + len(blocks))
