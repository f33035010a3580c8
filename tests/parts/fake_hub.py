"""A Hub of models on this machine, for the Hub's own client: `HF_ENDPOINT` names it."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

READ_HUB_SETTINGS = """
import importlib, huggingface_hub.constants
importlib.reload(huggingface_hub.constants)
"""
"""The first lines of a program in a process of its own: the Hub's client reads its settings when it
is imported, which a warm process has done before (`warm_python.py`)."""

Revisions = Mapping[str, Path]
"""The folders of one repository by their commits, oldest first."""


class FakeHub(ThreadingHTTPServer):
    """Serves one repository, `org/model`; its `main` moves on when its config.json was sent.

    Weights are promised with their SHA-256 as large files are, and sent with a byte changed for the
    first `num_damaged` times.
    """

    daemon_threads = True

    def __init__(self, revisions: Revisions, num_damaged: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.revisions = revisions
        self.num_damaged = num_damaged
        self.main = next(iter(revisions))

    def make_environment(self, home: Path) -> dict[str, str]:
        """Return the variables of a process that knows no other Hub, and keeps its files here."""
        url = f"http://127.0.0.1:{self.server_port}"
        names = {"HOME": str(home), "HF_HOME": str(home / "hub")}
        return {**names, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def find_file(self, url_path: str) -> tuple[str, Path] | None:
        """Return the commit and the place of the file that a path of this site names."""
        match url_path.split("?")[0].split("/"):
            case ["", "org", "model", "resolve", revision, name]:
                commit = self.main if revision == "main" else revision
                path = self.revisions.get(commit, Path("/nowhere")) / name
                return (commit, path) if path.is_file() else None
            case _:
                return None

    def send(self, path: Path) -> bytes:
        """Return what a file holds, or almost."""
        content = path.read_bytes()
        if path.name == "config.json":
            self.main = list(self.revisions)[-1]
        if path.suffix == ".safetensors" and self.num_damaged > 0:
            self.num_damaged -= 1
            return content[:-1] + bytes([content[-1] ^ 1])
        return content


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        hub = cast(FakeHub, self.server)
        found = hub.find_file(self.path)
        if found is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        commit, path = found
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{digest if path.suffix == ".safetensors" else digest[:40]}"')
        self.send_header("Content-Length", str(path.stat().st_size))
        self.end_headers()
        if has_body:
            self.wfile.write(hub.send(path))

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving_hub(revisions: Revisions, num_damaged: int = 0) -> Iterator[FakeHub]:
    """Serve a repository while inside."""
    with FakeHub(revisions, num_damaged) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
