"""`shoal generate --trace FILE`: what was taken down goes to a file, however the text ends.

Imports nothing heavy: the path is checked before torch is loaded.
"""

import importlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from ..protocol.errors import UsageError
from ..protocol.net.clock import SystemClock


class TraceFile:
    """Where one trace goes, for use in a `with` block; None: nothing is taken down."""

    def __init__(self, path: Path | None) -> None:
        """Raise UsageError when the file cannot be written."""
        self._path = path
        self._recorder: Any = None
        if path is not None:
            try:
                path.open("ab").close()  # what is there stays until there is something new
            except OSError as error:
                raise self._make_error(error) from error

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps(self._make_json()), encoding="utf-8")
        except OSError as failure:
            if error is None:  # or else what ended the text is the news
                raise self._make_error(failure) from failure

    def watch(self, session: Any) -> None:
        """Have everything taken down that a session does from now on."""
        if self._path is not None:
            client_trace = importlib.import_module("..client.trace", __package__)
            self._recorder = client_trace.Recorder(SystemClock())
            session.record(self._recorder)

    def summarize(self) -> Any:
        """Return the summary of a text that is complete, None where nothing was taken down."""
        if self._recorder is None:
            return None
        return _import_summary().summarize(self._recorder.make_trace())

    def _make_json(self) -> dict[str, Any]:
        if self._recorder is None:  # it never came to a session
            return {"traceEvents": []}
        trace_file = importlib.import_module("..client.trace_file", __package__)
        return trace_file.make_trace_json(self._recorder.make_trace())

    def _make_error(self, error: OSError) -> UsageError:
        return UsageError(
            f"the trace cannot be written to {self._path}: {error.strerror or error}; "
            "give --trace another FILE"
        )


def describe_summary(summary: Any) -> list[str]:
    """Return the summary of a trace for people, a few lines of at most 80 columns."""
    return _import_summary().describe_summary(summary)


def make_summary_json(summary: Any) -> dict[str, Any]:
    """Return the summary of a trace as plain JSON types."""
    return _import_summary().make_summary_json(summary)


def _import_summary() -> Any:
    return importlib.import_module("..client.trace_summary", __package__)
