"""Options from a TOML file, whose keys are the names of the options; the command line wins."""

import argparse
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...protocol.errors import UsageError

_OPTION = "--config"


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --config."""
    parser.add_argument(
        _OPTION, type=Path, metavar="FILE",
        help="TOML file with options, by their names without the dashes, such as `kv-memory = "
        '"4G"`, and `model`; what is given on the command line wins',
    )  # fmt: skip


def apply_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Make what the file of --config says the defaults of a parser, but for what `words` give.

    Raises UsageError for a file that cannot be read, unknown keys and wrong values.
    """
    options = parser._actions  # pyright: ignore[reportPrivateUsage]
    path = _find_path(words)
    if path is None or not any(_OPTION in action.option_strings for action in options):
        return
    values = {key.replace("_", "-"): value for key, value in _read(path).items()}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    actions = _list_actions(parser)
    for name, value in values.items():
        if name not in actions:
            near = difflib.get_close_matches(name, actions, 1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{path}: there is no option {name!r}{advice}")
        action = actions[name]
        rivals = _list_rivals(parser, action)
        if clash := [rival for rival in rivals - {name} if values.get(rival)]:
            raise UsageError(f"{path}: {name} and {clash[0]} exclude each other")
        if given.isdisjoint(f"--{rival}" for rival in rivals):
            _set_default(parser, action, value, f"{path}: {name}")


def _find_path(words: Sequence[str]) -> Path | None:
    """Return the file of --config, if it is given as an option should be."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(_OPTION, type=Path)
    try:
        return finder.parse_known_args(words)[0].config
    except argparse.ArgumentError:
        return None  # the parser of the command says what is wrong


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({_OPTION}): {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML file, where texts need quotes: {error}") from error


def _list_actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options that a file may have, by name, and the model."""
    return {
        name.removeprefix("--"): action
        for action in parser._actions  # pyright: ignore[reportPrivateUsage]
        for name in action.option_strings or [action.dest]
        if name not in (_OPTION, "-h", "--help") and action.help is not argparse.SUPPRESS
    }


def _list_rivals(parser: argparse.ArgumentParser, action: argparse.Action) -> set[str]:
    """Return the names under which an option, or one that excludes it, may be given."""
    rivals = [action]
    for group in parser._mutually_exclusive_groups:  # pyright: ignore[reportPrivateUsage]
        members = group._group_actions  # pyright: ignore[reportPrivateUsage]
        rivals += members if action in members else []
    return {name.removeprefix("--") for rival in rivals for name in rival.option_strings}


def _set_default(
    parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str
) -> None:
    """Let an option have the value of a file, read as on the command line."""
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise UsageError(f"{where} is true or false, not {value!r}")
        is_pair = isinstance(action, argparse.BooleanOptionalAction)
        if is_pair or value:
            parser.set_defaults(**{action.dest: value if is_pair else action.const})
        return
    texts = value if isinstance(value, list) else [value]
    takes_many = isinstance(action.default, list)
    if not all(isinstance(text, str | int | float) for text in texts) or (
        len(texts) != 1 and not takes_many
    ):
        raise UsageError(f"{where} is one value, as on the command line, not {value!r}")
    read = [_convert(action, str(text), where) for text in texts]
    if takes_many:
        read = [[part for one in read for part in (one if isinstance(one, list) else [one])]]
    parser.set_defaults(**{action.dest: read[0]})
    if not action.option_strings:
        action.nargs, action.required = argparse.OPTIONAL, False


def _convert(action: argparse.Action, text: str, where: str) -> Any:
    try:
        value = action.type(text) if callable(action.type) else text
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from error
    if action.choices is not None and value not in action.choices:
        raise UsageError(f"{where} is one of {', '.join(map(str, action.choices))}, not {text}")
    return value
