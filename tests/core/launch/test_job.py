"""Under torchrun a job needs as many ranks as its layout; the error names torchrun's option and a layout that fits."""

from __future__ import annotations

import pytest

from meshwright.base.config import load_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.launch.job import check_world_size, make_job
from meshwright.errors import ConfigError

SMALL = ["--data.kind=synthetic", "--batch.global=16"]


@pytest.mark.parametrize(
    ("options", "world_size", "environment", "hint"),
    [
        (["--layout.replicate=2"], 4, {}, "try torchrun --nproc-per-node 2 or --layout.replicate=4"),
        (["--layout.replicate=2"], 3, {}, "or a layout that fits 3 ranks (batch.global = 16 is not divisible"),
        (
            ["--layout.replicate=4"],
            2,
            {"LOCAL_WORLD_SIZE": "1"},
            "try torchrun --nproc-per-node 2 or --layout.replicate=2",
        ),
        (
            ["--layout.replicate=1", "--layout.tensor=2"],
            3,
            {},
            "try torchrun --nproc-per-node 2 or a layout that fits 3 ranks",
        ),
    ],
)
def test_torchrun_world_size_that_does_not_fit_the_layout_is_refused(tmp_path, options, world_size, environment, hint):
    job = make_job(load_config(overrides=[*SMALL, *options]), RunFolder(tmp_path))
    with pytest.raises(ConfigError, match=f"torchrun started {world_size} ranks, and the layout") as refused:
        check_world_size(job, world_size, environment)
    assert hint in str(refused.value)
    assert "--ranks" not in str(refused.value)


def test_thousands_of_ranks_on_one_host_are_refused(tmp_path):
    config = load_config(overrides=["--data.kind=synthetic", "--batch.global=100000"], ranks=100_000)
    with pytest.raises(ConfigError, match="100,000 ranks on one host; expected at most 1,024, or try more hosts"):
        make_job(config, RunFolder(tmp_path))
