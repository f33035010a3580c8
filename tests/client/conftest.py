"""A swarm in the test itself: sessions that compute with transformers' own decoder layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.client.model.local_layers import load_config, load_local_layers
from shoal.client.session.inference_session import InferenceSession
from shoal.client.settings.client_config import ClientConfig
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.shells.step_cache import CACHE_NAME
from shoal.protocol.errors import UsageError
from shoal.protocol.ids import ModelId
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span


@dataclass(frozen=True)
class SentStep:
    """One step that a session took."""

    position: int
    num_rows: int
    num_tokens: int
    has_row_map: bool
    last_token_only: bool
    is_decoded: bool | None
    dtype: torch.dtype


class FakeSession:
    """The surface of InferenceSession over a DynamicCache; strict about its inputs."""

    def __init__(self, blocks: nn.Module, max_length: int) -> None:
        self._blocks = blocks
        self._cache = DynamicCache()
        self._num_rows: int | None = None
        self._closed = False
        self.max_length = max_length
        self.output_ids: Tensor | None = None
        self.num_prompt_tokens = 0
        self.sent: list[SentStep] = []

    # Calls of other threads and of callbacks are tested with the real session.
    def step(
        self, hidden: Tensor, prompts: None = None, hypo_ids: Tensor | None = None, **options: Any
    ) -> Tensor:
        return self.advance(hidden, hypo_ids, prompts, **options)

    def advance(
        self,
        hidden: Tensor,
        hypo_ids: Tensor | None = None,
        prompts: None = None,
        *,
        last_token_only: bool = False,
        is_decoded: bool | None = None,
    ) -> Tensor:
        assert not self._closed
        num_rows, num_tokens, _ = hidden.shape
        if self.position + num_tokens > self.max_length:
            raise UsageError(f"Maximum length exceeded: {self.position} + {num_tokens}")
        if self.position == 0:
            self._cache, self._num_rows = DynamicCache(), num_rows
        if self._num_rows != num_rows:
            raise UsageError(f"the session has {self._num_rows} rows, got {num_rows}")
        self.sent.append(
            SentStep(
                self.position,
                num_rows,
                num_tokens,
                hypo_ids is not None,
                last_token_only,
                is_decoded,
                hidden.dtype,
            )
        )
        if hypo_ids is not None:
            assert hypo_ids.shape == (num_rows,)
            assert hypo_ids.dtype == torch.int64
            self._cache.reorder_cache(hypo_ids)  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            output = self._blocks(
                inputs_embeds=hidden.float(), use_cache=True, **{CACHE_NAME: self._cache}
            ).last_hidden_state
        output = output.to(hidden.dtype)
        return output[:, -1:] if last_token_only else output

    @property
    def position(self) -> int:
        return self._cache.get_seq_length()

    @position.setter
    def position(self, value: int) -> None:
        self.rollback(value)

    @property
    def text_length(self) -> int:
        return max(0, self.position - self.num_prompt_tokens)

    def rollback(self, value: int) -> None:
        assert 0 <= value <= self.position
        assert not self._closed
        self._cache.crop(value - self.position)
        if self.output_ids is not None:
            self.output_ids = self.output_ids[:, : self.text_length]

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return InferenceSession  # for isinstance()

    @property
    def num_rows(self) -> int | None:
        return self._num_rows

    @contextmanager
    def beginning_anew(self) -> Iterator[None]:
        before = self._cache, self._num_rows
        self._cache, self._num_rows = DynamicCache(), None
        try:
            yield
        except BaseException:
            self._cache, self._num_rows = before
            raise

    def claim(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_is_idle(self) -> None:
        pass

    def generating(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def last_token_id(self) -> Tensor | None:
        return None if self.output_ids is None else self.output_ids[:, -1:]

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class FakePasses:
    """The surface of PassRunner: takes texts through the blocks of a session of their own."""

    def __init__(self, client: FakeClient) -> None:
        self._client = client
        self.spans: list[Span] = []
        self.dtypes: list[torch.dtype] = []

    def can_run(self, span: Span, hidden_BTH: Tensor) -> bool:
        return True

    def run(
        self,
        span: Span,
        hidden_BTH: Tensor,
        prompts_LBPH: Tensor | None = None,
        adapters: object = None,
    ) -> Tensor:
        assert prompts_LBPH is None
        self.spans.append(span)
        self.dtypes.append(hidden_BTH.dtype)
        return self._client.make_session(hidden_BTH.shape[1], span).step(hidden_BTH)


class FakeClient:
    """The surface of Client: opens sessions over the blocks of a transformers model."""

    def __init__(self, reference: Any) -> None:
        self._decoder = reference.model
        self.config = ClientConfig()
        view = SwarmView(ModelId("00" * 16), reference.config.num_hidden_layers, 0.0, ())
        self.swarm = SimpleNamespace(book=SimpleNamespace(view=view))
        self.passes = FakePasses(self)
        self.sessions: list[FakeSession] = []
        self.spans: list[Span] = []
        self.is_closed = False

    def open_session(
        self, max_length: int, span: Span, kv_format: str | None = None, adapter: object = None
    ) -> FakeSession:
        self.sessions.append(self.make_session(max_length, span))
        self.spans.append(span)
        return self.sessions[-1]

    def make_session(self, max_length: int, span: Span) -> FakeSession:
        blocks = copy.deepcopy(self._decoder)
        blocks.norm = nn.Identity()
        blocks.layers = blocks.layers[span.start : span.stop]
        for index, layer in enumerate(blocks.layers):
            layer.self_attn.layer_idx = index
        return FakeSession(blocks, max_length)

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class Pair:
    """One checkpoint as a distributed model over a fake swarm and as a transformers model."""

    model: DistributedCausalLM
    reference: Any
    client: FakeClient


def make_pair(tiny_model: Any, dtype: torch.dtype | None = None) -> Pair:
    checkpoint = Checkpoint.open(tiny_model.directory)
    config = load_config(checkpoint)
    client = FakeClient(tiny_model.reference)
    model = DistributedCausalLM(
        config,
        load_local_layers(checkpoint, dtype),
        client,  # pyright: ignore[reportArgumentType]
    )
    return Pair(model, tiny_model.reference, client)


@pytest.fixture
def pair(tiny_models: Any) -> Pair:
    """A plain tiny Llama, both ways."""
    return make_pair(tiny_models.get("llama"))


# The client's part differs in the head, the norm and the embedding's scale; what else families
# differ in is in the blocks, which are transformers' own here.
@pytest.fixture(params=["llama", "llama-tied", "gemma2", "gemma3"])
def any_pair(request: pytest.FixtureRequest, tiny_models: Any) -> Pair:
    """Every kind of client, both ways."""
    return make_pair(tiny_models.get(request.param))


@pytest.fixture
def bf16_pair(tiny_models: Any) -> Pair:
    """A plain tiny Llama whose local layers are bfloat16; the blocks stay float32."""
    return make_pair(tiny_models.get("llama"), torch.bfloat16)
