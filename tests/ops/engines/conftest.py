"""Fixtures of the tests of engines: a SLURM cluster on this machine, and the digest of an undisturbed run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.ops.engines.engine_runs import train_undisturbed
from tests.ops.engines.slurm_cluster import SlurmCluster, missing_for_slurm


@pytest.fixture
def slurm():
    """Three nodes; the folder has a short name, because the path of a socket is at most 108 bytes long."""
    if reason := missing_for_slurm():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = SlurmCluster(Path(folder), 3)
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The digest of a run of 40 steps that no engine started and nothing disturbed."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))


def pytest_collection_modifyitems(items):
    """Daemons, queues and lost nodes take their time: a run under an engine has ten minutes."""
    for item in items:
        if item.get_closest_marker("engines"):
            item.add_marker(pytest.mark.timeout(600))
