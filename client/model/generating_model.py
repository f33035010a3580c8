"""transformers' generate() over sessions: computed tokens of a text stay on the peers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.utils.generic import ModelOutput

from ...protocol.errors import ShoalError, UsageError
from ..session.inference_session import InferenceSession, check_is_session
from ..training.active_adapters import AdapterChoice
from ..training.adapted_model import UNCHANGED
from .assisted import BoundedCandidates
from .base_model import DistributedModel
from .generation import GenerationPlan, NewTextStreamer, Settings, plan_generation, recall_text
from .local_layers import LocalLayers
from .remote_cache import RemoteCache

# Shape suffixes: B rows, T tokens.

_IS_ASSISTED = "is_assisted"
"""What tells prepare_inputs_for_generation() that it is called by assisted decoding."""


class GeneratingModel(DistributedModel, GenerationMixin):
    """A model over a swarm that generates text."""

    def _add_head(self, layers: LocalLayers, generation_config: GenerationConfig | None) -> None:
        self.lm_head = layers.head
        if generation_config is not None:
            self.generation_config = generation_config
        # A configuration saved during training may say otherwise; here there is no other way.
        self.generation_config.use_cache = True

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

        In a session (given, or active) the text of earlier calls is continued, not recomputed. The
        result is the input of this call and the tokens generated after it; without an input, only
        the latter. A call that fails or is interrupted leaves the session unchanged. Raises
        UsageError before anything is sent if the call cannot be completed, and CacheFullError
        before anything is computed if no peer could ever hold the text. The call may still fail
        later if other clients fill the peers' caches meanwhile. `active_adapter` applies to this
        call only.
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
                plan = self._plan(inputs, recall_text(session), generation_config, kwargs)
                return self._generate_in(session, plan, args, kwargs)
        plan = self._plan(inputs, None, generation_config, kwargs)
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
            prompt_length = session.num_prompt_tokens + plan.input_ids_BT.shape[1]
            session.rollback(min(session.position, prompt_length))
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
