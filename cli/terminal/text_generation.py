"""Text in, text out, over a swarm: what `generate` and `demo` share.

Imports nothing heavy: torch and transformers are loaded when a model is opened.
"""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from ...protocol.errors import ModelError, UsageError
from ...protocol.spans import Span
from .heavy_imports import importing_much

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ...client.model.causal_lm import DistributedCausalLM
    from ...client.passes.pass_failovers import PassFailover
    from ...client.routing.router import Hop
    from ...client.session.inference_session import InferenceSession
    from ...client.session.mending import Failover

# How many tokens before a new one its text may depend on: a letter of several bytes has up to
# four tokens, and some tokenizers drop the space in front of a first word.
_CONTEXT_TOKENS = 6

OnToken = Callable[[str], None]
"""Called for every new token with the text that it completes, often empty or half a word."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; greedy unless one of the four sampling fields is given."""

    max_new_tokens: int = 64
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    num_beams: int = 1

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is always taken."""
        given = (self.temperature, self.top_p, self.top_k, self.seed)
        return self.temperature == 0 or all(value is None for value in given)

    def to_arguments(self) -> dict[str, Any]:
        """Return arguments of transformers' generate()."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "num_beams": self.num_beams,
            "do_sample": not self.is_greedy,
        }
        if not self.is_greedy:
            named = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            arguments |= {name: value for name, value in named.items() if value is not None}
        return arguments


@dataclass(frozen=True)
class Generation:
    """A finished text: its new tokens, how long they took, and who computed them."""

    text: str
    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    route: tuple[Any, ...]
    failovers: tuple[Any, ...]
    is_complete: bool
    """Whether the model ended the text itself, before the limit."""

    @property
    def tokens_per_second(self) -> float:
        """The rate over the whole call, prompt included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


class TextAssembler:
    """Turns tokens into text one by one; a letter appears when all of its bytes are there."""

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
        """Return what is left, complete or not."""
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


@dataclass
class TokenStream:
    """What generate() hands its tokens to. Called in the thread that generates."""

    assembler: TextAssembler
    on_token: OnToken
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
            self._pass_on(self.assembler.add(token_id))

    def end(self) -> None:
        """Pass on what was held back."""
        rest = self.assembler.finish()
        if rest:
            self._pass_on(rest)

    def _pass_on(self, piece: str) -> None:
        self.pieces.append(piece)
        self.on_token(piece)


class TextModel:
    """A model over a swarm with its tokenizer, for use in a `with` block; made by `open`."""

    def __init__(self, model: "DistributedCausalLM", tokenizer: "PreTrainedTokenizerBase") -> None:
        self._model = model
        self._tokenizer = tokenizer

    @classmethod
    def open(
        cls,
        name: str,
        initial_peers: Sequence[str],
        dtype: str | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        **settings: Any,
    ) -> "TextModel":
        """Load a tokenizer (None: the model's) and the client's layers, and join the swarm.

        `settings` are those of `ClientConfig`; what is None is left as it is there.
        Raises ModelError when there is no tokenizer, else as from_pretrained does.
        """
        import_client()
        from ...client import AutoDistributedModelForCausalLM

        tokenizer = tokenizer or load_tokenizer(name)
        chosen = {name: value for name, value in settings.items() if value is not None}
        model = AutoDistributedModelForCausalLM.from_pretrained(
            name, initial_peers=list(initial_peers), torch_dtype=dtype, **chosen
        )
        return cls(model, tokenizer)

    @property
    def missing_blocks(self) -> tuple[Span, ...]:
        """The blocks that nobody serves, as far as was heard last."""
        return self._model.missing_blocks

    def __enter__(self) -> "TextModel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._model.close()

    def generate(
        self,
        prompt: str,
        sampling: Sampling,
        on_token: OnToken,
        on_session: "Callable[[InferenceSession], None]" = lambda session: None,
    ) -> Generation:
        """Generate what follows a prompt; `on_session` gets the session before the first token.

        Raises UsageError for a prompt without tokens or settings that cannot be, RouteError
        when blocks are missing. Beams show their text only at the end.
        """
        import torch

        ids_BT = self._tokenizer(prompt, return_tensors="pt").input_ids.long()
        if not prompt or ids_BT.shape[1] == 0:
            raise UsageError("the prompt is empty; give some text to continue")
        stream = TokenStream(TextAssembler(self._tokenizer, ids_BT[0].tolist()), on_token)
        has_beams = sampling.num_beams > 1
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        num_prompt_tokens = self._model.transformer.num_prompt_tokens  # of one that was learned
        max_length = num_prompt_tokens + ids_BT.shape[1] + sampling.max_new_tokens
        with self._model.inference_session(max_length=max_length) as session:
            on_session(session)
            started_at = time.perf_counter()
            output_BT = self._run(
                ids_BT, streamer=None if has_beams else stream, **sampling.to_arguments()
            )
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
                len(stream.token_ids) < sampling.max_new_tokens,
            )

    def _run(self, ids_BT: "Tensor", **arguments: Any) -> "Tensor":
        """Call generate(); what transformers finds wrong with the settings is a UsageError."""
        try:
            return cast("Tensor", self._model.generate(ids_BT, **arguments))
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(" ".join(str(error).split())) from error


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


def import_client() -> None:
    """Import the client, seconds of torch and transformers, and keep the libraries quiet."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with importing_much(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from huggingface_hub.utils import disable_progress_bars
        from transformers.utils import logging

        from ... import client  # noqa: F401 (its libraries warn while they are imported)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model; code that a model brings along is never run.

    Raises ModelError when the model, or its tokenizer, cannot be used.
    """
    import_client()
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    # First: transformers reads config.json for its tokenizer and would speak of that alone, or
    # stumble over what is damaged there.
    _check_model(name)
    if folder.is_dir() and not any(folder.glob("*token*")):
        raise ModelError(f"{name} has no tokenizer; add its files, such as tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the tokenizer of {name} cannot be loaded: {reason:.200}") from error


def _check_model(name: str) -> None:
    """Raise ModelError when a name stands for no model that the client can use."""
    from ...client.model.local_layers import load_config
    from ...models.checkpoints.checkpoint import Checkpoint

    load_config(Checkpoint.open(name))


def describe_route(route: "Sequence[Hop]") -> str:
    """Return a route for people, such as `…3kQpZa[0:4] → …8dFsWx[4:8]`."""
    return " → ".join(f"{tail_of(hop.peer.peer_id)}[{hop.span}]" for hop in route)


def describe_failover(failover: "Failover") -> str:
    """Return for people what happened to whom, who took over, and if the words may differ by it."""
    sentence = (
        f"failover at token {failover.position}: {_describe_loss(failover)}, "
        f"{describe_route(failover.replacements)} took over after {failover.seconds:.2f} s"
    )
    if failover.changed_weights is None:
        return sentence
    before, after = failover.lost.peer.weights, failover.changed_weights
    return f"{sentence}, with {after} weights instead of {before}: the text may differ"


def describe_pass_failover(update: int, failover: "PassFailover") -> str:
    """Return for people who was lost in an update of a fine-tuning run, and who took over."""
    heirs = describe_route(failover.replacements) or "several others"
    return f"failover at update {update}: {_describe_loss(failover)}, {heirs} took over"


def _describe_loss(failover: "Failover | PassFailover") -> str:
    lost = failover.lost
    return f"{tail_of(lost.peer.peer_id)}[{lost.span}] {failover.what_happened}"


def tail_of(peer_id: str) -> str:
    """Return the end of a peer id: the beginning is the same for all of them."""
    return f"…{peer_id[-6:]}"


def route_facts(route: "Sequence[Hop]") -> list[dict[str, str]]:
    """Return a route as plain JSON types."""
    return [_hop_facts(hop.peer.peer_id, hop.span) for hop in route]


def pass_failover_facts(failover: "PassFailover") -> dict[str, Any]:
    """Return a failover of a fine-tuning run as plain JSON types."""
    return {
        **_hop_facts(failover.lost.peer.peer_id, failover.lost.span),
        "reason": failover.reason,
        "replaced_by": route_facts(failover.replacements),
    }


def failover_facts(failover: "Failover") -> dict[str, Any]:
    """Return a failover as plain JSON types."""
    return {
        **_hop_facts(failover.lost.peer.peer_id, failover.lost.span),
        "reason": failover.reason,
        "position": failover.position,
        "seconds": round(failover.seconds, 4),
        "replayed_tokens": failover.num_replayed_tokens,
        "replaced_by": route_facts(failover.replacements),
        "changed_weights": failover.changed_weights,
    }


def _hop_facts(peer_id: str, span: Span) -> dict[str, str]:
    return {"peer_id": peer_id, "span": str(span)}
