"""Devices of published runs: the network of a node, NVLink domains that span nodes, and rates that are assumed."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.base.hardware.cluster import GB
from meshwright.errors import ConfigError
from meshwright.planner.calibration.replay import replay
from meshwright.planner.display.replay_text import show_replay
from tests.planner.test_published_fields import parsed
from tests.planner.test_published_runs import run_row


@pytest.mark.parametrize(
    ("stated", "per_device", "in_domain"),
    [
        ({"gpu": "GB200", "gpus_per_node": 4}, 100.0, 64),  # an NVL72 has 18 nodes
        ({"gpu": "GB200"}, 100.0, 64),
        ({"gpu": "A100-80", "gpus_per_node": 4}, 100.0, 4),
        ({"gpu": "V100", "gpus_per_node": 16, "precision": "fp16"}, 25.0, 16),
        ({"gpu": "A100-80"}, 50.0, 8),
    ],
)
def test_network_of_a_node_is_shared_by_its_devices(stated: dict[str, Any], per_device: float, in_domain: int) -> None:
    run = parsed(notes="3200 Gbps per node", **stated)
    assert run.job.cluster.inter_node.bandwidth == pytest.approx(per_device * GB)
    assert (run.job.cluster.devices_per_node, run.job.cluster.device_count) == (in_domain, 64)
    assumes_nodes = "nodes of 4 devices, which the run does not state" in run.derived
    assert assumes_nodes == (stated == {"gpu": "GB200"})


def test_devices_of_a_node_are_validated() -> None:
    with pytest.raises(ConfigError, match="gpus = 64 is not a multiple of gpus_per_node = 5"):
        parsed(gpus_per_node=5)
    with pytest.raises(ConfigError, match="gpus_per_node = 32 is out of range, expected from 1 to 16"):
        parsed(gpus_per_node=32)
    for text, kind in (("HSDP", "parameters"), ("HYBRID_SHARD_ZERO2", "gradients")):
        job = parsed(layout={"dp": 64, "sharding": text}, gpus_per_node=4, source="pytorch/torchtitan 2025").job
        assert (job.sharding, job.layout.shard, job.layout.replicate) == (kind, 4, 16)


def test_rates_of_a_device_that_are_assumed_are_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run_row(gpu="L40S", gpus=64), run_row(id="known")]))
    replayed = replay(path)
    note = "assumed rate: bf16 matmuls sustain 60% of the peak of l40s, which no run shows"
    assert [note in record["derived"] for record in replayed["records"]] == [True, False]
    console = Console(record=True, width=120, file=StringIO())
    show_replay(replayed, console)
    assert note in console.export_text()
