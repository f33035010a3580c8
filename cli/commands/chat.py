"""`shoal chat`: talk with a model over a swarm, line by line."""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...protocol.errors import ShoalError, UsageError
from ..options.quantities import parse_count
from ..options.shared_options import add_model_argument
from ..remote_models.generation_options import Sampling, add_generation_arguments, read_sampling
from ..remote_models.live_text import OnSession, OnToken, show_text
from ..remote_models.opening import OpenedModel, open_for_text
from ..remote_models.text_generation import Generation, continue_text, read_prompt
from ..terminal.interrupts import stop_on_sigterm
from ..terminal.terminal import Terminal
from ..terminal.text_printer import TextPrinter

if TYPE_CHECKING:
    from torch import Tensor

    from ...client.session.inference_session import InferenceSession

_HELP = "Ctrl-D or /quit ends the chat, /reset begins a new one."

_LEAST_SHARED_TOKENS = 8
"""Of a history that is continued in its session; with fewer, a call would be appended to it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal chat`."""
    add_model_argument(parser)
    add_generation_arguments(parser, 512)
    parser.add_argument(
        "--max-length", type=parse_count, default=4096, metavar="N",
        help="maximum number of tokens of the whole conversation (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(beams=1, delivery=None, standby=False, json=False)


def run(options: argparse.Namespace) -> int:
    """Answer lines of stdin until it ends; return 0. Ctrl-C ends only an answer."""
    output, notices = Terminal(sys.stdout), Terminal(sys.stderr)
    sampling = read_sampling(options)
    with stop_on_sigterm(is_ctrl_c_another=True):
        opened = open_for_text(options, notices)
        with opened.model:
            conversation = Conversation(opened, sampling, options.max_length)
            if not conversation.has_template:
                _tell(notices, "This model has no chat template: it continues what you write.")
            is_interactive = sys.stdin.isatty()
            if is_interactive:
                _tell(notices, _HELP)
            for line in _read_lines(output, notices, is_interactive):
                if line == "/quit":
                    break
                if line == "/reset":
                    conversation.reset()
                    continue
                try:
                    _answer(opened, conversation, line, output, notices)
                except ShoalError as error:
                    if not is_interactive:
                        raise
                    _tell(notices, f"{error}.", "yellow")
            conversation.reset()
    return 0


def _answer(
    opened: OpenedModel,
    conversation: "Conversation",
    line: str,
    output: Terminal,
    notices: Terminal,
) -> None:
    """Print what the model answers to a line; Ctrl-C ends that only, where people read."""
    printer = TextPrinter(output, notices, "")
    try:
        with output.ending_lines():
            generation = show_text(
                opened,
                printer,
                notices,
                lambda on_token, on_session: conversation.answer(line, on_token, on_session),
            )
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        _tell(notices, f"Stopped. {_HELP}")
        return
    if not generation.is_complete and notices.is_terminal:
        _tell(notices, "The answer was cut off (--max-new-tokens).")


def _read_lines(output: Terminal, notices: Terminal, is_interactive: bool) -> Iterator[str]:
    """Yield what is typed, or piped, line by line."""
    if is_interactive:
        with contextlib.suppress(ImportError):  # lines can be edited and repeated
            import readline  # noqa: F401
    while True:
        try:
            # Python would write it to a pipe, among the answers.
            line = input("> " if is_interactive and output.is_terminal else "").strip()
        except EOFError:
            if is_interactive:
                notices.print()
            return
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            notices.print()
            _tell(notices, _HELP)
            continue
        except UnicodeDecodeError as error:
            raise UsageError("a line on stdin is not valid in the locale's encoding") from error
        if line:
            yield line


def _tell(notices: Terminal, sentence: str, style: str = "dim") -> None:
    for line in notices.wrap(sentence):
        notices.print(notices.paint(line, style))


class Conversation:
    """The turns of one user and a model, in the words of its tokenizer's chat template.

    Without a template the turns are one text, which the model continues. All of it is given to
    every call, and a session keeps what peers have computed of it.
    """

    def __init__(self, opened: OpenedModel, sampling: Sampling, max_length: int) -> None:
        """It holds at most `max_length` tokens, or as many as the model has positions."""
        self._model, self._tokenizer = opened.model, opened.tokenizer
        self._sampling = sampling
        positions = getattr(self._model.config, "max_position_embeddings", None) or max_length
        self._max_length = min(max_length, positions)
        self._turns: list[dict[str, str]] = []
        self._sessions = contextlib.ExitStack()
        self._session: InferenceSession | None = None

    @property
    def has_template(self) -> bool:
        """Whether the model was made for conversations."""
        return self._tokenizer.chat_template is not None

    def answer(self, line: str, on_token: OnToken, on_session: OnSession) -> Generation:
        """Say something, and return what the model answers.

        An answer that Ctrl-C ends stays as far as it came. After an error nothing was said. Raises
        what `generate_text` does.
        """
        pieces: list[str] = []

        def take(piece: str) -> None:
            pieces.append(piece)
            on_token(piece)

        self._turns.append({"role": "user", "content": read_prompt(line)})
        try:
            ids_BT = self._encode()
            room = self._max_length - self._model.transformer.num_prompt_tokens - ids_BT.shape[1]
            if room < 1:
                raise UsageError(
                    f"the conversation has {ids_BT.shape[1]} tokens and is full at "
                    f"{self._max_length} (--max-length); begin a new one with /reset"
                )
            session = self._find_session(ids_BT)
            on_session(session)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about tokens of the last answer that are dropped
                sampling = self._sampling.with_at_most(room)
                return continue_text(self._model, self._tokenizer, session, ids_BT, sampling, take)
        except Exception:
            self._turns.pop()
            raise
        finally:
            if self._turns and self._turns[-1]["role"] == "user":
                self._turns.append({"role": "assistant", "content": "".join(pieces)})

    def reset(self) -> None:
        """Forget all turns, and free what peers keep of them."""
        self._turns.clear()
        self._session = None
        self._sessions.close()

    def _encode(self) -> "Tensor":
        if self.has_template:
            text = self._apply_template()
        else:
            text = "\n".join(
                "".join(turn["content"] for turn in self._turns[start : start + 2])
                for start in range(0, len(self._turns), 2)
            )
        encoded = self._tokenizer(
            text, add_special_tokens=not self.has_template, return_tensors="pt"
        )
        return encoded.input_ids.long()

    def _apply_template(self) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    self._turns, tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(
                f"the model's chat template refuses the conversation: {error!s:.120}"
            ) from error

    def _find_session(self, ids_BT: "Tensor") -> "InferenceSession":
        """Return the session that holds the beginning of a text, or a new one."""
        known_BT = None if self._session is None else self._session.output_ids
        if self._session is None or self._session.closed or not _begins_alike(known_BT, ids_BT):
            self._sessions.close()
            opening = self._model.inference_session(max_length=self._max_length)
            self._session = self._sessions.enter_context(opening)
        return self._session


def _begins_alike(known_BT: "Tensor | None", ids_BT: "Tensor") -> bool:
    if known_BT is None:
        return True
    parts = known_BT[:, :_LEAST_SHARED_TOKENS], ids_BT[:, :_LEAST_SHARED_TOKENS]
    return parts[0].shape[1] == _LEAST_SHARED_TOKENS and parts[0].tolist() == parts[1].tolist()
