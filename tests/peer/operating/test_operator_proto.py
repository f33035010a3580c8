"""The generated code of the operator's service is that of operator.proto."""

from __future__ import annotations

import re
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).parents[3] / "peer" / "operating"
VERSION = re.compile(r"^# Protobuf Python Version: .*|^    \d+,$", re.MULTILINE)


def test_generated_code_is_current(tmp_path: Path) -> None:
    arguments = [f"-Ishoal/peer/operating={FOLDER}"]
    arguments += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    assert protoc.main(["protoc", *arguments, "shoal/peer/operating/operator.proto"]) == 0

    for name in ("operator_pb2.py", "operator_pb2.pyi"):
        made = (tmp_path / "shoal" / "peer" / "operating" / name).read_text()
        kept = (FOLDER / name).read_text()
        assert VERSION.sub("", made) == VERSION.sub("", kept), "run `make proto`"
