"""`shoal generate --trace FILE`: records a session and writes the trace, however the text ends.

Imports nothing heavy: the path is checked before torch is loaded.
"""

import argparse
import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ...protocol.errors import UsageError
from ...protocol.net.clock import SystemClock

if TYPE_CHECKING:
    from ...client.session.inference_session import InferenceSession
    from ...client.trace.trace import Recorder, Trace
    from ...client.trace.trace_summary import Summary


def parse_trace_path(text: str) -> Path:
    """Read the name of a file for a trace.

    >>> parse_trace_path("trace.json").name
    'trace.json'
    """
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a file name; give one, such as trace.json"
        )
    return Path(text)


class TraceFile:
    """The file of one trace, written at the end of a `with` block; None records nothing.

    The file is left alone while there is nothing to write.
    """

    def __init__(self, path: Path | None) -> None:
        """Raise UsageError when the file cannot be written."""
        self.path = path
        self.is_written = False
        self._recorder: Recorder | None = None
        if path is not None:
            try:
                is_new = not path.exists()
                path.open("ab").close()
                if is_new:
                    path.unlink()
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
        recorded = self._make_trace()
        if self.path is None or recorded is None:
            return
        from ...client.trace.trace_file import make_trace_json

        try:
            written = json.dumps(make_trace_json(recorded))
            self.path.write_text(written, encoding="utf-8")
            self.is_written = True
        except OSError as failure:
            if error is None:  # otherwise the first error matters more
                raise self._make_error(failure) from failure

    def watch(self, session: "InferenceSession") -> None:
        """Record everything that a session does from now on."""
        if self.path is not None:
            from ...client.trace.trace import Recorder

            self._recorder = Recorder(SystemClock())
            session.record(self._recorder)

    def summarize(self) -> "Summary | None":
        """Return the summary of the trace; None without one."""
        from ...client.trace.trace_summary import summarize

        recorded = self._make_trace()
        return None if recorded is None else summarize(recorded)

    def _make_trace(self) -> "Trace | None":
        """Return what was recorded; None if that is nothing."""
        recorded = None if self._recorder is None else self._recorder.make_trace()
        return recorded if recorded and recorded.events else None

    def describe(self) -> list[str]:
        """Return the lines of the summary; none without a trace."""
        from ...client.trace.trace_summary import describe_summary

        summary = self.summarize()
        return [] if summary is None else describe_summary(summary)

    def describe_cut(self) -> list[str]:
        """Return the lines that name the incomplete trace of a cut text, and its summary."""
        if not self.is_written:
            return []
        return [f"the incomplete trace is in {self.path}", *self.describe()]

    def make_facts(self) -> dict[str, object]:
        """Return the summary for JSON, under `trace`; nothing without a trace."""
        from ...client.trace.trace_summary import make_summary_json

        summary = self.summarize()
        return {} if summary is None else {"trace": make_summary_json(summary)}

    def _make_error(self, error: OSError) -> UsageError:
        return UsageError(
            f"cannot write the trace to {self.path}: {error.strerror or error}; choose another "
            "--trace FILE"
        )
