"""The cache object that transformers' generate() uses; the KV cache itself stays on the peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...models.shells.step_cache import CACHE_NAME
from ...protocol.errors import UsageError
from ..session.inference_session import InferenceSession
from .local_layers import check_attention_mask

# Shape suffixes: B rows, T tokens, H hidden size.


class RemoteCache(Cache):
    """Represents the KV caches that the peers hold for one session.

    generate() asks for its length, permutes its rows for beam search and crops it. Permutations are
    sent with the next step; cropping rolls the session back. It counts only tokens of the text,
    since transformers does not know of a soft prompt before it. The session is owned by its opener.
    A cache that is created without a session binds to the session that is active when a model first
    receives it.
    """

    def __init__(self, session: InferenceSession | None = None) -> None:
        super().__init__(layers=[])
        self._bound_session: InferenceSession | None = None
        self._row_map: Tensor | None = None
        if session is not None:
            self.bind(session)

    def __repr__(self) -> str:
        return f"<RemoteCache of {self.get_seq_length()} tokens>"

    @property
    def is_bound(self) -> bool:
        """Whether the cache is bound to a session."""
        return self._bound_session is not None

    def bind(self, session: InferenceSession) -> None:
        """Bind to a session, as its newest `past_key_values`."""
        self._bound_session = session
        session.past_key_values = self

    @property
    def session(self) -> InferenceSession:
        """The session of this cache; raises UsageError before it is bound."""
        if self._bound_session is None:
            raise UsageError("these past_key_values belong to no session yet")
        return self._bound_session

    def run(
        self,
        hidden_BTH: Tensor,
        mask_BT: Tensor | None,
        run: Callable[[Tensor, RemoteCache], Tensor],
    ) -> Tensor:
        """Run the next tokens; raises UsageError where the mask hides some, before that."""
        check_attention_mask(mask_BT)
        return run(hidden_BTH, self)

    def step(
        self, hidden_BTH: Tensor, prompts: Tensor | None = None, *, last_token_only: bool
    ) -> Tensor:
        """Send hidden states of the next tokens through the session; return the output.

        A single token after the prefix counts as decoded: peers compute it like generated tokens,
        so that a text is the same whether one call produces it or several.
        """
        with self.session.claim():
            output = self.session.advance(
                hidden_BTH.to("cpu"),
                self._row_map,
                prompts,
                last_token_only=last_token_only,
                is_decoded=hidden_BTH.shape[1] == 1 and self.session.position > 0,
            )
        self._row_map = None
        return output

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of the text, per row, in the peers' caches."""
        return self.session.text_length if self.is_bound else 0

    def update_seen(self, new_seen: int) -> None:
        """Do nothing; exists for scripts of PETALS."""

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the maximum number of tokens of the text per row."""
        return self.session.max_length - self.session.num_prompt_tokens

    # The name of the same question in earlier releases of transformers 5.
    get_max_cache_shape = get_max_length

    @property
    def is_compileable(self) -> bool:
        """False: a network cannot be compiled."""
        return False

    @property
    def is_croppable(self) -> bool:
        """True: a rollback leaves no trace."""
        return True

    @property
    def is_linear(self) -> list[bool]:
        """One False: a rule for caches of linear attention alone counts none of the others."""
        return [False]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue the prefix of row `beam_idx[i]`, from the next step on."""
        rows = beam_idx.to("cpu", torch.int64)
        if self._row_map is not None:
            rows = self._row_map[rows]
        is_identity = torch.equal(rows, torch.arange(len(rows)))
        self._row_map = None if is_identity else rows

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens at the end: -n drops n, 0 drops none.

        A positive number is the length to keep, as in earlier releases of transformers 5.
        """
        if tokens_to_remove > 0:
            self._rollback(min(tokens_to_remove, self.get_seq_length()))
        elif tokens_to_remove < 0:
            self._rollback(self.get_seq_length() + tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens."""
        self._rollback(0)
        self._row_map = None

    def _rollback(self, num_tokens: int) -> None:
        """Keep so many tokens of the text; a trained prompt before it stays."""
        with self.session.claim():
            self.session.rollback(num_tokens and num_tokens + self.session.num_prompt_tokens)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise UsageError: the number of rows of a session is fixed."""
        raise UsageError(
            "the rows of a session cannot be multiplied; open a new session with more rows"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raise UsageError: the number of rows of a session is fixed."""
        raise UsageError("rows of a session cannot be dropped; open a new session with fewer rows")


def one_cache(cache: object, past_key_values: object) -> object:
    """Return the cache that a model is called with, by its name or by the older one."""
    if cache is not None and past_key_values is not None:
        raise UsageError("cache and past_key_values are two names of one argument; pass one")
    return past_key_values if cache is None else cache


def name_cache(cache: RemoteCache | None) -> dict[str, Any]:
    """Return a cache by the name that transformers gives it."""
    return {CACHE_NAME: cache}


RemotePastKeyValues = RemoteCache
"""Its name in PETALS."""
