"""The blocks of a model, on other machines, as one module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ...protocol.errors import ErrorCode, RefusedError, UsageError
from ...protocol.spans import Span
from ..passes.pass_failovers import PassFailover
from ..routing.router import Hop
from ..runtime.client import Client
from ..session.deep_prompts import check_prompts
from ..session.inference_session import InferenceSession, check_is_session
from ..settings.config import make_whole
from ..training.active_adapters import ActiveAdapters, ChosenAdapters, read_digest
from ..training.lora import LoraAdapter, check_is_adapter
from ..training.peer_optimizer import PeerOptimizer
from .distributed_config import DistributedConfig
from .remote_sequence import RemoteSequenceManager, take_blocks

# Shape suffixes: B rows, T tokens, H hidden size.


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
        config: DistributedConfig,
        *,
        sequence_manager: RemoteSequenceManager | None = None,
        dht: object = None,
        start_block: int | None = None,
        end_block: int | None = None,
    ) -> None:
        """Join a swarm for some blocks of its model, by default all.

        With a `sequence_manager`, use its blocks and its client. `dht` has no effect. Raises
        UsageError for blocks that the model does not have, and the errors of `config.join()`.
        """
        if sequence_manager is not None:
            if (start_block, end_block) != (None, None):
                raise UsageError("a sequence_manager says which blocks; leave out start and end")
            self._set_up(sequence_manager.client, sequence_manager.span, config)
            return
        num_blocks = config.num_hidden_layers
        start = 0 if start_block is None else make_whole("start_block", start_block)
        stop = num_blocks if end_block is None else make_whole("end_block", end_block)
        if not 0 <= start < stop <= num_blocks:
            raise UsageError(f"the model has blocks 0:{num_blocks}, and so no {start}:{stop}")
        self._set_up(config.join(), Span(start, stop), config)

    @classmethod
    def over(cls, client: Client, span: Span, config: Any) -> RemoteSequential:
        """Return blocks over a client that the caller closes; `config` is the model's."""
        blocks = cls.__new__(cls)
        blocks._set_up(client, span, config)
        return blocks

    def _set_up(self, client: Client, span: Span, config: Any) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.adapters = ActiveAdapters()
        self._client = client
        self._span = span
        self._hidden_size: int = config.hidden_size
        self._active_session: ContextVar[InferenceSession | None] = ContextVar(
            f"active session of blocks {span}", default=None
        )

    def close(self) -> None:
        """Leave the swarm; all objects that share the client become unusable."""
        self._client.close()

    def __enter__(self) -> RemoteSequential:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        return f"blocks {self._span} on other machines"

    @property
    def span(self) -> Span:
        """The blocks that this module runs."""
        return self._span

    @property
    def sequence_manager(self) -> RemoteSequenceManager:
        """The peers that serve these blocks."""
        return RemoteSequenceManager.over(self._client, self._span, self.config)

    def __len__(self) -> int:
        return len(self._span)

    def __iter__(self) -> Iterator[RemoteSequential]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> RemoteSequential:
        """Return one block, or several in a row, as a RemoteSequential.

        Raises IndexError outside of the span and UsageError for an empty or uneven slice.
        """
        span = take_blocks(self._span, index)
        blocks = RemoteSequential.over(self._client, span, self.config)
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
        of the L blocks.
        """
        hidden_BTH = inputs
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
        """Make a pass; or use a session where passes cannot be and nobody asks for more."""
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
            raise UsageError("rows are moved within a session; open one to use hypo_ids")
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
            self.adapters.check_session(active.adapter)
        with nullcontext(active) if active else self.open_session(hidden_BTH.shape[1]) as session:
            output = session.step(
                hidden_BTH.to("cpu"), prompts, hypo_ids, last_token_only=last_token_only
            )
        return output.to(hidden_BTH.device)

    def check_hidden(self, hidden_BTH: Tensor) -> None:
        """Raise UsageError unless the tensor can hold hidden states of this model."""
        if hidden_BTH.ndim != 3 or hidden_BTH.shape[2] != self._hidden_size:
            raise UsageError(
                f"hidden states are [rows, tokens, {self._hidden_size}], "
                f"got {list(hidden_BTH.shape)}"
            )
        if not hidden_BTH.is_floating_point():
            raise UsageError(f"hidden states are floating point numbers, got {hidden_BTH.dtype}")

    def take_recent_hops(self) -> list[Hop]:
        """Return the hops of stateless passes since the last call."""
        runner = self._client.passes
        return runner.wait_for(runner.remote.take_recent_hops())

    def take_failovers(self) -> list[PassFailover]:
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
        return PeerOptimizer(self._client.passes, adapter, kind, **options)

    def publish_adapter(self, adapter: LoraAdapter) -> str:
        """Let everybody use an adapter as it is now, by the digest that is returned.

        All peers that serve blocks keep it, those that come later as well, until it is withdrawn or
        the model is closed; up to five minutes longer where they do not hear of that. A later state
        of the same adapter, published for the same blocks, takes its place in the same way.

        Returns when peers for all blocks keep it, after ten minutes at the latest: the others go on
        getting it. Where no peer keeps it for some blocks, a warning names them. Raises UsageError
        for what is no LoraAdapter, and for one of the head, which is computed at the client; and
        what the peers say if none of them keeps it.
        """
        adapter = check_is_adapter(adapter, "publish_adapter()")
        if adapter.get_head() is not None:
            raise UsageError(
                "an adapter of the head cannot be published: every client has a head of its own"
            )
        version = adapter.take_version()
        published = version.publish()
        cut = published.cut(self._span)
        if cut is None:
            raise UsageError(f"the adapter changes nothing in blocks {self._span}")
        runner = self._client.passes
        publishing = runner.remote.publisher.publish(published, self._span, version.lineage)
        runner.wait_for(publishing)
        return cut.name.hex()

    def withdraw_adapter(self, digest: str) -> None:
        """Withdraw what `publish_adapter` has published: nobody finds it any more.

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
