"""hivemind's packages, of which only parts are imported, and all of them for who wants that."""

from __future__ import annotations

import subprocess
import sys

from shoal.protocol.net.libp2p.hivemind_packages import importing_hivemind


def test_directory_needs_no_tensors() -> None:
    program = (
        "import sys, shoal.protocol.net.dht.hivemind_directory\n"
        "print(*sorted({'torch', 'scipy', 'transformers', 'hivemind'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["hivemind"]


def test_programs_find_the_whole_of_hivemind() -> None:
    with importing_hivemind():
        import hivemind
        from hivemind.utils import MPFuture, get_logger

        averager = hivemind.DecentralizedAverager

    assert averager.__module__ == "hivemind.averaging.averager"
    assert hivemind.DHT.__module__ == "hivemind.dht.dht"
    assert MPFuture.__module__ == "hivemind.utils.mpfuture"
    assert get_logger.__module__ == "hivemind.utils.logging"
