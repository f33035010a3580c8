"""Commands in advice: each runs as it is printed, once CODE and the like have their values."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.cli.main
from shoal.cli.main import _parse
from shoal.protocol.identity import Identity
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import make_public

ROOT = Path(shoal.cli.main.__file__).resolve().parents[1]
FOLDERS = ("cli", "client", "peer", "protocol", "models")
_COMMAND = re.compile(r"`(shoal (?:[a-z-]+ |doctor)[^`]*)`")
_VALUES = {
    "CODE": str(JoinCode(make_public(bytes(16)))),
    "ADDRESS": f"/ip4/192.0.2.1/tcp/4001/p2p/{Identity(bytes(32)).peer_id}",
}
_IN_A_SWARM = {"--join", "--initial-peers", "--new-swarm"}


def list_commands() -> Iterator[tuple[str, str]]:
    """Yield each command in a text of the source, and where; values that it is given are 0:4."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            if "`shoal " not in source:
                continue  # every worker reads all files, and few of them advise
            for text in list_texts(ast.parse(source)):
                for found in _COMMAND.finditer(text):
                    yield str(path.relative_to(ROOT)), found[1]


def list_texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts below a node that are no docstrings."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "0:4" for part in node.values)
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        for child in ast.iter_child_nodes(node):
            yield from list_texts(child)


COMMANDS = sorted(set(list_commands()))
assert COMMANDS, "no texts were found, and nothing would be tested"


@pytest.mark.parametrize(("where", "command"), COMMANDS)
def test_command_in_advice_can_be_run(where: str, command: str) -> None:
    words = shlex.split(command)[1:]

    is_in_a_swarm = words[0] not in ("serve", "doctor", "generate") or _IN_A_SWARM & set(words)
    assert is_in_a_swarm, f"{where} leaves out the swarm"
    _parse([_VALUES.get(word, word) for word in words])
