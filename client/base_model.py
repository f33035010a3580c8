"""What all kinds of models over a swarm share: opening, sessions, closing.

A model holds what is local: embedding, norm, head. Its blocks are on other machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..kernels.checkpoint import Checkpoint, CheckpointError
from ..protocol.errors import ModelError, UsageError
from ..protocol.ids import make_model_id
from ..protocol.spans import Span
from .client import Client, Connect, connect_over_network
from .config import ClientConfig, make_client_config, make_whole
from .generation import check_positions, check_token_ids, load_generation_config
from .inference_session import InferenceSession
from .local_layers import LocalLayers, load_config, load_local_layers, resolve_dtype
from .remote_blocks import RemoteSequential
from .remote_cache import RemoteCache
from .transformer import DistributedTransformer

# Shape suffixes: B rows, T tokens, H hidden size.


class DistributedModel(PreTrainedModel):
    """A model over a swarm, up to what comes of its hidden states.

    Owns its client: close() it, or use it in a `with`. All weights are frozen.
    """

    base_model_prefix = "transformer"
    main_input_name = "input_ids"

    def __init__(
        self,
        config: PreTrainedConfig,
        layers: LocalLayers,
        client: Client,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        super().__init__(config)
        blocks = RemoteSequential(client, Span(0, config.num_hidden_layers), config.hidden_size)
        self.transformer = DistributedTransformer(layers, blocks)
        self._add_head(layers, generation_config)
        self._client = client
        self.eval()

    def _add_head(self, layers: LocalLayers, generation_config: GenerationConfig | None) -> None:
        """Add what this kind of model does with hidden states."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        model: str | Path,
        *,
        initial_peers: Sequence[str] | str = (),
        torch_dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        connect: Connect = connect_over_network,
        **client_config: Any,
    ) -> Self:
        """Open a model directory or Hub id, join its swarm and return the model.

        Reads embedding, final norm and head; blocks are never downloaded. `torch_dtype` None or
        "auto" keeps the checkpoint's; `dtype` is the same under its newer name. `connect` makes
        the network: that of `peer.loopback_swarm` needs no initial peers. Everything else is a
        field of ClientConfig. Raises UsageError for an unknown argument, ModelError when
        the model cannot be used, DirectoryError when the swarm cannot be joined.
        """
        dtype = resolve_dtype(client_config.pop("dtype", torch_dtype))
        config = make_client_config(initial_peers, client_config)
        try:
            checkpoint = Checkpoint.open(model, revision)
        except CheckpointError as error:
            raise ModelError(str(error)) from error
        model_config = load_config(checkpoint)
        model_config.name_or_path = str(model)
        layers = load_local_layers(checkpoint, model_config, dtype)
        generation_config = load_generation_config(model, checkpoint)
        client = cls._join(checkpoint, model_config, config, connect)
        return cls(model_config, layers, client, generation_config)

    @staticmethod
    def _join(
        checkpoint: Checkpoint,
        model_config: PreTrainedConfig,
        config: ClientConfig,
        connect: Connect,
    ) -> Client:
        model_id = make_model_id(checkpoint.config, checkpoint.revision)
        num_blocks, hidden_size = model_config.num_hidden_layers, model_config.hidden_size
        return Client.join(model_id, num_blocks, hidden_size, config, connect)

    def close(self) -> None:
        """Leave the swarm; the model cannot be used afterwards."""
        self._client.close()

    def __deepcopy__(self, memo: object) -> Self:
        raise UsageError(
            "a model over a swarm cannot be copied: it holds connections; open another one with "
            "from_pretrained()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def missing_blocks(self) -> tuple[Span, ...]:
        """The blocks that nobody serves, as far as was heard last; asks nobody."""
        return self._client.missing_blocks

    def inference_session(
        self, *, max_length: int, kv_format: str | None = None
    ) -> AbstractContextManager[InferenceSession]:
        """Open a session of at most `max_length` tokens per row, for use in a `with`.

        Inside, calls of generate() and of the model continue one text: what was computed is
        remembered, and `session.position = n` rolls back to the first n tokens. `kv_format` says
        how peers keep keys and values, "float" or "int8"; None: as the model was opened. With
        "int8", only peers with int8 weights compute the same in any company. Raises UsageError for
        more tokens than the model has positions.
        """
        check_positions(make_whole("max_length", max_length), self.config)
        return self.transformer.h.inference_session(max_length=max_length, kv_format=kv_format)

    def use_session(
        self, session: InferenceSession | None
    ) -> AbstractContextManager[InferenceSession | None]:
        """Make an open session the one that calls continue, for use in a `with`."""
        return self.transformer.h.use_session(session)

    @property
    def active_session(self) -> InferenceSession | None:
        """The session that calls continue in this thread or task, or None."""
        return self.transformer.h.active_session

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("the model takes either input_ids or inputs_embeds")
        if input_ids is not None:
            ids_BT = check_token_ids(input_ids, self.config.vocab_size).to(self.device)
            # What comes back has the dtype of what is sent: 16 bits would round it needlessly.
            inputs_embeds = self.transformer.word_embeddings(ids_BT).float()
        hidden_BTH: Tensor = inputs_embeds  # pyright: ignore[reportAssignmentType]
        self.transformer.h.check_hidden(hidden_BTH)
        if hidden_BTH.shape[1] == 0:
            raise UsageError("the input is empty; it needs at least one token")
        return self.transformer.word_embeddings_layernorm(hidden_BTH)

    def _find_cache(self, past_key_values: object) -> RemoteCache | None:
        if past_key_values is None:
            session = self.active_session
            if session is None:
                return None
            session.check_is_idle()
            return RemoteCache(session)
        if not isinstance(past_key_values, RemoteCache):
            raise UsageError(
                f"past_key_values must come from this model, got {type(past_key_values).__name__};"
                " use a session to continue a text"
            )
        return past_key_values

    def save_pretrained(self, *args: object, **kwargs: object) -> None:
        """Refuse: the blocks are not here."""
        raise UsageError(
            "the blocks of this model are on other machines, so it cannot be saved; the model "
            f"directory it was opened from ({self.name_or_path!r}) is the model"
        )

    push_to_hub = save_pretrained  # pyright: ignore[reportAssignmentType]
