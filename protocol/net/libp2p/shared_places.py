"""Places for streams over libp2p: who may hold one more, by address and by peer id.

All that comes through one relay has its address. There the peer ids, which libp2p has proven, keep
strangers apart.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ...fair_share import Holder, check_room_for_client, name_holder
from ..p2pd.multiaddrs import split_multiaddr


def name_dialler(info: Any) -> Holder:
    """Return the name under which a stream is counted, by what p2pd says of it."""
    host, _ = split_multiaddr(str(info.addr))
    return Holder(name_holder(host), str(info.peer_id))


class SharedPlaces:
    """A number of places, and who holds them at present."""

    def __init__(self, num_places: int, of_what: str) -> None:
        self._num_places = num_places
        self._of_what = of_what
        self._holders: list[Holder] = []

    @contextmanager
    def hold(self, holder: Holder) -> Generator[None]:
        """Hold one place. Raises RefusedError for who holds more than is left for others."""
        check_room_for_client(holder, self._holders, self._num_places, self._of_what)
        self._holders.append(holder)
        try:
            yield
        finally:
            self._holders.remove(holder)
