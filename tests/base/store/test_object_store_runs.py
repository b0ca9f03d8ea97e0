"""A run in an object store is killed, resumed on another machine, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.s3_server import BUCKET
from meshwright import report, train
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.mirror import mirror_root, resolve_run
from meshwright.base.store.object_store import ObjectStore
from meshwright.core.checkpoint.inspect import list_rows, verify_rows
from meshwright.errors import ConfigError, MeshwrightError
from tests.kit.small_run import small_config, step_records

STEPS = 6


def config(*overrides: str):
    options = ("--checkpoint.every=2", "--checkpoint.seconds=0", "--checkpoint.mode=sync", "--launch.restarts=0")
    return small_config(*options, *overrides, steps=STEPS, ranks=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    return train(config(), run=tmp_path_factory.mktemp("local") / "run", quiet=True).digest


@pytest.mark.parametrize("fault", ["step.forward:rank1:kill@step5", "save.before_publish:rank0:kill@step4"])
def test_killed_run_resumes_on_another_machine_to_the_same_bits(s3, url, monkeypatch, undisturbed, fault):
    monkeypatch.setenv("MESHWRIGHT_FAULT", fault)
    with pytest.raises(MeshwrightError):
        train(config(), run=url, quiet=True)
    monkeypatch.delenv("MESHWRIGHT_FAULT")
    shutil.rmtree(mirror_root(url))
    result = train(config(), run=url, quiet=True)
    assert result.digest == undisturbed
    assert sorted(step_records(result.folder)) == list(range(STEPS))

    shutil.rmtree(mirror_root(url))
    history = RunHistory(RunFolder(resolve_run(url)))
    history.update()
    assert [attempt.outcome for attempt in history.attempts] == ["failed", "complete"]
    assert history.checkpoints[-1].state == "published"
    assert "6 of 6 steps" in report(url).to_markdown()
    assert all(row["damage"] == [] for row in verify_rows(resolve_run(url), None))
    statuses = {row["status"] for row in list_rows(resolve_run(url))}
    assert statuses == {"published"}, "retention has removed what the killed attempt left"

    newest = list_rows(resolve_run(url))[0]["name"]
    flip_byte(ObjectStore(url), f"checkpoints/{newest}/rank-00001.shard")
    damaged = verify_rows(resolve_run(f"{url}/checkpoints/{newest}"), None)
    assert [row["name"] for row in damaged if row["damage"]] == [newest]


def flip_byte(store: ObjectStore, name: str) -> None:
    size = store.size(name)
    content = bytearray(store.read(name, 0, size))
    content[size // 2] ^= 1
    store.replace(name, bytes(content))


def test_fresh_is_refused_because_a_prefix_cannot_be_renamed(s3, url):
    with pytest.raises(ConfigError, match="which is in an object store"):
        train(config(), run=url, fresh=True, quiet=True)


def test_run_file_and_records_contain_no_secret(s3, url):
    result = train(config("--checkpoint.mode=off"), run=url, quiet=True)
    store = ObjectStore(url)
    contents = [store.read(name, 0, size) for name, size in store.list_sizes("").items()]
    contents += [path.read_bytes() for path in result.folder.rglob("*") if path.is_file()]
    assert len(contents) > 8
    assert not any(b"the-secret-of-the-user" in content or b"the-key-of-the-user" in content for content in contents)


def test_store_without_conditional_put_is_refused_before_the_run_starts(proxy, url):
    from tests.base.store.fault_proxy import Fault

    proxy.faults = [Fault("unconditional", "PUT", times=1000)]
    with pytest.raises(ConfigError, match="does not support conditional writes"):
        train(config(), run=url, quiet=True)
    assert [r.path for r in proxy.requests if r.method == "PUT" and ".probe-" not in r.path] == []
    assert url.startswith(f"s3://{BUCKET}/")
