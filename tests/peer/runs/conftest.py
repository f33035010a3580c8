"""The run that peers of a swarm train, and what one process comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import open_run, train_alone

from shoal.protocol.runs.training_run import TrainingRun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def run(folder: Path, request: pytest.FixtureRequest) -> TrainingRun:
    """A run of as many updates as the test's module says."""
    return open_run(folder, num_updates=getattr(request.module, "NUM_UPDATES", 4))[0]


@pytest.fixture(scope="module")
def quiet_digest(run: TrainingRun, folder: Path) -> str:
    """The digest of the weights that one process comes to."""
    return train_alone(run, open_run(folder)[1])
