"""A workload that follows docs/new-workload.md, on a peer in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from service_scene import Peer, assert_declined, make_session, with_peer

from shoal.protocol.errors import ErrorCode
from shoal.protocol.messages.session import Queued

HOW_TO = Path(__file__).resolve().parents[3] / "docs" / "new-workload.md"


@pytest.fixture
def echo() -> Any:
    """Return the workload that the how-to builds."""
    (code,) = re.findall(r"^```python\n(.*?)^```", HOW_TO.read_text(), flags=re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(code, HOW_TO.name, "exec"), names)
    return names["EchoWorkload"]()


def test_how_to_fits_on_a_page() -> None:
    assert len(HOW_TO.read_text().splitlines()) <= 60


@with_peer()
async def test_workload_takes_its_messages_beside_those_of_others(peer: Peer, echo: Any) -> None:
    peer.service.service.workloads = (*peer.service.service.workloads, echo)
    talk = await peer.open()
    said = Queued(make_session(7), 3, 0.5)

    assert await talk.ask(said) == said
    assert await talk.ask(said) == said

    assert peer.service.count_work() == {"sessions": 1, "passes": 0, "echoes": 2}


@with_peer()
async def test_message_that_no_workload_takes_ends_the_stream(peer: Peer) -> None:
    talk = await peer.greet()

    refusal = assert_declined(await talk.ask(Queued(make_session(7), 3, 0.5)), ErrorCode.BAD_FRAME)

    assert refusal.detail == "a client does not send Queued"
