"""The plan of one call of generate(), made before anything is sent.

Holds no network and no layers: settings, plans, and what generate() is given for them.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from ...models.checkpoints.checkpoint import Checkpoint
from ...protocol.errors import ModelError, UsageError
from ...protocol.limits import MAX_BATCH_ROWS, MAX_SESSION_TOKENS
from ..settings.client_config import make_whole
from .local_layers import (
    NOT_RETURNED,
    Refusals,
    check_harmless,
    check_token_ids,
    describe_positions,
)

# Shape suffixes: B rows, T tokens, V vocabulary.

GENERATION_FILE = "generation_config.json"

_MIN_SHARED_TOKENS = 8
"""So many tokens of a text have to be given again, or all of an input with half as many: fewer may
be the same by chance."""

DEFAULT_NEW_TOKENS = 20
"""Default of transformers without max_new_tokens and max_length."""

_REFUSED: Refusals = {
    "use_cache": ((None, True), "the KV cache is on the peers and always used"),
    "cache_implementation": ((None,), "the KV cache is on the peers"),
    **dict.fromkeys(
        ("cache", "past_key_values"),
        ((None,), "pass a session instead: session=... continues its text"),
    ),
    "position_ids": ((None,), "positions follow from the session"),
    "inputs_embeds": ((None,), "pass token ids, or call the model itself with inputs_embeds"),
    "custom_generate": ((None,), "code from elsewhere is not run"),
    "assistant_early_exit": ((None,), "it needs the model's blocks on this machine"),
    "use_mtp": ((None, False), "it needs hidden states between blocks"),
    "guidance_scale": ((None, 1, 1.0), "guidance needs a second session; it is not supported"),
    "negative_prompt_ids": ((None,), "guidance needs a second session; it is not supported"),
    **NOT_RETURNED,
}
"""Arguments of transformers' generate() that cannot work here."""


_COUNTS = ("max_new_tokens", "max_length", "num_beams", "num_return_sequences")


class Settings:
    """The settings of one call: its arguments first, then the configurations in their order."""

    def __init__(
        self, arguments: Mapping[str, object], *configurations: GenerationConfig | None
    ) -> None:
        """Raises UsageError for a configuration that is something else."""
        for config in configurations:
            if config is not None and not isinstance(config, GenerationConfig):
                raise UsageError(
                    f"generation_config is a GenerationConfig, not {type(config).__name__}; "
                    "settings of one call can be passed to generate() by their names"
                )
        self._arguments = arguments
        self._configurations = configurations

    def get(self, name: str) -> object:
        """Return the first value that is not None, or None."""
        values = [self._arguments.get(name)]
        values += [getattr(config, name, None) for config in self._configurations if config]
        return next((value for value in values if value is not None), None)

    def get_count(self, name: str) -> int | None:
        """Return a whole number of at least 1, or None; UsageError for anything else."""
        value = self.get(name)
        if value is None:
            return None
        count = make_whole(name, value)
        if count < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        return count

    def make_counts(self) -> dict[str, int | None]:
        """Return the counts among the arguments as what transformers takes: Python's own."""
        return {name: self.get_count(name) for name in _COUNTS if name in self._arguments}


def load_generation_config(model: str | Path, checkpoint: Checkpoint) -> GenerationConfig | None:
    """Return the model's own defaults for generate(), or None if it has none."""
    local_file = checkpoint.directory / GENERATION_FILE
    if local_file.is_file():
        try:
            return GenerationConfig.from_pretrained(checkpoint.directory)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{local_file} is damaged: {error}") from error
    if Path(model).expanduser().is_dir():
        return None
    try:
        return GenerationConfig.from_pretrained(
            str(model),
            revision=checkpoint.revision,
            token=checkpoint.hub.token,
            cache_dir=checkpoint.hub.cache_dir,
        )
    except OSError:
        # Many models on the Hub have none; the defaults are in their config.json.
        return None


def check_settings(settings: Settings) -> None:
    """Raise UsageError for a setting that generate() cannot follow."""
    for name in _REFUSED:
        check_harmless(settings.get(name), name, _REFUSED, "generate()")


@dataclass(frozen=True)
class GenerationPlan:
    """One call of generate(), checked.

    `input_ids_BT` is the whole text so far. Its first `num_remembered` tokens are in the session's
    text, and the input of this call begins at `input_start`: behind them, unless a text was given
    again. `num_rows` counts sequences times beams; the text ends after at most
    `max_length` tokens per row. `num_prompt_tokens` of a trained prompt stand before it.
    `padding_mask_BT` is 0 where rows are padded, None where none is.
    """

    input_ids_BT: Tensor
    num_remembered: int
    input_start: int
    num_rows: int
    max_length: int
    has_beams: bool
    num_prompt_tokens: int = 0
    padding_mask_BT: Tensor | None = None

    @property
    def remembered_BT(self) -> Tensor | None:
        """What the session's text shares with this one, None where it is nothing."""
        return self.input_ids_BT[:, : self.num_remembered] if self.num_remembered else None

    @property
    def cached_length(self) -> int:
        """Tokens per row that the session has to hold: the last one is never sent."""
        return self.num_prompt_tokens + self.max_length - 1


def plan_generation(
    inputs: object,
    attention_mask: Tensor | None,
    remembered_BT: Tensor | None,
    settings: Settings,
    model_config: PreTrainedConfig,
    num_prompt_tokens: int = 0,
) -> GenerationPlan:
    """Return the plan of one call; raises UsageError and changes nothing."""
    check_settings(settings)
    if inputs is None and remembered_BT is None:
        bos = settings.get("bos_token_id")  # as in transformers
        inputs = torch.tensor([[bos]]) if isinstance(bos, int) else None
    input_ids_BT, num_remembered, input_start = _join_text(
        inputs, remembered_BT, model_config.vocab_size
    )
    mask_BT = _find_padding(input_ids_BT, input_start, attention_mask, settings)

    num_beams = settings.get_count("num_beams") or 1
    num_returned = settings.get_count("num_return_sequences") or 1
    num_rows = input_ids_BT.shape[0] * max(num_beams, num_returned)
    if num_rows > MAX_BATCH_ROWS:
        raise UsageError(
            f"{num_rows} rows (sequences times beams) are more than the {MAX_BATCH_ROWS} that "
            "one session may have; use fewer beams or prompts"
        )
    max_length = _plan_length(input_ids_BT.shape[1], settings, model_config, num_prompt_tokens)
    return GenerationPlan(
        input_ids_BT, num_remembered, input_start, num_rows, max_length, num_beams > 1,
        num_prompt_tokens, mask_BT,
    )  # fmt: skip


def _join_text(
    inputs: object, remembered_BT: Tensor | None, vocab_size: int
) -> tuple[Tensor, int, int]:
    """Return the whole text, how much of it is remembered, and where the input begins.

    An input that begins as the remembered text does is that text again, as a chat sends its
    history: it continues where both differ.
    """
    new_ids_BT = None if inputs is None else check_token_ids(inputs, vocab_size)
    if remembered_BT is None:
        if new_ids_BT is None or new_ids_BT.shape[1] == 0:
            raise UsageError("the prompt is empty and there is no text to continue")
        return new_ids_BT, 0, 0
    num_remembered = remembered_BT.shape[1]
    if new_ids_BT is None:
        return remembered_BT, num_remembered, num_remembered
    if new_ids_BT.shape[0] != remembered_BT.shape[0]:
        raise UsageError(
            f"the session's text has {remembered_BT.shape[0]} rows and the new input "
            f"{new_ids_BT.shape[0]}; set session.position = 0 to begin anew, or open another "
            "session"
        )
    remembered_BT = remembered_BT.to(new_ids_BT.device)
    num_shared = _count_shared(remembered_BT, new_ids_BT)
    if num_shared >= min(_MIN_SHARED_TOKENS, max(new_ids_BT.shape[1], _MIN_SHARED_TOKENS // 2)):
        if num_shared < num_remembered:
            warnings.warn(
                f"the input begins with {num_shared} tokens of the session's text, whose other "
                f"{num_remembered - num_shared} are dropped; to append all of it, put "
                "session.output_ids before it",
                stacklevel=6,  # the caller of generate()
            )
        return new_ids_BT, num_shared, 0
    return torch.cat([remembered_BT, new_ids_BT], dim=1), num_remembered, num_remembered


def _count_shared(first_BT: Tensor, second_BT: Tensor) -> int:
    """Return how many tokens all rows of two texts begin with."""
    length = min(first_BT.shape[1], second_BT.shape[1])
    differs_T = (first_BT[:, :length] != second_BT[:, :length]).any(0)
    return int(differs_T.nonzero()[0]) if bool(differs_T.any()) else length


def _find_padding(
    input_ids_BT: Tensor, input_start: int, mask_BT: Tensor | None, settings: Settings
) -> Tensor | None:
    """Return the mask of a text that is padded on the left, None for one that is not padded.

    Without a mask, padding tokens are padding, as in transformers. Raises UsageError for padding
    elsewhere.
    """
    new_ids_BT = input_ids_BT[:, input_start:]
    pad, eos = settings.get("pad_token_id"), settings.get("eos_token_id")
    hint = "pad on the left (tokenizer.padding_side = 'left')"
    if mask_BT is None:
        if not isinstance(pad, int) or (
            pad in eos if isinstance(eos, list | tuple) else pad == eos
        ):
            return None
        mask_BT = (new_ids_BT != pad).long()
        hint += f", or pass an attention_mask of ones if token {pad} is not meant as padding"
    if not isinstance(mask_BT, Tensor):
        raise UsageError(f"the attention mask must be a tensor, got {type(mask_BT).__name__}")
    if mask_BT.shape not in (input_ids_BT.shape, new_ids_BT.shape):
        raise UsageError(
            f"the attention mask has shape {list(mask_BT.shape)}, the token ids have "
            f"{list(new_ids_BT.shape)}"
        )
    if bool((mask_BT == 1).all()):
        return None
    if not bool(((mask_BT == 0) | (mask_BT == 1)).all()):
        raise UsageError("the attention mask may only contain 0 and 1")
    if bool((mask_BT[:, :-1] > mask_BT[:, 1:]).any()) or not bool(mask_BT[:, -1].all()):
        raise UsageError(f"only the beginning of a row can be padding here; {hint}")
    return mask_BT


def _plan_length(
    num_tokens: int, settings: Settings, model_config: PreTrainedConfig, num_prompt_tokens: int
) -> int:
    """Return how many tokens the text may have in the end, as transformers would."""
    max_positions = getattr(model_config, "max_position_embeddings", None) or MAX_SESSION_TOKENS
    max_positions = min(max_positions, MAX_SESSION_TOKENS) - num_prompt_tokens
    max_new_tokens = settings.get_count("max_new_tokens")
    max_length = settings.get_count("max_length")
    if max_new_tokens is not None:
        max_length = num_tokens + max_new_tokens
    elif max_length is None:
        max_length = max(num_tokens + 1, min(num_tokens + DEFAULT_NEW_TOKENS, max_positions))
    elif max_length <= num_tokens:
        raise UsageError(
            f"the text has {num_tokens} tokens already and max_length is {max_length}; "
            "max_new_tokens counts only new ones"
        )
    if max_length > max_positions:
        raise UsageError(
            f"{num_tokens} tokens and {max_length - num_tokens} new ones make {max_length}, "
            f"{describe_positions(model_config, max_positions)}"
        )
    return max_length


class NewTextStreamer(BaseStreamer):
    """Hands tokens on to a streamer, without the text that it has seen in earlier calls."""

    def __init__(self, streamer: BaseStreamer, num_remembered: int) -> None:
        self._streamer = streamer
        self._num_remembered = num_remembered
        self._is_first = True

    def put(self, value: Tensor) -> None:
        """Pass on new tokens; the first call brings the whole prompt [B, T]."""
        if self._is_first:
            value, self._is_first = value[:, self._num_remembered :], False
        self._streamer.put(value)

    def end(self) -> None:
        """Pass on that the text is complete."""
        self._streamer.end()


class BoundedCandidates(CandidateGenerator):
    """Candidates of another generator, as far as the text may still grow.

    Some guess more: a session that holds just the text could not take them.
    """

    def __init__(self, generator: CandidateGenerator, max_length: int) -> None:
        """Raise UsageError when the generator needs hidden states between blocks."""
        if generator.requires_model_outputs:
            raise UsageError(
                "generate() does not take this assistant: it needs hidden states between blocks; "
                "take an assistant_model that is a language model, or prompt_lookup_num_tokens"
            )
        self._generator = generator
        # The model itself adds a token behind the candidates.
        self._max_candidate_length = max_length - 1

    def get_candidates(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the text with candidates behind it [1, T], and their logits [1, T, V] if known."""
        ids_BT, logits_BTV = self._generator.get_candidates(input_ids, **kwargs)  # pyright: ignore[reportArgumentType]
        ids_BT = ids_BT[:, : max(self._max_candidate_length, input_ids.shape[1])]
        if logits_BTV is not None:
            logits_BTV = logits_BTV[:, : ids_BT.shape[1] - input_ids.shape[1]]
        return ids_BT, logits_BTV

    def update_candidate_strategy(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Report how many candidates matched."""
        self._generator.update_candidate_strategy(input_ids, scores, num_matches)  # pyright: ignore[reportArgumentType]
