"""Tests of meshwright.base.store.mirror: records reach the store in parts, come back whole, and stay in the mirror."""

from __future__ import annotations

import shutil

import pytest

from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store import mirror as mirror_module
from meshwright.base.store.mirror import RunMirror, make_mirror, mirrored_url, resolve_run
from meshwright.base.store.object_store import ObjectStore
from meshwright.core.store.record_pusher import RecordPusher
from meshwright.errors import ConfigError
from tests.base.store.fault_proxy import Fault

LINE = b'{"kind": "step"}\n'


@pytest.fixture
def root(s3, url):
    root = make_mirror(url)
    (root / "events").mkdir()
    (root / "attempts" / "0001").mkdir(parents=True)
    return root


@pytest.fixture
def events(root):
    path = root / "events" / "rank-00000.jsonl"
    path.write_bytes(LINE * 3)
    return path


def push(root) -> None:
    with RunMirror(root) as mirror:
        mirror.push()


def test_folder_of_a_mirror_knows_its_url_and_no_other_folder_has_one(root, url, tmp_path):
    assert RunFolder(root).url == url
    copied = tmp_path / "mirrors" / root.name
    shutil.copytree(root, copied)
    assert mirrored_url(copied) == ""
    (root / ".url").write_text("s3://bucket-of-somebody-else/run\n")
    assert RunFolder(root).url == ""


def test_records_are_fetched_on_another_machine(root, events, url):
    (root / "attempts/0001/incident.json").write_text("{}")
    (root / "attempts/0001/heartbeat-00000").write_bytes(bytes(64))
    push(root)
    shutil.rmtree(root)
    assert resolve_run(url) == root
    assert events.read_bytes() == LINE * 3
    assert sorted(path.name for path in (root / "attempts/0001").iterdir()) == ["incident.json"]


def test_torn_line_is_not_pushed(root, events, url):
    events.write_bytes(LINE + b'{"kind": "st')
    push(root)
    assert ObjectStore(url).read("events/rank-00000.jsonl", 0, 1000) == LINE


def test_growing_record_sends_its_last_part_again_and_a_shorter_one_removes_parts(
    root, events, url, proxy, monkeypatch
):
    monkeypatch.setattr(mirror_module, "PART_BYTES", 40)
    with RunMirror(root) as mirror:
        events.write_bytes(LINE * 6)
        mirror.push()
        proxy.requests.clear()
        with events.open("ab") as file:
            file.write(LINE)
        mirror.push()
        assert [r.path.rpartition("/")[2] for r in proxy.requests if r.method == "PUT"] == [
            "rank-00000.jsonl.part-00002"
        ]
        proxy.requests.clear()
        mirror.push()
        assert proxy.requests == []
        assert mirror.list_records()["events/rank-00000.jsonl"] == len(LINE) * 7
        assert mirror.fetch("events/rank-00000.jsonl", len(LINE) * 7) == LINE * 7
        events.unlink()
        events.write_bytes(LINE)
        mirror.push()
        assert mirror.list_records() == {"events/rank-00000.jsonl": len(LINE)}


def test_records_that_were_not_pushed_before_a_crash_are_kept_unless_another_host_has_pushed(root, events, url):
    push(root)
    events.write_bytes(LINE * 5)
    resolve_run(url)
    assert events.read_bytes() == LINE * 5
    ObjectStore(url).replace("events/rank-00000.jsonl", LINE * 4)
    resolve_run(url)
    assert events.read_bytes() == LINE * 4


def test_records_of_a_job_that_runs_are_not_replaced(root, events, url):
    push(root)
    with RunMirror(root) as job:
        job.use()
        ObjectStore(url).replace("events/rank-00000.jsonl", LINE * 4)
        resolve_run(url)
        assert events.read_bytes() == LINE * 3
    resolve_run(url)
    assert events.read_bytes() == LINE * 4


@pytest.mark.parametrize("name", ["events/../../evil", "other/file", "attempts/0001/a/b", ".url", "initial/x"])
def test_names_that_no_run_writes_are_not_fetched(root, url, name):
    before = sorted(path.name for path in root.parent.rglob("*"))
    with RunMirror(root) as mirror:
        mirror.store.list_sizes = lambda folder: {name: 4}
        mirror.pull()
    after = sorted(path.name for path in root.parent.rglob("*"))
    assert set(after) - set(before) <= {".lock", ".pushed.json"}


def test_failed_push_is_reported_once_and_repeated(root, events, proxy, url):
    reports: list[str] = []
    ObjectStore(url).replace("identity.json", b"{}")
    pusher = RecordPusher(root, reports.append, interval=1000)
    proxy.faults = [Fault("error", "PUT", "events", times=100, status=403)]
    pusher.push()
    pusher.push()
    assert len(reports) == 1
    assert "the training continues" in reports[0]
    proxy.faults = []
    pusher.close()
    assert ObjectStore(url).size("events/rank-00000.jsonl") == len(LINE) * 3


def test_records_of_a_run_that_was_deleted_in_the_store_are_removed_from_the_mirror(root, events):
    with RunMirror(root) as mirror:
        mirror.use()
    assert not (root / "events").exists()


def test_mirror_fetches_the_records_of_ranks_that_another_host_has_run(root, url):
    store = ObjectStore(url)
    store.replace("events/rank-00001.jsonl", b"one\n")
    store.replace("events/rank-00002.jsonl", b"two\n")
    with RunMirror(root) as mirror:
        mirror.prepare_attempt(3, range(1, 2))
        assert (root / "events/rank-00001.jsonl").read_bytes() == b"one\n"
        assert not (root / "events/rank-00002.jsonl").exists()
        assert (root / "attempts/0003").is_dir()
        (root / "events/rank-00002.jsonl").write_bytes(b"stale\n")
        mirror.push(ranks=range(1, 2))
    assert store.read("events/rank-00002.jsonl", 0, 100) == b"two\n"


def test_store_that_cannot_be_read_is_an_error_of_the_config(root, proxy, url):
    proxy.faults = [Fault("error", "*", times=100, status=403)]
    with pytest.raises(ConfigError, match="access was denied"):
        resolve_run(url)
