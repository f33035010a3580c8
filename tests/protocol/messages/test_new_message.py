"""`docs/new-message.md` is followed to the letter, in a copy of `protocol/`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "new-message.md").read_text(encoding="utf-8")
DECLARATION, VERSION, USE = re.findall(r"^```py\n(.*?)^```", PAGE, flags=re.M | re.S)

IMPORTS = """
import random, struct
from dataclasses import replace
from shoal.protocol.errors import LocalProtocolError, RemoteProtocolError
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.session import Throttled
from shoal.protocol.versions import MAX_VERSION, agree_on_version
from shoal.protocol.messages.codec import CODECS, decode_frame, encode_frame
from shoal.protocol.messages.codec import HEADER_BYTES

def refuses(act, error):
    try:
        act()
    except error:
        return True
    return False

"""

CHECKS = {
    "takes its kind and its version": """
        assert encode_frame(sent)[3] == 54
        assert agree_on_version(1, 99) == 9
    """,
    "is not sent out of bounds": """
        for wrong in ({"speed_fraction": 1.5}, {"speed_fraction": float("nan")}, {"seconds": -1.0},
                      {"reason": "x" * 513}, {"epoch": -1}, {"session": bytes(16)},
                      {"speed_fraction": 1.0}):
            assert refuses(lambda: encode_frame(replace(sent, **wrong)), LocalProtocolError), wrong
    """,
    "is not taken out of bounds": """
        body = CODECS[54].body.type
        for wrong in ({"speed_fraction": -0.5}, {"seconds": 1e13}, {"reason": "\\x1b[2J"},
                      {"speed_fraction": 1.0}):
            control = body(**{"speed_fraction": 0.5, **wrong}).SerializeToString()
            frame = bytearray(encode_frame(sent)[:HEADER_BYTES] + control)
            struct.pack_into("<I", frame, 52, len(control))
            assert refuses(lambda: decode_frame(bytes(frame)), RemoteProtocolError), wrong
    """,
    "survives fuzzing": """
        rng, frame, num_taken = random.Random(31), encode_frame(sent), 0
        for _ in range(5000):
            changed = bytearray(frame)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            try:
                message = decode_frame(bytes(changed[: rng.choice((None, rng.randrange(200)))]))
            except RemoteProtocolError:
                continue
            num_taken += 1
            assert decode_frame(encode_frame(message)) == message
        assert num_taken
    """,
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of `protocol/` in which the page has been followed."""
    root = tmp_path_factory.mktemp("extended")
    protocol = root / "shoal" / "protocol"
    shutil.copytree(ROOT / "protocol", protocol, ignore=shutil.ignore_patterns("__pycache__"))
    session = protocol / "messages" / "session.py"
    text = session.read_text(encoding="utf-8").replace(
        "    count_to,\n", "    count_to,\n    number_in,\n"
    )
    session.write_text(f"{text}\n\n{DECLARATION}", encoding="utf-8")
    versions = protocol / "versions.py"
    text = versions.read_text(encoding="utf-8").replace("MAX_VERSION = 8\n", VERSION)
    versions.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("check", CHECKS)
def test_message_of_the_page(extended: Path, check: str) -> None:
    steps = "\n".join(line.removeprefix(" " * 8) for line in CHECKS[check].splitlines())
    program = f"import sys; sys.path.insert(0, {str(extended)!r})\n{IMPORTS}{USE}{steps}"

    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr


def test_page_fits_on_a_screen() -> None:
    assert len(PAGE.splitlines()) <= 60
