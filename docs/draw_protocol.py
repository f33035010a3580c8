"""Draws the tables of `protocol.md` from the code: `python docs/draw_protocol.py` rewrites them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from shoal.protocol import limits
from shoal.protocol.messages import codec as wire

DOCUMENT = Path(__file__).with_name("protocol.md")


def draw_messages() -> str:
    """Return the table of all messages."""
    rows = ["| kind | message | fields | meaning |", "| ---: | --- | --- | --- |"]
    for kind, codec in sorted(wire.CODECS.items()):
        message = codec.message
        fields = ", ".join(field.name for field in dataclasses.fields(message))
        summary = (message.__doc__ or "").strip().split("\n\n")[0]
        rows.append(f"| {kind} | `{message.__name__}` | {fields} | {' '.join(summary.split())} |")
    return "\n".join(rows)


def draw_bodies() -> str:
    """Return the protobuf part of each message, as protobuf writes a schema."""
    bodies = [codec.body for _, codec in sorted(wire.CODECS.items()) if codec.body is not None]
    return "\n\n".join(
        ["```proto", *(draw_body(body.descriptor) for body in bodies), "```"]
    ).replace("proto\n\n", "proto\n", 1)


def draw_body(described: Any, indent: str = "") -> str:
    """Return one body, with those of its records inside of it."""
    lines = [f"{indent}message {described.name} {{"]
    lines += [draw_body(record, f"{indent}  ") for record in described.nested_type]
    for field in described.field:
        name = field.Type.Name(field.type).removeprefix("TYPE_").lower()
        name = field.type_name.rpartition(".")[2] or name
        is_repeated = field.label == field.LABEL_REPEATED
        label = "repeated " if is_repeated else "optional " if field.proto3_optional else ""
        lines.append(f"{indent}  {label}{name} {field.name} = {field.number};")
    return "\n".join([*lines, f"{indent}}}"])


def draw_limits() -> str:
    """Return the table of bounds on what a stranger may send."""
    rows = ["| bound | value | on |", "| --- | ---: | --- |"]
    source = Path(limits.__file__).read_text()
    for name, summary in re.findall(r'^(MAX_\w+) = [^\n]*\n"""(.*?)"""', source, flags=re.M | re.S):
        value = getattr(limits, name)
        rows.append(f"| `{name}` | {value:,} | {' '.join(summary.split())} |")
    return "\n".join(rows)


TABLES = {
    "messages": draw_messages,
    "bodies": draw_bodies,
    "limits": draw_limits,
}


def draw(text: str) -> str:
    """Return the document with every table between its markers drawn anew."""
    for name, draw_table in TABLES.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n\n{draw_table()}\n\n{end}{tail}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(draw(DOCUMENT.read_text()))
