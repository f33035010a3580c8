"""Assisted decoding: somebody guesses tokens, and one step of the model checks them all."""

from typing import Any

from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from ...protocol.errors import UsageError

# Shape suffixes: B rows, T tokens, V vocabulary.


class BoundedCandidates(CandidateGenerator):
    """Candidates of another generator, as far as the text may still grow.

    Some guess more: a session that holds just the text could not take them.
    """

    def __init__(self, generator: CandidateGenerator, max_length: int) -> None:
        """Raise UsageError when the generator wants what only the peers have."""
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
        """Tell the generator how good its guess was."""
        self._generator.update_candidate_strategy(input_ids, scores, num_matches)  # pyright: ignore[reportArgumentType]
