"""The base class of all models over a swarm: opening, sessions, adapters, tuning, saving, closing.

A model holds the local parts: embedding, norm, head and trained parameters. Its blocks are on other
machines.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...protocol.errors import UsageError
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..session.inference_session import InferenceSession
from ..settings.client_config import make_whole
from ..training.active_adapters import DIGEST, AdapterChoice, is_digest, read_choice
from ..training.lora import LoraAdapter
from ..training.peer_optimizer import PeerOptimizer
from ..training.saving import (
    ADAPTER_NAME,
    leave_out_adapter,
    leave_out_of_state_dicts,
    load_fitting,
    read_settings,
    save_trained,
)
from ..training.tuning import DEEP, Tuning, lay_out_deep_prompts, make_deep_prompts, make_prompt
from .distributed_config import DistributedConfig, Join, note_origin
from .generation import load_generation_config
from .local_layers import (
    LocalLayers,
    check_others,
    check_padding,
    check_positions,
    check_token_ids,
    load_local_layers,
    resolve_dtype,
)
from .remote_blocks import RemoteSequenceManager, RemoteSequential, SwarmClient
from .remote_cache import RemoteCache, name_cache, one_cache

# Shape suffixes: B rows, T tokens, H hidden size, L blocks, P tokens of a prompt.

UNCHANGED: Any = object()
"""Default of `active_adapter`: keep the active adapter."""

_ADAPTER_IS_APART = "the active adapter is saved by its own save(folder)"


class DistributedTransformer(nn.Module):
    """The parts of the model under the names that PETALS gives them on every architecture."""

    def __init__(
        self, layers: LocalLayers, blocks: RemoteSequential, tuning: Tuning | None = None
    ) -> None:
        super().__init__()
        tuning = tuning or Tuning()
        self.word_embeddings = layers.embedding
        self.word_embeddings_layernorm = layers.embedding_norm or nn.Identity()
        self.position_embeddings = layers.positions
        self.prompt_embeddings: nn.Embedding | None = None
        self.intermediate_prompt_embeddings: nn.Embedding | None = None
        if tuning.mode is not None:
            self.prompt_embeddings = make_prompt(tuning.pre_seq_len, layers.embedding)
        if tuning.mode == DEEP:
            self.intermediate_prompt_embeddings = make_deep_prompts(
                tuning.pre_seq_len, len(blocks), layers.embedding.embedding_dim
            )
        self.h = blocks
        self.ln_f = layers.norm
        self._final_norm = (layers.final_norm,)  # not registered: it may be part of the head

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; transformers asks for it by this name."""
        return self.word_embeddings

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of a trained prompt before each text."""
        return 0 if self.prompt_embeddings is None else self.prompt_embeddings.num_embeddings

    @property
    def deep_prompts(self) -> Tensor | None:
        """Trained additions to the first inputs of each block, [L, 1, P, H], or None."""
        if self.intermediate_prompt_embeddings is None:
            return None
        return lay_out_deep_prompts(self.intermediate_prompt_embeddings.weight, len(self.h))

    def prepare(self, embeddings_BTH: Tensor, position: int) -> Tensor:
        """Return the input of the first block: at the beginning of a text, behind the prompt."""
        if self.prompt_embeddings is not None and position == 0:
            prompt_PH = self.prompt_embeddings.weight.to(embeddings_BTH.dtype)
            prompts_BPH = prompt_PH.expand(len(embeddings_BTH), -1, -1)
            embeddings_BTH = torch.cat([prompts_BPH, embeddings_BTH], dim=1)
        hidden_BTH = self.word_embeddings_layernorm(embeddings_BTH)
        if self.position_embeddings is None:  # as in most families
            return hidden_BTH
        return self.position_embeddings(hidden_BTH, position)

    @property
    def device(self) -> torch.device:
        """Where the local parts are."""
        return self.word_embeddings.weight.device

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RemoteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: RemoteCache | None = None,
        **others: object,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Return hidden states [B, T, H] of token ids [B, T] or embeddings [B, T, H].

        Continues `cache` or the active session; otherwise this is one stateless pass, in which rows
        may be padded on the right. `past_key_values` is the cache's older name in transformers.
        """
        given_cache = one_cache(cache, past_key_values)
        hidden_BTH, cache = self.run_text(
            input_ids, attention_mask, given_cache, inputs_embeds, others
        )
        hidden_BTH = self._final_norm[0](hidden_BTH)
        output = BaseModelOutputWithPast(last_hidden_state=hidden_BTH, **name_cache(cache))
        return output if return_dict is not False else output.to_tuple()

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("the model takes either input_ids or inputs_embeds")
        if input_ids is not None:
            ids_BT = check_token_ids(input_ids, self.h.config.vocab_size).to(self.device)
            # The answer has the dtype of the question: 16 bits would round it needlessly.
            inputs_embeds = self.word_embeddings(ids_BT).float()
        embeddings_BTH: Tensor = inputs_embeds  # pyright: ignore[reportAssignmentType]
        self.h.check_hidden(embeddings_BTH)
        if embeddings_BTH.shape[1] == 0:
            raise UsageError("the input is empty; it needs at least one token")
        return embeddings_BTH

    def run_text(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        given_cache: object,
        inputs_embeds: Tensor | None,
        others: Mapping[str, object],
        *,
        last_token_only: bool = False,
    ) -> tuple[Tensor, RemoteCache | None]:
        """Check the inputs of forward() and return the output of the last block, [B, T or 1, H].

        Continues the cache that is returned; None stands for a stateless pass. `others` are
        arguments that may be given as long as they change nothing.
        """
        embeddings_BTH = self._embed(input_ids, inputs_embeds)
        cache = self._find_cache(given_cache)
        run = partial(self._run_blocks, last_token_only=last_token_only)
        text_position = 0 if cache is None else cache.get_seq_length()
        check_others(others, text_position, embeddings_BTH.shape[:2], attention_mask)
        if cache is None:
            check_padding(attention_mask, embeddings_BTH.shape[:2])
            hidden_BTH = run(embeddings_BTH, None)
        else:
            hidden_BTH = cache.run(embeddings_BTH, attention_mask, run)
        if cache is not None and given_cache is None and input_ids is not None:
            _append_text(cache.session, text_position, input_ids.long())
        return hidden_BTH, cache

    def _run_blocks(
        self, embeddings_BTH: Tensor, cache: RemoteCache | None, *, last_token_only: bool
    ) -> Tensor:
        """Run a text behind its trained prompt; leave the outputs of the prompt out."""
        position = 0 if cache is None else cache.session.position
        num_prompt_tokens = self.num_prompt_tokens if position == 0 else 0
        num_tokens = num_prompt_tokens + embeddings_BTH.shape[1]
        check_positions(position + num_tokens, self.h.config)
        hidden_BTH = self.prepare(embeddings_BTH, position)
        deep_prompts = self.deep_prompts if position == 0 else None
        if cache is None:
            output_BTH = self.h(hidden_BTH, deep_prompts, last_token_only=last_token_only)
        else:
            self.h.check_adapter(cache.session)
            if position == 0:
                cache.session.num_prompt_tokens = num_prompt_tokens
            output_BTH = cache.step(hidden_BTH, deep_prompts, last_token_only=last_token_only)
        output_BTH = output_BTH.to(self.device)
        return output_BTH if last_token_only else output_BTH[:, num_prompt_tokens:]

    def _find_cache(self, given_cache: object) -> RemoteCache | None:
        if given_cache is not None:
            if not isinstance(given_cache, RemoteCache):
                raise UsageError(
                    "the cache must come from this model, got "
                    f"{type(given_cache).__name__}; use a session to continue a text"
                )
            if given_cache.is_bound:
                return given_cache
        session = self.h.active_session
        if session is None:
            return None
        session.check_is_idle()
        cache = RemoteCache() if given_cache is None else given_cache
        cache.bind(session)
        return cache


class DistributedModel(PreTrainedModel):
    """A model over a swarm, up to the final hidden states.

    Owns its client: close() it, or use it in a `with` block. The weights of the model directory are
    frozen; state_dict() holds only trained parameters, and weights that the caller made trainable.

    Adapters are active for one call, within a `with` block, or until further notice. Methods of
    transformers that would use peft are replaced. `config.active_adapter` is the folder or digest
    of the active adapter, if it has one; the next call opens another one that is assigned there.
    """

    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    """Tells Trainer that forward() takes `num_items_in_batch`."""

    _origin: DistributedConfig | None = None
    """What it was opened with; kept for `RemoteSequential(model.config)`."""

    _adapter_of_config: str | None = None
    """Value of `config.active_adapter` when it was last read."""

    def __init__(
        self,
        config: PreTrainedConfig,
        layers: LocalLayers,
        client: SwarmClient,
        generation_config: GenerationConfig | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(config)
        tuning = tuning or Tuning()
        config.tuning_mode, config.pre_seq_len = tuning.mode, tuning.pre_seq_len
        config.dht_prefix = client.swarm.book.view.model_id
        config.initial_peers = list(client.config.initial_peers)
        config.active_adapter = None
        span = Span(0, config.num_hidden_layers)
        blocks = RemoteSequential.over(RemoteSequenceManager.over(client, span, config), config)
        self.transformer = DistributedTransformer(layers, blocks, tuning)
        self._add_head(layers, generation_config)
        leave_out_of_state_dicts(self, layers.list_parameters())
        blocks.adapters.before_use = self._follow_config
        self._client = client
        self.eval()

    def _add_head(self, layers: LocalLayers, generation_config: GenerationConfig | None) -> None:
        """Add the modules behind the last block."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        model: str | Path,
        *,
        join_swarm: Join,
        initial_peers: Sequence[str] | str | None = (),
        torch_dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        trained: str | Path | None = None,
        **options: Any,
    ) -> Self:
        """Open a model directory or Hub id, join its swarm and return the model.

        Reads embedding, final norm and head; blocks are never downloaded. `torch_dtype` None or
        "auto" keeps the checkpoint's; `dtype` is its newer name. With `tuning_mode` "ptune" or
        "deep_ptune", prompts of `pre_seq_len` tokens are trainable; `trained`, a folder of
        save_pretrained(), sets both and loads the trained parameters. `active_adapter` is the
        folder of an adapter, its id on the Hub, or the digest of a published one. The classes of
        auto.py pass `join_swarm`. All other arguments are those of DistributedConfig.open(). Raises
        UsageError for an unknown argument, ModelError if the model cannot be used, DirectoryError
        if the swarm cannot be joined.
        """
        dtype = resolve_dtype(options.pop("dtype", torch_dtype))
        if trained is not None:
            options = {**read_settings(trained), **options}
        tuning = Tuning(options.pop("tuning_mode", None), options.pop("pre_seq_len", 0) or 0)
        configure, adapter = cls._take_options(options), options.pop("active_adapter", None)
        checkpoint, origin = DistributedConfig.open(
            model, join_swarm, initial_peers, revision, options
        )
        model_config = origin.model
        configure(model_config)
        tuning.check_fits(model_config)
        layers = load_local_layers(checkpoint, dtype)
        generation_config = load_generation_config(model, checkpoint)
        client = origin.join()
        try:
            opened = cls(model_config, layers, client, generation_config, tuning)
            opened._origin = origin
            note_origin(origin)
            if trained is not None:
                opened.load_trained(trained)
            if adapter is not None:
                opened.open_adapter(adapter)
        except BaseException:
            client.close()
            raise
        return opened

    @classmethod
    def _take_options(cls, options: dict[str, Any]) -> Callable[[PreTrainedConfig], None]:
        """Remove the options of this kind of model; return a function that notes them."""
        return lambda config: None

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
    def model(self) -> DistributedTransformer:
        """The same as `transformer`; PETALS and transformers call it so in some families."""
        return self.transformer

    @property
    def missing_blocks(self) -> tuple[Span, ...]:
        """The blocks that no peer serves, by the newest known announcements; sends no request."""
        return self._client.swarm.book.view.gaps

    def view_swarm(self) -> SwarmView:
        """Read the directory and return all valid announcements of the model."""
        return self._client.portal.run(self._client.swarm.book.refresh())

    def inference_session(
        self, *, max_length: int, kv_format: str | None = None
    ) -> AbstractContextManager[InferenceSession]:
        """Open a session of at most `max_length` tokens per row, for use in a `with` block.

        Within the block, calls of generate() and of the model continue one text: earlier tokens are
        not recomputed, and `session.position = n` rolls back to the first n tokens. `kv_format` is
        the format of the KV cache on the peers, "float" or "int8"; None: the model's. With "int8",
        only peers with int8 weights compute the same results independently of other sessions.
        Raises UsageError for more tokens than the model has positions.
        """
        check_positions(make_whole("max_length", max_length), self.config)
        return self.transformer.h.inference_session(max_length=max_length, kv_format=kv_format)

    def use_session(
        self, session: InferenceSession | None
    ) -> AbstractContextManager[InferenceSession | None]:
        """Make an open session the one that calls continue, within the `with` block."""
        return self.transformer.h.use_session(session)

    @property
    def active_session(self) -> InferenceSession | None:
        """The session that calls continue in this thread or task, or None."""
        return self.transformer.h.active_session

    def __call__(
        self, *inputs: Any, active_adapter: AdapterChoice = UNCHANGED, **options: Any
    ) -> Any:
        """Run the model; `active_adapter` applies to this call only."""
        keeps = active_adapter is UNCHANGED
        with nullcontext() if keeps else self.use_adapter(active_adapter):
            return super().__call__(*inputs, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        """Make an assigned adapter active: torch would only register it as a module."""
        if name == "active_adapter":
            self.set_adapter(value)
        else:
            super().__setattr__(name, value)

    @property
    def active_adapter(self) -> AdapterChoice:
        """The active LoraAdapter, the digest of a published one, a list with one per row, or None.

        An assigned adapter is active until further notice, outside of `use_adapter()`, and is part
        of the model: an optimizer, accelerate or Trainer with `model.parameters()` trains it. To
        train an adapter that is active for one call or a `with` block, pass `adapter.parameters()`.
        """
        return self.transformer.h.adapters.choice

    @active_adapter.setter
    def active_adapter(self, adapter: AdapterChoice) -> None:
        self.set_adapter(adapter)

    def set_adapter(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, adapter: AdapterChoice
    ) -> None:
        """Make an adapter active until further notice, and its matrices parameters of the model.

        None removes it.
        """
        adapter = read_choice(adapter)
        self.transformer.h.adapters.set_default(adapter)
        self._modules.pop(ADAPTER_NAME, None)
        part = _make_adapter_module(adapter)
        if part is not None:
            self.add_module(ADAPTER_NAME, part)
        # A digest can be written to config.json; a LoraAdapter could not.
        self.config.active_adapter = adapter if isinstance(adapter, str) else None
        self._adapter_of_config = self.config.active_adapter

    def use_adapter(self, adapter: AdapterChoice) -> AbstractContextManager[None]:
        """Make an adapter active within a `with` block, in this thread or task; None: no
        adapter.
        """
        return self.transformer.h.adapters.use(adapter)

    def load_adapter(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, folder: str | Path
    ) -> LoraAdapter:
        """Read an adapter that was saved by shoal or peft, and make it active until further notice.

        `folder` may also be an id on the Hub. Raises UsageError if it does not fit this model.
        """
        adapter = LoraAdapter.load(folder, self, self._origin and self._origin.hub)
        self.set_adapter(adapter)
        self.config.active_adapter = self._adapter_of_config = str(folder)
        return adapter

    def _follow_config(self) -> None:
        """Open an adapter that was assigned to `config.active_adapter`, as PETALS allows."""
        wanted: str | Path | None = getattr(self.config, "active_adapter", None)
        if wanted == self._adapter_of_config:
            return
        if wanted is None:
            self.set_adapter(None)
        else:
            self.open_adapter(wanted)

    def optimizer_at_peers(
        self, adapter: LoraAdapter, kind: str = "adamw", **options: Any
    ) -> PeerOptimizer:
        """See `RemoteSequential.optimizer_at_peers`."""
        return self.transformer.h.optimizer_at_peers(adapter, kind, **options)

    def publish_adapter(self, adapter: LoraAdapter) -> str:
        """See `RemoteSequential.publish_adapter`."""
        return self.transformer.h.publish_adapter(adapter)

    def withdraw_adapter(self, digest: str) -> None:
        """See `RemoteSequential.withdraw_adapter`."""
        self.transformer.h.withdraw_adapter(digest)

    def open_adapter(self, given: AdapterChoice | Path) -> None:
        """Make an adapter active, given as an object, a folder, an id on the Hub or a digest.

        Raises UsageError for anything else.
        """
        if not isinstance(given, str | Path) or is_digest(given):
            self.set_adapter(given)
        elif LoraAdapter.can_load(given):
            self.load_adapter(given)
        else:
            raise UsageError(
                f"active_adapter {str(given)!r:.80} is neither an existing folder nor an id on the "
                f"Hub (org/name) nor {DIGEST}"
            )

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: object,
    ) -> None:
        """Write the trained parameters, as safetensors and a description; load them with
        `trained=`.

        The base model is not written: its blocks are not here. An adapter that is part of the model
        is also written in PEFT format. An adapter that is active only for a `with` block has its
        own `save()`; a warning says so if it is in training. Raises UsageError if nothing is
        trained. Other arguments of transformers have no effect.
        """
        if options.get("push_to_hub"):
            self.push_to_hub()
        state = self.state_dict() if state_dict is None else state_dict
        others, adapter = leave_out_adapter(state), self._modules.get(ADAPTER_NAME)
        active = _make_adapter_module(self.active_adapter)
        is_in_training = active is not None and any(
            one.requires_grad for one in active.parameters()
        )
        is_left_out = is_in_training and len(others) == len(state)
        if not state:
            raise UsageError(
                "the blocks of this model are on other machines, so it cannot be saved; the model "
                f"directory it was opened from ({self.name_or_path!r}) is the model, and "
                + (_ADAPTER_IS_APART if is_left_out else "nothing was trained on top of it")
            )
        if is_left_out:
            warnings.warn(f"saved without the adapter: {_ADAPTER_IS_APART}", stacklevel=2)
        if is_main_process:
            settings = self._list_settings() if others else None
            save_trained(save_directory, self.config, settings, state)
            if isinstance(adapter, LoraAdapter):
                adapter.save(save_directory)

    def _list_settings(self) -> dict[str, object]:
        """Return the arguments of from_pretrained() that trained parameters depend on."""
        if self.config.tuning_mode is None:
            return {}
        return {
            "tuning_mode": self.config.tuning_mode,
            "pre_seq_len": self.config.pre_seq_len,
        }

    def load_trained(self, directory: str | Path) -> None:
        """Load what save_pretrained() wrote; the model must have been opened in the same way.

        Raises UsageError, and changes nothing, if it does not fit.
        """
        read_settings(directory, self.config)
        state = load_fitting(directory, leave_out_adapter(self.state_dict()))
        self.load_state_dict({**self.state_dict(), **state})

    def activation_checkpointing_enable(self, *args: object, **kwargs: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: activations of blocks are not stored here, and peers recompute them anyway.

        A Trainer with gradient checkpointing therefore runs as usual.
        """

    gradient_checkpointing_enable = activation_checkpointing_enable  # pyright: ignore[reportAssignmentType]

    def push_to_hub(self, *args: object, **kwargs: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """Raise UsageError: save the trained parameters to a folder, and upload that."""
        raise UsageError(
            "push_to_hub is not supported; use save_pretrained(folder) and upload that folder"
        )


def _make_adapter_module(choice: AdapterChoice) -> nn.Module | None:
    """Return a module that holds the LoraAdapters of a choice, or None."""
    if isinstance(choice, LoraAdapter):
        return choice
    listed = choice if isinstance(choice, list | tuple) else []
    own = [adapter for adapter in dict.fromkeys(listed) if isinstance(adapter, LoraAdapter)]
    return nn.ModuleList(own) if own else None


def _append_text(session: InferenceSession, position: int, ids_BT: Tensor) -> None:
    """Note tokens of the text that were sent at `position`, outside of generate().

    The text is unknown after unknown tokens, and with another number of rows.
    """
    text_BT = session.output_ids if position > 0 else ids_BT[:, :0]
    if text_BT is None or text_BT.shape[1] < position or len(text_BT) != len(ids_BT):
        session.output_ids = None
    else:
        text_BT = text_BT[:, :position].to(ids_BT.device)
        session.output_ids = torch.cat([text_BT, ids_BT], dim=1)
