"""The causal language model that Python users open; its blocks are on other machines.

It is a transformers model: transformers' own generate() runs over a local embedding, norm and head,
and over remote blocks. Sessions keep the computed tokens of a text on the peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from ...models.shells.step_cache import CACHE_NAME
from ...protocol.errors import ShoalError, UsageError
from ..session.inference_session import InferenceSession, check_is_session
from ..training.active_adapters import AdapterChoice
from .base_model import UNCHANGED, DistributedModel
from .generation import (
    BoundedCandidates,
    GenerationPlan,
    NewTextStreamer,
    Settings,
    plan_generation,
)
from .local_layers import IGNORED, LocalLayers
from .padded_cache import PaddedCache
from .remote_cache import RemoteCache, name_cache, one_cache

# Shape suffixes: B rows, T tokens, H hidden size, V vocabulary.

_IS_ASSISTED = "is_assisted"
"""Argument that tells prepare_inputs_for_generation() of assisted decoding."""


class DistributedCausalLM(DistributedModel, GenerationMixin):
    """A causal language model over a swarm."""

    def _add_head(self, layers: LocalLayers, generation_config: GenerationConfig | None) -> None:
        self.lm_head = layers.head
        if generation_config is not None:
            self.generation_config = generation_config
        # A configuration saved during training may say otherwise; here there is no other way.
        self.generation_config.use_cache = True

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RemoteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        cache: RemoteCache | None = None,
        **others: object,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return float32 logits [B, T, V] of token ids [B, T] or embeddings [B, T, H].

        Continues `cache` or the active session; otherwise this is one stateless pass, in which rows
        may be padded on the right. With `labels` [B, T], the output has the loss of
        predicting each token from the tokens before it, except tokens labelled -100: the mean or,
        with `num_items_in_batch`, the sum divided by it. `logits_to_keep` n > 0 returns only the
        last n tokens. In a stateless pass, gradients flow to trained prompts, and to embeddings
        that require them. `others` may be given as long as they change nothing, as position_ids
        that are those of the tokens. Raises UsageError for invalid input, before anything is sent.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and given is not None:
            _check_labels(labels, given.shape[:2], self.config.vocab_size, logits_to_keep)
        is_count = isinstance(logits_to_keep, int)
        given_cache = one_cache(cache, past_key_values)
        hidden_BTH, cache = self.transformer.run_text(
            input_ids, attention_mask, given_cache, inputs_embeds, others,
            last_token_only=is_count and logits_to_keep == 1,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        normed_BTH = self.transformer.ln_f(hidden_BTH[:, kept])
        adapters = self.transformer.h.adapters
        change_BTV = adapters.change_logits(normed_BTH) if adapters.are_used else None
        logits_BTV = self.lm_head(normed_BTH, change_BTV)
        loss = None
        if labels is not None:
            loss = ForCausalLMLoss(logits_BTV, labels, self.config.vocab_size, num_items_in_batch)  # pyright: ignore[reportArgumentType]
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, **name_cache(cache))
        return output if return_dict is not False else output.to_tuple()

    @torch.no_grad()
    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        session: InferenceSession | None = None,
        active_adapter: AdapterChoice = UNCHANGED,
        **kwargs: Any,
    ) -> Tensor | ModelOutput:
        """Generate text as transformers' generate() does, with the same arguments.

        In a session (given, or active) the text of earlier calls is continued, not recomputed; an
        input that begins with that text, as a chat's history, continues where both differ. The
        result is the input of this call, or BOS at the beginning of a text without an input, and
        the tokens generated after it. Rows of different lengths are padded on the left, as for
        transformers; they take a session for each length, and cannot continue a given one.

        A call that fails or is interrupted leaves the session as it was, or with what both texts
        share. Raises UsageError before anything is sent if the call cannot be completed, and
        CacheFullError before anything is computed if no peer could ever hold the text. The call may
        still fail later if other clients fill the peers' caches meanwhile. `active_adapter` applies
        to this call only.
        """
        if active_adapter is not UNCHANGED:
            with self.use_adapter(active_adapter):
                return self.generate(inputs, generation_config, *args, session=session, **kwargs)
        if "input_ids" in kwargs:
            if inputs is not None:
                raise UsageError("generate() takes either inputs or input_ids")
            inputs = kwargs.pop("input_ids")
        session = session if session is not None else self.active_session
        args = (generation_config, *args)
        if session is not None:
            check_is_session(session)
            with session.generating():
                plan = self._plan(inputs, _recall_text(session), generation_config, kwargs)
                if plan.padding_mask_BT is not None:
                    raise UsageError("a session takes no padding; generate without a session")
                return self._generate_in(session, plan, args, kwargs)
        plan = self._plan(inputs, None, generation_config, kwargs)
        if plan.padding_mask_BT is not None:
            if kwargs.get("prefill_chunk_size") is not None:
                raise UsageError(
                    "prefill_chunk_size does not work with padded prompts; leave it out"
                )
            return self._generate_padded(plan, args, kwargs)
        with self.transformer.h.open_session(plan.cached_length + 1) as opened:
            return self._generate_in(opened, plan, args, kwargs)

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
        num_prompt_tokens = self.transformer.num_prompt_tokens
        return plan_generation(
            inputs, mask, remembered_BT, settings, self.config, num_prompt_tokens
        )

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
                f"the text may grow to {plan.cached_length + 1} tokens and the session holds "
                f"{session.max_length}; open it with a larger max_length"
            )
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = NewTextStreamer(kwargs["streamer"], plan.input_start)
        # Peers keep the number of rows they were opened with: for others the text is sent again.
        is_of_other_rows = session.num_rows not in (None, plan.num_rows)
        text_BT = session.output_ids if is_of_other_rows else plan.remembered_BT
        with session.beginning_anew() if is_of_other_rows else nullcontext():
            if session.text_length > plan.num_remembered:  # of a text given again
                session.rollback(session.num_prompt_tokens + plan.num_remembered)
            if session.text_length == plan.input_ids_BT.shape[1]:
                # Everything is cached: the last token goes once more, for its logits.
                session.rollback(session.position - 1)
            position = session.position
            try:
                result = super().generate(  # pyright: ignore[reportAttributeAccessIssue]
                    plan.input_ids_BT,
                    *args,
                    # Without a mask transformers would look for padding in the text.
                    attention_mask=torch.ones_like(plan.input_ids_BT),
                    **kwargs | name_cache(RemoteCache(session)),
                )
            except BaseException:
                self._undo(session, text_BT, position)
                raise
            return self._finish(session, plan, result)

    def _generate_padded(
        self, plan: GenerationPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | ModelOutput:
        """Run a plan whose rows are padded on the left."""

        def open_session(start: int) -> InferenceSession:
            return self.transformer.h.open_session(plan.cached_length + 1 - start)

        with PaddedCache(open_session) as cache:
            return super().generate(  # pyright: ignore[reportAttributeAccessIssue]
                plan.input_ids_BT,
                *args,
                attention_mask=plan.padding_mask_BT,
                **kwargs | name_cache(cache),
            )

    def _finish(self, session: InferenceSession, plan: GenerationPlan, result: Any) -> Any:
        sequences_BT = result if isinstance(result, Tensor) else result.sequences
        if plan.has_beams:
            # The beams' caches are not those of the sequences chosen in the end. The prompt's
            # are the same in all beams of a sequence; a next call computes the rest once more.
            prompt_length = session.num_prompt_tokens + plan.input_ids_BT.shape[1]
            session.rollback(min(session.position, prompt_length))
        session.output_ids = sequences_BT
        new_BT = sequences_BT[:, plan.input_start :].clone()
        if isinstance(result, Tensor):
            return new_BT
        result.sequences = new_BT
        return result

    def _undo(self, session: InferenceSession, text_BT: Tensor | None, position: int) -> None:
        """Roll back to before the call; close the session if even that fails."""
        try:
            if session.position != position:
                session.rollback(position)
        except ShoalError:
            session.close()
        # Rolling back shortened the text by what the call had not sent yet.
        session.output_ids = text_BT

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the arguments of the next forward(), without the tokenizer of `stop_strings`."""
        kwargs.pop("tokenizer", None)
        if kwargs.pop(_IS_ASSISTED, False):
            # The first step of assisted decoding names the whole text, whatever is cached of it.
            input_ids = input_ids[:, kwargs[CACHE_NAME].get_seq_length() :]
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(input_ids, **kwargs)

    def _get_candidate_generator(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, **kwargs: Any
    ) -> BoundedCandidates:
        """Return the source of candidate tokens; called when assisted decoding begins."""
        generator = super()._get_candidate_generator(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        kwargs["model_kwargs"][_IS_ASSISTED] = True
        return BoundedCandidates(generator, kwargs["generation_config"].max_length)


class SpeculativeCausalLM(DistributedCausalLM):
    """Generates the same texts as without the small model, in fewer rounds through the swarm."""

    small_model: PreTrainedModel

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, model: Any, *, small_model: PreTrainedModel, **options: Any
    ) -> Self:
        """Open a model that is assisted by `small_model`, a local model with the same tokenizer.

        All other arguments are those of DistributedModel.from_pretrained().
        """
        opened = super().from_pretrained(model, **options)
        # Not registered as a module: its weights are not trained or saved here.
        object.__setattr__(opened, "small_model", small_model)
        return opened

    def generate(self, *args: Any, **kwargs: Any) -> Tensor | ModelOutput:
        """See DistributedCausalLM.generate(); one row at a time, a limit of transformers."""
        return super().generate(*args, **{"assistant_model": self.small_model, **kwargs})


def _recall_text(session: InferenceSession) -> Tensor | None:
    """Return the text [B, T] that a session continues, or None at its beginning.

    The text is `session.output_ids`, which the session shortens when it is rolled back. Usually
    it is one token longer than the cache: the last token of a call is sent by the next one.
    Raises UsageError when the session is closed or holds unknown tokens.
    """
    if session.closed:
        raise UsageError("the session is closed; open a new one")
    text_BT = session.output_ids
    num_known = 0 if text_BT is None else text_BT.shape[1]
    if num_known < session.text_length:
        raise UsageError(
            f"the session holds {session.text_length} tokens per row, of which {num_known} are "
            "known; set session.output_ids to all of them, or open a new session"
        )
    return text_BT if num_known else None


def _check_labels(
    labels_BT: Tensor, shape: Sequence[int], vocab_size: int, logits_to_keep: object
) -> None:
    """Raise UsageError unless labels are token ids of this vocabulary, or ignored."""
    if not isinstance(labels_BT, Tensor) or tuple(labels_BT.shape) != tuple(shape):
        given = list(labels_BT.shape) if isinstance(labels_BT, Tensor) else type(labels_BT).__name__
        raise UsageError(f"labels must have the shape of the inputs, {list(shape)}, not {given}")
    if labels_BT.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"labels must be whole numbers, not {labels_BT.dtype}")
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        raise UsageError("labels need the logits of all tokens; leave logits_to_keep out")
    is_wrong_BT = (labels_BT != IGNORED) & ((labels_BT < 0) | (labels_BT >= vocab_size))
    if bool(is_wrong_BT.any()):
        row, token = is_wrong_BT.nonzero()[0].tolist()
        raise UsageError(
            f"label {int(labels_BT[row, token])} of row {row}, token {token} is out of range: "
            f"labels are token ids from 0 to {vocab_size - 1}, or {IGNORED} for tokens without a "
            "loss"
        )
