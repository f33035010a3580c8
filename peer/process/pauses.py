"""Why a peer serves nothing at present, though it runs."""

import asyncio


class ServingPauses:
    """The reasons for which a peer pauses, by who has them; without any it serves.

    For a pause the peer drains and then rests: it stays in its swarm, announced as OFFLINE, and its
    blocks stay loaded.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self.wanted = asyncio.Event()
        """Set while there is a reason."""
        self.unwanted = asyncio.Event()
        """Set while there is none."""
        self.resting = asyncio.Event()
        """Set by the peer while it serves nothing because of them."""
        self.serving = asyncio.Event()
        """Set by the peer while streams and sessions may come."""
        self.unwanted.set()

    def __repr__(self) -> str:
        return f"<ServingPauses {self._reasons}, resting {self.resting.is_set()}>"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for people to read, such as `outside of its hours`."""
        return tuple(self._reasons.values())

    def note(self, source: str, reason: str | None) -> None:
        """Note the reason of one source, in place of the one that it had; None: it has none."""
        if reason is None:
            self._reasons.pop(source, None)
        else:
            self._reasons[source] = reason
        present, absent = self.wanted, self.unwanted
        if not self._reasons:
            present, absent = absent, present
        present.set()
        absent.clear()
