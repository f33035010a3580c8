"""Which protocol versions this code speaks, and how two ends agree on one."""

from .errors import ErrorCode, RefusedError

MIN_VERSION = 1
MAX_VERSION = 8
CHAIN_VERSION = 2
"""From which version on a peer can push to another one."""

INT8_VERSION = 3
"""From which version on hidden states may travel in int8."""

HANDOFF_VERSION = 3
"""From which version on `Leaving` is understood, and `Mirror` with it."""

REVERSE_VERSION = 4
"""From which version on a peer that cannot be dialled may offer a connection, and another one push
over it; a next hop needs no endpoint then."""

PASS_VERSION = 4
"""From which version on a peer takes passes without a session, for fine-tuning."""

OPTIMIZER_VERSION = 5
"""From which version on a peer trains adapters itself where a client asks for it."""

PUBLISH_VERSION = 6
"""From which version on adapters are published as leaves, which peers fetch by digest."""

RECORDS_VERSION = 7
"""From which version on a peer tells others which announcements it knows."""

TRAINING_VERSION = 8
"""From which version on a peer can be a member of a training run."""

SOFTWARE = "shoal 0.1.0"


def agree_on_version(their_min: int, their_max: int) -> int:
    """Return the highest version that both ends speak.

    Raises RefusedError with BAD_VERSION and both ranges when there is none.

    >>> agree_on_version(1, 3)
    3
    """
    version = min(MAX_VERSION, their_max)
    if version < max(MIN_VERSION, their_min):
        raise RefusedError(
            ErrorCode.BAD_VERSION,
            f"this end speaks protocol versions {MIN_VERSION} to {MAX_VERSION}, "
            f"the other end {their_min} to {their_max}; update the older one",
        )
    return version
