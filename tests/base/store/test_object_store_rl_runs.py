"""A run of reinforcement learning in an object store is killed, and resumed on another machine to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright import train
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.mirror import mirror_root
from meshwright.base.store.object_store import ObjectStore
from meshwright.errors import MeshwrightError
from tests.kit.small_run import load_cpu_config, step_records

EXAMPLE = Path(__file__).parents[3] / "examples" / "rl.toml"
STEPS = 3


def config():
    sizes = ("--model.width=16", "--model.ffn=32", "--model.heads=2", "--model.kv_heads=2", "--model.layers=1")
    batch = ("--batch.global=8", "--batch.micro=4", "--rl.group_size=4", "--rl.policy=fixed", "--rl.staleness=1")
    saves = ("--checkpoint.every=1", "--checkpoint.seconds=0", "--checkpoint.mode=sync", "--launch.restarts=0")
    launch = ("--launch.device=cpu", "--launch.threads=1", "--launch.collective_timeout=60")
    return load_cpu_config(EXAMPLE, [*sizes, *batch, *saves, *launch], steps=STEPS, ranks=1)


def test_killed_run_trains_the_rollouts_of_an_undisturbed_one(s3, url, tmp_path, monkeypatch):
    undisturbed = train(config(), run=tmp_path / "run", quiet=True)
    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.forward:rank0:kill@step2")
    with pytest.raises(MeshwrightError):
        train(config(), run=url, quiet=True)
    monkeypatch.delenv("MESHWRIGHT_FAULT")
    shutil.rmtree(mirror_root(url))
    result = train(config(), run=url, quiet=True)
    assert result.digest == undisturbed.digest
    assert sorted(step_records(result.folder)) == list(range(STEPS))
    assert trained(result.folder) == trained(undisturbed.folder)
    names = ObjectStore(url).list_sizes("")
    assert any(name.startswith("rollouts/") for name in names)
    assert any(name.startswith("policies/") for name in names)


def trained(folder: Path) -> dict[int, list[int]]:
    """Step -> the groups that it trained on."""
    events = read_events(RunFolder(folder).events(0))
    return {event["step"]: [group for group, *_ in event["groups"]] for event in events if event["kind"] == "rollouts"}
