"""What a Python user touches: a causal language model whose blocks are on other machines.

It is a transformers model: generate() is transformers' own, over embedding, norm and head that
are local and blocks that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from ..kernels.checkpoint import Checkpoint, CheckpointError
from ..protocol.errors import ModelError, ShoalError, UsageError
from ..protocol.ids import make_model_id
from ..protocol.spans import Span
from .assisted import BoundedCandidates
from .client import Client, Connect, connect_over_network
from .config import ClientConfig, make_client_config, make_whole
from .generation import (
    GenerationPlan,
    NewTextStreamer,
    Settings,
    append_text,
    check_attention_mask,
    check_positions,
    check_token_ids,
    load_generation_config,
    plan_generation,
    recall_text,
)
from .inference_session import InferenceSession, check_is_session
from .local_layers import LocalLayers, load_config, load_local_layers, resolve_dtype
from .remote_blocks import RemoteSequential
from .remote_cache import RemoteCache
from .transformer import DistributedTransformer

# Shape suffixes: B rows, T tokens, H hidden size, V vocabulary.

_IS_ASSISTED = "is_assisted"
"""What tells prepare_inputs_for_generation() that it is called by assisted decoding."""


class DistributedCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model over a swarm.

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
        self.lm_head = layers.head
        if generation_config is not None:
            self.generation_config = generation_config
        # A configuration saved during training may say otherwise; here there is no other way.
        self.generation_config.use_cache = True
        self._client = client
        self.eval()

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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RemoteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return float32 logits [B, T, V] of token ids [B, T] or embeddings [B, T, H].

        Continues `past_key_values` or the active session; otherwise this is one stateless pass.
        `logits_to_keep` n > 0 returns the last n tokens' only. Gradients flow back to embeddings
        that ask for them, in a stateless pass. Nothing is sent if an input is refused with
        UsageError.
        """
        hidden_BTH = self._embed(input_ids, inputs_embeds)
        check_attention_mask(attention_mask)
        cache = self._find_cache(past_key_values)
        position = 0 if cache is None else cache.get_seq_length()
        check_positions(position + hidden_BTH.shape[1], self.config)
        hidden_BTH = self.transformer.add_positions(hidden_BTH, position)

        last_token_only = isinstance(logits_to_keep, int) and logits_to_keep == 1
        if cache is None:
            hidden_BTH = self.transformer.h(hidden_BTH, last_token_only=last_token_only)
        else:
            hidden_BTH = cache.step(hidden_BTH, last_token_only=last_token_only)
        if cache is not None and past_key_values is None and input_ids is not None:
            append_text(cache.session, position, input_ids.long())

        hidden_BTH = hidden_BTH.to(self.device)
        is_count = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits_BTV = self.lm_head(self.transformer.ln_f(hidden_BTH[:, kept]))
        output = CausalLMOutputWithPast(logits=logits_BTV, past_key_values=cache)
        return output if return_dict is not False else output.to_tuple()

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the arguments of the next forward(); the tokenizer of `stop_strings` is none."""
        kwargs.pop("tokenizer", None)
        if kwargs.pop(_IS_ASSISTED, False):
            # The first step of assisted decoding names the whole text, whatever is cached of it.
            input_ids = input_ids[:, kwargs["past_key_values"].get_seq_length() :]
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(input_ids, **kwargs)

    def _get_candidate_generator(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, **kwargs: Any
    ) -> BoundedCandidates:
        """Return who guesses tokens; transformers asks for it when assisted decoding begins."""
        generator = super()._get_candidate_generator(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        kwargs["model_kwargs"][_IS_ASSISTED] = True
        return BoundedCandidates(generator, kwargs["generation_config"].max_length)

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

    @torch.no_grad()
    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        session: InferenceSession | None = None,
        **kwargs: Any,
    ) -> Tensor | ModelOutput:
        """Generate text as transformers' generate() does, with the same arguments.

        In a session (given, or active) the text of earlier calls is continued, not recomputed:
        the result is the input of this call and what was generated after it, and without inputs
        only the latter. A call that fails or is interrupted leaves the session as it was. Raises
        UsageError before anything is sent if the call cannot be completed, and CacheFullError
        before anything is computed if no peer could ever hold the text. What others take of the
        peers' room meanwhile may still end it.
        """
        if "input_ids" in kwargs:
            if inputs is not None:
                raise UsageError("generate() takes either inputs or input_ids")
            inputs = kwargs.pop("input_ids")
        session = session if session is not None else self.active_session
        args = (generation_config, *args)
        if session is not None:
            check_is_session(session)
            with session.generating():
                plan = self._plan(inputs, recall_text(session), generation_config, kwargs)
                return self._generate_in(session, plan, args, kwargs)
        plan = self._plan(inputs, None, generation_config, kwargs)
        with self.transformer.h.open_session(plan.max_length) as session:
            return self._generate_in(session, plan, args, kwargs)

    def _plan(
        self,
        inputs: Tensor | None,
        remembered_BT: Tensor | None,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
    ) -> GenerationPlan:
        """Check a call of generate(), and take the arguments that are not for transformers."""
        settings = Settings(kwargs, generation_config, self.generation_config)
        mask = kwargs.pop("attention_mask", None)
        kwargs.update(settings.make_counts())
        return plan_generation(inputs, mask, remembered_BT, settings, self.config)

    def _generate_in(
        self,
        session: InferenceSession,
        plan: GenerationPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor | ModelOutput:
        """Run a plan in a session; on any failure the session is as before."""
        if plan.cached_length > session.max_length:
            raise UsageError(
                f"the text may grow to {plan.max_length} tokens and the session holds "
                f"{session.max_length}; open it with a larger max_length"
            )
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = NewTextStreamer(kwargs["streamer"], plan.num_remembered)
        # Peers keep the number of rows they were opened with: for others the text is sent again.
        is_of_other_rows = session.num_rows not in (None, plan.num_rows)
        with session.beginning_anew() if is_of_other_rows else nullcontext():
            return self._run_plan(session, plan, args, kwargs)

    def _run_plan(
        self,
        session: InferenceSession,
        plan: GenerationPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor | ModelOutput:
        if session.position == plan.input_ids_BT.shape[1]:
            # Everything is cached: the last token goes once more, for its logits.
            session.rollback(session.position - 1)

        position = session.position
        try:
            result = super().generate(  # pyright: ignore[reportAttributeAccessIssue]
                plan.input_ids_BT,
                *args,
                # Without a mask transformers would look for padding in the text.
                attention_mask=torch.ones_like(plan.input_ids_BT),
                past_key_values=RemoteCache(session),
                **kwargs,
            )
        except BaseException:
            self._undo(session, plan, position)
            raise
        return self._finish(session, plan, result)

    def _finish(self, session: InferenceSession, plan: GenerationPlan, result: Any) -> Any:
        sequences_BT = result if isinstance(result, Tensor) else result.sequences
        if plan.has_beams:
            # The beams' caches are not those of the sequences chosen in the end. The prompt's
            # are the same in all beams of a sequence; a next call computes the rest once more.
            session.rollback(min(session.position, plan.input_ids_BT.shape[1]))
        session.output_ids = sequences_BT
        new_BT = sequences_BT[:, plan.num_remembered :].clone()
        if isinstance(result, Tensor):
            return new_BT
        result.sequences = new_BT
        return result

    def _undo(self, session: InferenceSession, plan: GenerationPlan, position: int) -> None:
        """Roll back to before the call; close the session if even that fails."""
        remembered_BT = plan.input_ids_BT[:, : plan.num_remembered]
        try:
            if session.position != position:
                session.rollback(position)
        except ShoalError:
            session.close()
        # Rolling back shortened the text by what the call had not sent yet.
        session.output_ids = remembered_BT if plan.num_remembered else None

    def save_pretrained(self, *args: object, **kwargs: object) -> None:
        """Refuse: the blocks are not here."""
        raise UsageError(
            "the blocks of this model are on other machines, so it cannot be saved; the model "
            f"directory it was opened from ({self.name_or_path!r}) is the model"
        )

    push_to_hub = save_pretrained  # pyright: ignore[reportAssignmentType]


class AutoDistributedModelForCausalLM:
    """Finds the right class for a model directory or Hub id; never constructed itself."""

    @staticmethod
    def from_pretrained(
        model: str | Path,
        *,
        initial_peers: Sequence[str] | str = (),
        torch_dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        connect: Connect = connect_over_network,
        **client_config: Any,
    ) -> DistributedCausalLM:
        """Open a model and join its swarm: see DistributedCausalLM.from_pretrained()."""
        return DistributedCausalLM.from_pretrained(
            model,
            initial_peers=initial_peers,
            torch_dtype=torch_dtype,
            revision=revision,
            connect=connect,
            **client_config,
        )
