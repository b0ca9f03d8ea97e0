"""Tests of base.store.object_store under faults: errors, lost answers, stale listings, no conditional put."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.s3_server import open_uploads
from meshwright.base.checkpoint.listing import list_checkpoint_folders
from meshwright.base.store import object_calls, object_store
from meshwright.base.store.interface import OutcomeUnknown
from meshwright.base.store.object_calls import RequestLimits
from meshwright.base.store.object_process import STATE, ProcessCalls, make_requests_in_another_process
from meshwright.base.store.object_store import ObjectStore, require_conditional_put
from meshwright.errors import ConfigError
from tests.base.store.fault_proxy import Fault

PART = 5 << 20
QUICK = RequestLimits(retries=3, seconds=20.0, timeout=2.0, first_backoff=0.01, max_backoff=0.05)
SECRETS = ("the-secret-of-the-user", "the-key-of-the-user", "StringToSign")


@pytest.fixture
def store(proxy, url, monkeypatch) -> ObjectStore:
    monkeypatch.setattr(object_store, "PART_BYTES", PART)
    monkeypatch.setattr(object_calls, "PART_BYTES", PART)
    return ObjectStore(url, QUICK)


def write(store: ObjectStore, name: str, content: bytes) -> None:
    sink = store.create(name)
    try:
        sink.write(content)
        sink.close()
    finally:
        sink.abort()


def test_errors_of_the_server_are_retried(store, proxy):
    proxy.faults = [Fault("error", "*", times=3, status=503)]
    assert store.publish_if_absent("manifest.json", b"content")
    proxy.faults = [Fault("error", "GET", times=2)]
    assert store.read("manifest.json", 0, 100) == b"content"


def test_retries_are_bounded_and_the_error_names_operation_object_and_cause(store, proxy, url):
    proxy.faults = [Fault("error", "PUT", times=1000)]
    with pytest.raises(OSError, match="tries") as failed:
        store.publish_if_absent("folder/manifest.json", b"content")
    assert failed.value.strerror == (
        f"cannot publish {url}/folder/manifest.json: the server answered 500 InternalError (4 tries)"
    )
    assert proxy.count("PUT") == QUICK.retries + 1


def test_denied_access_is_not_retried_and_no_message_has_a_secret(store, proxy):
    proxy.faults = [Fault("error", "*", times=100, status=403)]
    with pytest.raises(PermissionError) as failed:
        store.replace("beat", b"1")
    assert "access was denied 403 AccessDenied" in failed.value.strerror
    assert not any(secret in str(failed.value) for secret in SECRETS)
    assert len(proxy.requests) == 1


def test_unreachable_server_is_an_error_with_its_cause(store, proxy, monkeypatch, url):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    limits = RequestLimits(retries=1, seconds=1.0, timeout=1.0, first_backoff=0.01)
    with pytest.raises(OSError, match=r"cannot find .*/x: .*(refused|could not be sent)") as failed:
        ObjectStore(url, limits).size("x")
    assert failed.value.filename == f"{url}/x"


@pytest.mark.parametrize("answers_lost", [1, 3])
def test_publication_whose_answer_is_lost_is_published_once_and_by_its_own_writer(store, proxy, url, answers_lost):
    proxy.faults = [Fault("cut", contains="manifest.json", times=answers_lost)]
    assert store.publish_if_absent("manifest.json", b"content")
    assert proxy.count("PUT") > 1
    assert not ObjectStore(url, QUICK).publish_if_absent("manifest.json", b"content"), "equal content of another writer"
    assert store.read("manifest.json", 0, 100) == b"content"


def test_publication_that_another_writer_wins_after_a_lost_answer_is_false(store, proxy, url):
    assert ObjectStore(url, QUICK).publish_if_absent("manifest.json", b"other")
    proxy.faults = [Fault("cut", contains="manifest.json", times=2)]
    assert not store.publish_if_absent("manifest.json", b"content")
    assert store.read("manifest.json", 0, 100) == b"other"


@pytest.mark.parametrize("action", ["error", "cut"])
def test_publication_that_never_gets_an_answer_is_decided_by_what_is_there(store, proxy, action):
    """After the last try, the object is read back: it is there if only answers were lost, and absent after errors."""
    proxy.faults = [Fault(action, "PUT", "manifest.json", times=1000)]
    if action == "cut":
        assert store.publish_if_absent("manifest.json", b"content")
        assert store.read("manifest.json", 0, 100) == b"content"
    else:
        with pytest.raises(OSError, match="500 InternalError") as failed:
            store.publish_if_absent("manifest.json", b"content")
        assert not isinstance(failed.value, OutcomeUnknown)
    assert proxy.count("PUT") == QUICK.retries + 1


@pytest.mark.parametrize("action", ["cut", "drop"])
def test_publication_that_cannot_be_read_back_is_unknown(store, proxy, action, url):
    proxy.faults = [Fault(action, "*", "manifest.json", times=1000)]
    with pytest.raises(OutcomeUnknown) as unknown:
        store.publish_if_absent("manifest.json", b"content")
    assert unknown.value.strerror.startswith(f"cannot publish {url}/manifest.json: ")
    assert ", and whether it is there is unknown: cannot read " in unknown.value.strerror
    proxy.faults = []
    assert (store.size("manifest.json") == 7) == (action == "cut")


def test_denied_publication_is_known_to_be_absent(store, proxy):
    proxy.faults = [Fault("error", "*", times=1000, status=403)]
    with pytest.raises(PermissionError):
        store.publish_if_absent("manifest.json", b"content")
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("operation", ["publish", "write", "replace", "delete"])
def test_conflicting_operation_is_tried_again(store, proxy, operation):
    """S3 answers 409 while another request for the object is under way, whether or not there is an object then."""
    if operation == "delete":
        store.replace("x", b"content")
    proxy.faults = [Fault("error", "POST" if operation == "delete" else "PUT", times=2, status=409)]
    if operation == "publish":
        assert store.publish_if_absent("x", b"content")
    elif operation == "write":
        write(store, "x", b"content")
    else:
        store.replace("x", b"content") if operation == "replace" else store.remove("x")
    assert not proxy.faults
    assert store.size("x") == (None if operation == "delete" else 7)


def test_conflict_that_another_writer_wins_is_false_and_one_that_stays_is_an_error(store, proxy, url):
    assert ObjectStore(url, QUICK).publish_if_absent("manifest.json", b"other")
    proxy.faults = [Fault("error", "PUT", times=2, status=409)]
    assert not store.publish_if_absent("manifest.json", b"content")
    proxy.faults = [Fault("error", "PUT", times=1000, status=409)]
    with pytest.raises(OSError, match=r"absent: the server answered 409 ConditionalRequestConflict \(4 tries\)"):
        store.publish_if_absent("absent", b"content")


def test_transfers_over_a_slow_link_take_longer_than_the_limit_without_one(store, proxy, url):
    limits = RequestLimits(retries=0, seconds=1.0, timeout=1.0, slowest_rate=1 << 20)
    store, proxy.rate = ObjectStore(url, limits), 4 << 20
    contents = {"small": random.Random(0).randbytes(PART), "parts": random.Random(1).randbytes(3 * PART)}
    for name, content in contents.items():
        write(store, name, content)
    assert [proxy.count("PUT", name) for name in contents] == [1, 3], "nothing is sent twice"
    proxy.faults = [Fault("drop", "GET", "small")]
    again = ObjectStore(url, RequestLimits(retries=8, seconds=1.0, timeout=1.0))
    assert again.read("small", 0, PART) == contents["small"], "the time that a body needs does not end the tries"


def test_link_on_which_nothing_moves_is_an_error_with_the_bytes(proxy, url):
    limits = RequestLimits(retries=0, seconds=1.0, timeout=0.5, slowest_rate=1 << 20)
    ObjectStore(url).replace("x", b"content")
    store = ObjectStore(url, limits)
    proxy.faults = [Fault("slow", "*", times=2, seconds=3.0)]
    with pytest.raises(OSError, match=f"cannot read {url}/x: nothing arrived for 0.5 s"):
        store.read("x", 0, 7)
    with pytest.raises(OSError, match=f"cannot replace {url}/x: 70,000 bytes were not sent within 0.6 s"):
        store.replace("x", bytes(70_000))


def test_long_read_is_made_of_requests_that_are_repeated_alone(store, proxy):
    size = 2 * object_store.READ_AHEAD_BYTES + 5
    content = random.Random(0).randbytes(size)
    write(store, "shard", content)
    proxy.requests.clear()
    proxy.faults = [Fault("drop", "GET", "shard")]
    assert store.read("shard", 0, size + 5) == content
    assert proxy.count("GET", "shard") == 4


def test_small_file_whose_answer_is_lost_is_written(store, proxy):
    proxy.faults = [Fault("cut", contains="shard")]
    write(store, "shard", b"content")
    assert store.read("shard", 0, 100) == b"content"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("error", "PUT", "partNumber=1", times=2),
        Fault("cut", "PUT", "partNumber=2"),
        Fault("cut", "POST", "uploadId="),
        Fault("error", "POST", "uploadId="),
        Fault("error", "POST", "uploads"),
        Fault("slow", "PUT", "partNumber", seconds=0.3, times=3),
    ],
    ids=["part-500", "part-cut", "complete-cut", "complete-500", "begin-500", "slow"],
)
def test_upload_in_parts_survives_a_fault(store, proxy, s3, fault):
    content = random.Random(0).randbytes(2 * PART + 1000)
    proxy.faults = [fault]
    write(store, "shard", content)
    assert not proxy.faults
    assert store.read("shard", 0, len(content)) == content
    assert open_uploads(s3) == 0


def test_upload_that_fails_leaves_no_object_and_no_upload(store, proxy, s3, url):
    proxy.faults = [Fault("error", "PUT", "partNumber", times=100, status=403)]
    with pytest.raises(OSError, match=f"cannot write {url}/shard: access was denied 403"):
        write(store, "shard", bytes(4 * PART))
    proxy.faults = []
    assert store.size("shard") is None
    assert open_uploads(s3) == 0


def test_abort_of_an_upload_leaves_no_object_and_no_upload(store, s3):
    sink = store.create("shard")
    sink.write(bytes(3 * PART))
    sink.abort()
    assert store.size("shard") is None
    assert open_uploads(s3) == 0


def test_upload_holds_a_bounded_number_of_parts_in_memory(store, proxy):
    """With a server that does not answer, the writer stops after the parts in flight."""
    release = threading.Event()
    original = proxy.take_faults
    proxy.take_faults = lambda method, path: (
        release.wait(1.5) if "partNumber" in path else None,
        original(method, path),
    )[1]
    sink, written = store.create("shard"), []

    def fill() -> None:
        for _ in range(12):
            sink.write(bytes(PART))
            written.append(PART)

    thread = threading.Thread(target=fill)
    thread.start()
    time.sleep(1.0)
    accepted = len(written)
    release.set()
    thread.join()
    sink.close()
    # In flight, read from the queue, in the queue, and the one that is filled.
    assert accepted <= object_calls.PARTS_IN_FLIGHT + 4
    assert store.size("shard") == 12 * PART


def test_create_does_not_overwrite_a_file_that_appears_meanwhile(store, url):
    for size in (1, 2 * PART):
        sink = store.create(f"shard-{size}")
        sink.write(bytes(size))
        assert ObjectStore(url, QUICK).publish_if_absent(f"shard-{size}", b"other")
        with pytest.raises(FileExistsError):
            sink.close()
        sink.abort()
        assert store.read(f"shard-{size}", 0, 100) == b"other"


def test_stale_listing_neither_publishes_twice_nor_hides_what_this_store_has_seen(store, proxy, url):
    folder = "checkpoints/step-00000001.a0001"
    proxy.freeze_listings()
    assert list_checkpoint_folders(store) == []
    assert store.publish_if_absent(f"{folder}/manifest.json", b"{}")
    other = ObjectStore(url, QUICK)
    assert list_checkpoint_folders(other) == [], "the listing is stale"
    assert not other.publish_if_absent(f"{folder}/manifest.json", b"{}")
    assert [entry.folder for entry in list_checkpoint_folders(other)] == [folder]
    assert other.size(f"{folder}/manifest.json") == 2
    other.remove(f"{folder}/manifest.json")
    assert not list_checkpoint_folders(other)


@pytest.mark.parametrize("fault", ["unconditional", "error"])
def test_store_without_conditional_put_is_refused(store, proxy, fault):
    proxy.faults = [Fault(fault, "PUT", ".probe", times=100, status=501)]
    expected = "does not support conditional writes" if fault == "unconditional" else "501 NotImplemented"
    with pytest.raises(ConfigError, match=expected) as refused:
        require_conditional_put(store)
    assert refused.value.exit_code == 2
    assert "If-None-Match" in str(refused.value)


def test_bucket_that_does_not_exist_is_refused(s3):
    with pytest.raises(ConfigError, match="the bucket does not exist"):
        require_conditional_put(ObjectStore("s3://another-bucket/run", QUICK))


@pytest.mark.parametrize("forking", [False, True])
def test_missing_library_is_an_error_of_the_config(s3, url, monkeypatch, tmp_path, forking):
    monkeypatch.setitem(sys.modules, "obstore", None)
    (tmp_path / "obstore.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(STATE, "forking", os.getpid() if forking else 0)
    with pytest.raises(ConfigError, match=r"meshwright\[objectstore\]"):
        require_conditional_put(ObjectStore(url))


def test_probe_accepts_a_conditional_put_and_leaves_nothing(store):
    require_conditional_put(store)
    assert store.list_names("") == []


def test_forked_process_uses_the_store_that_its_parent_has_used(s3, url, monkeypatch):
    """The threads of obstore do not survive a fork: the parent makes its requests through another process."""
    monkeypatch.setattr(STATE, "threads_of", 0)
    monkeypatch.setattr(STATE, "forking", 0)
    make_requests_in_another_process()
    store = ObjectStore(url)
    assert store.publish_if_absent("of-parent", b"parent")
    assert isinstance(store.calls, ProcessCalls)
    assert run_forked(lambda: store.read("of-parent", 0, 10) == b"parent" and store.publish_if_absent("of-child", b""))
    assert store.size("of-child") == 0


def test_forked_process_of_one_that_has_the_threads_of_obstore_uses_the_store(s3, url, monkeypatch):
    monkeypatch.setattr(STATE, "forking", 0)
    monkeypatch.setattr(STATE, "threads_of", 0)
    ObjectStore(url).replace("beat", b"1")
    make_requests_in_another_process()
    assert STATE.threads_of == os.getpid()

    def write_in_child() -> bool:
        store = ObjectStore(url)
        sink = store.create("shard")
        sink.write(bytes(object_calls.PART_BYTES + 1))
        sink.close()
        return isinstance(store.calls, ProcessCalls) and store.size("shard") == object_calls.PART_BYTES + 1

    assert run_forked(write_in_child)


def test_rank_that_is_forked_makes_its_requests_itself(s3, url):
    """In a new process, as that of a fork server: no test has started the threads of obstore there."""
    script = f"""
import os
from meshwright.base.store.object_process import close_processes, make_requests_in_another_process
from meshwright.base.store.object_store import ObjectStore
make_requests_in_another_process()
store = ObjectStore({url!r})
assert store.publish_if_absent("of-parent", b"parent")
child = os.fork()
if child == 0:
    same = store.read("of-parent", 0, 10) == b"parent"
    os._exit(0 if same and type(store.calls).__name__ == "DirectCalls" else 1)
assert os.waitpid(child, 0)[1] == 0
assert type(store.calls).__name__ == "ProcessCalls"
close_processes()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def run_forked(function) -> bool:
    """Whether a function returns True in a forked process within 30 seconds."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def test_a_request_counts_as_progress_only_while_it_runs():
    """The watchdog does not take a rank for hung while a request may still end by itself."""
    store, during = ObjectStore("s3://bucket/run"), []
    store.repeat("write", "shard", lambda: during.append(store.request_end - time.monotonic()), size=16 << 20)
    assert during[0] > store.limits.timeout
    assert store.request_end == 0
