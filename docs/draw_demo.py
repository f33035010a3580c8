"""Record `shoal demo` in a terminal of 80 columns and write its last screen to docs/demo.svg.

.venv/bin/python -P docs/draw_demo.py
"""

from __future__ import annotations

import os
import pty
import re
import sys
from html import escape
from pathlib import Path

TARGET = Path(__file__).with_name("demo.svg")
COMMAND = [sys.executable, "-P", "-m", "shoal.cli", "demo"]

NUM_COLUMNS = 80
CELL_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 19, 18

COLOURS = {"2": "#8b949e", "31": "#ff7b72", "32": "#7ee787", "36": "#79c0ff"}
STYLE = """
  text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #e6edf3; white-space: pre }
"""


def record() -> str:
    """Return everything that the demo writes to a terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(NUM_COLUMNS)}
        os.execv(COMMAND[0], COMMAND)
    written = b""
    while True:
        try:
            part = os.read(terminal, 2**16)
        except OSError:  # what Linux says when the last process has closed the terminal
            break
        if not part:
            break
        written += part
    if os.waitpid(process, 0)[1] != 0:
        sys.exit("the demo failed:\n" + written.decode())
    return written.decode()


def list_lines(written: str) -> list[str]:
    """Return what is left of each line: text after a lone carriage return overwrites the line."""
    lines = written.replace("\r\n", "\n").split("\n")
    kept = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines]
    return "\n".join(kept).strip("\n").split("\n")


def draw_line(line: str, y: float) -> str:
    """Return one line as SVG text; the escape sequences of colour become attributes.

    >>> draw_line("a \\x1b[1;31mred\\x1b[0m", 10)
    '<text x="18" y="10">a <tspan fill="#ff7b72" font-weight="bold">red</tspan></text>'
    """
    spans: list[str] = []
    attributes = ""
    for part in re.split(r"(\x1b\[[\d;]*m)", line):
        if part.startswith("\x1b"):
            codes = part[2:-1].split(";")
            attributes = "".join(f' fill="{COLOURS[code]}"' for code in codes if code in COLOURS)
            attributes += ' font-weight="bold"' * ("1" in codes)
        elif part:
            text = escape(part, quote=False)
            spans.append(f"<tspan{attributes}>{text}</tspan>" if attributes else text)
    return f'<text x="{MARGIN}" y="{y:g}">{"".join(spans)}</text>'


def draw(lines: list[str]) -> str:
    """Return the screen as an SVG picture."""
    width = round(2 * MARGIN + NUM_COLUMNS * CELL_WIDTH)
    height = 2 * MARGIN + LINE_HEIGHT * len(lines)
    drawn = [
        draw_line(line, MARGIN + LINE_HEIGHT * (number + 0.75)) for number, line in enumerate(lines)
    ]
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" '
            f'viewBox="0 0 {width} {height}">',
            "<title>shoal demo: a peer is killed, and the story goes on</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *drawn,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(draw(list_lines("$ shoal demo\n" + record())), encoding="utf-8")
    print(f"Wrote {TARGET}.")
