"""Generates text with a model over a swarm, token by token: shared by `generate` and `demo`.

Imports nothing heavy: torch is loaded when text is generated.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...protocol.errors import UsageError
from .generation_options import Sampling
from .live_text import OnSession, OnToken

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ...client.model.causal_lm import DistributedCausalLM
    from ...client.session.inference_session import InferenceSession

# The text of a token may depend on this many tokens before it: a letter of several bytes has up
# to four tokens, and some tokenizers drop the space in front of a first word.
_CONTEXT_TOKENS = 6


@dataclass(frozen=True)
class Generation:
    """A finished text: its new tokens, their times, and the route that computed them."""

    text: str
    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    route: tuple[Any, ...]
    failovers: tuple[Any, ...]
    is_complete: bool
    """Whether the model ended the text itself, or a stop did, before the limit."""
    stop: str = ""
    """The stop that ended it; empty if none did."""

    @property
    def tokens_per_second(self) -> float:
        """The rate of the tokens behind the first, which waits for the prompt; 0 without any, and
        for beam search, whose tokens come together.
        """
        seconds, num_tokens = self.seconds - self.first_token_seconds, len(self.token_ids)
        return (num_tokens - 1) / seconds if seconds > 0 and num_tokens else 0.0


class Detokenizer:
    """Turns tokens into text one by one; a letter appears when all of its bytes have come."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._start = 0
        self._stop = len(self._ids)

    def add(self, token_id: int) -> str:
        """Take one more token and return the text that became complete with it."""
        self._ids.append(token_id)
        return self._take(is_last=False)

    def finish(self) -> str:
        """Return the rest of the text, complete or not."""
        return self._take(is_last=True)

    def _take(self, is_last: bool) -> str:
        known = self._decode(self._ids[self._start : self._stop])
        longer = self._decode(self._ids[self._start :])
        if len(longer) <= len(known) or (longer.endswith("\ufffd") and not is_last):
            return ""
        self._start, self._stop = self._stop, len(self._ids)
        return longer[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopFilter:
    """Passes a text on up to the first of some stops, and nothing that may be the beginning of one.

    >>> stops = StopFilter(["END"])
    >>> stops.add("the E"), stops.add("N"), stops.add("ough EN"), stops.add("D and more")
    ('the ', '', 'ENough ', '')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = ""
        """The stop at which the text ended, if it did."""

    @property
    def has_stopped(self) -> bool:
        """Whether a stop has come."""
        return bool(self.found)

    def add(self, piece: str) -> str:
        """Return what of the text so far can be shown."""
        if self.has_stopped:
            return ""
        text = self._held + piece
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        end, self.found = min(ends, default=(len(text) - self._count_held(text), ""))
        shown = text[:end]
        self._held = text[len(shown) :]
        return shown

    def finish(self) -> str:
        """Return what was held back for nothing."""
        return "" if self.has_stopped else self._held

    def _count_held(self, text: str) -> int:
        lengths = [
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ]
        return max(lengths, default=0)


@dataclass
class TokenStream:
    """The streamer of transformers' generate(), called in the thread that generates."""

    detokenizer: Detokenizer
    on_token: OnToken
    stops: StopFilter = field(default_factory=lambda: StopFilter([]))
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    _is_prompt: bool = True

    def put(self, value: Any) -> None:
        """Take new tokens; the first call brings the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            return
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        for token_id in value.flatten().tolist():
            self.token_ids.append(token_id)
            self._pass_on(self.stops.add(self.detokenizer.add(token_id)))

    def has_stopped(self, ids_BT: Any, scores: Any, **_: Any) -> Any:
        """Return for each row whether a stop has come: a stopping criterion of transformers."""
        import torch

        return torch.full((len(ids_BT),), self.stops.has_stopped)

    def end(self) -> None:
        """Pass on the rest of the text."""
        rest = self.stops.add(self.detokenizer.finish()) + self.stops.finish()
        if rest:
            self._pass_on(rest)

    def _pass_on(self, piece: str) -> None:
        self.pieces.append(piece)
        self.on_token(piece)


def generate_text(
    model: "DistributedCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    sampling: Sampling,
    on_token: OnToken,
    on_session: OnSession = lambda session: None,
) -> Generation:
    """Continue a prompt; `on_session` gets the session before the first token.

    Raises UsageError for a prompt without tokens or invalid settings, RouteError when blocks are
    missing. Beam search passes on its text only at the end.
    """
    ids_BT = tokenizer(prompt, return_tensors="pt").input_ids.long()
    if not prompt or ids_BT.shape[1] == 0:
        raise UsageError("the prompt is empty; give some text to continue")
    num_prompt_tokens = model.transformer.num_prompt_tokens  # of a soft prompt
    max_length = num_prompt_tokens + ids_BT.shape[1] + sampling.max_new_tokens
    with model.inference_session(max_length=max_length) as session:
        on_session(session)
        return continue_text(model, tokenizer, session, ids_BT, sampling, on_token)


def continue_text(
    model: "DistributedCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    session: "InferenceSession",
    ids_BT: "Tensor",
    sampling: Sampling,
    on_token: OnToken,
) -> Generation:
    """Continue a text in a session, which may hold its beginning; see `generate_text`."""
    import torch

    stream = TokenStream(
        Detokenizer(tokenizer, ids_BT[0].tolist()), on_token, StopFilter(sampling.stops)
    )
    has_beams = sampling.num_beams > 1
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    started_at = time.perf_counter()
    streamer: Any = None if has_beams else stream
    try:
        output_BT: Any = model.generate(
            ids_BT,
            session=session,
            attention_mask=torch.ones_like(ids_BT),  # of padding tokens in the prompt as well
            streamer=streamer,
            stopping_criteria=[stream.has_stopped],
            tokenizer=tokenizer if has_beams else None,  # for stop_strings
            **sampling.to_arguments(),
        )
    except UsageError:
        raise
    except ValueError as error:  # of transformers, which refuses some settings
        raise UsageError(" ".join(str(error).split())) from error
    seconds = time.perf_counter() - started_at
    if has_beams:
        stream.put(ids_BT)
        stream.put(output_BT[:, ids_BT.shape[1] :])
        stream.end()
    first_token_at = started_at + seconds if has_beams else stream.first_token_at
    return Generation(
        "".join(stream.pieces),
        stream.token_ids,
        seconds,
        (first_token_at or started_at) - started_at,
        session.hops,
        session.failovers,
        stream.stops.has_stopped or len(stream.token_ids) < sampling.max_new_tokens,
        stream.stops.found,
    )


def read_prompt(text: str) -> str:
    """Return a prompt from the command line or stdin; UsageError when it is empty or no text.

    In the locale "C", Python hands over bytes beyond ASCII as they are: they are taken for UTF-8.
    """
    try:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise UsageError("the prompt is not valid UTF-8") from error
    if not text.strip():
        raise UsageError("the prompt is empty; give some text to continue")
    return text
