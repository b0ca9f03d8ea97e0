"""The rollout log as objects of a store: consecutive numbers, two writers, lost answers, and damage."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from meshwright.base.store.posix import PosixStore
from meshwright.errors import BusyError, ConfigError, DataError
from meshwright.rl.log.frames import SEGMENT_HEADER
from meshwright.rl.log.interface import START, LogPosition
from meshwright.rl.log.object_log import ObjectRolloutLog, ObjectRolloutReader
from tests.rl.log.rollout_logs import PAYLOADS, damage_of, payloads_of


class UnreliableStore(PosixStore):
    """A store whose listings are stale, and whose publications fail before or after they take effect."""

    listed = True
    fail = ""

    def list_names(self, folder):
        return super().list_names(folder) if self.listed else []

    def publish_if_absent(self, name, content, before_publish=lambda: None):
        if self.fail == "before":
            raise OSError(errno.EIO, "the request timed out")
        published = super().publish_if_absent(name, content, before_publish)
        if self.fail == "after":
            raise OSError(errno.EIO, "the request timed out")
        return published


@pytest.fixture
def store(tmp_path):
    return UnreliableStore(tmp_path)


def open_objects(store, run_id="run-a"):
    return ObjectRolloutLog(store, "rollouts", run_id)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "stale listing"])
@pytest.mark.parametrize("appends", [0, 1, 2, 3, 7, 8, 20])
def test_appends_are_consecutive_objects(store, appends, listed):
    store.listed = listed
    log, positions = open_objects(store), []
    assert log.end == START
    for number in range(appends):
        positions += log.append([b"%d" % number, b"x" * number])
    assert PosixStore.list_names(store, "rollouts") == [f"{number + 1:08d}.log" for number in range(appends)]
    expected = [payload for number in range(appends) for payload in (b"%d" % number, b"x" * number)]
    for opened in (log, ObjectRolloutReader(store, "rollouts", "run-a"), open_objects(store)):
        assert payloads_of(opened) == expected
        assert [opened.read(position) for position in positions] == expected
        assert opened.end == log.end
        for number, position in enumerate(positions):
            assert payloads_of(opened, position) == expected[number:]
        assert payloads_of(opened, log.end) == []
    assert [position.segment for position in positions] == [1 + number // 2 for number in range(2 * appends)]
    assert log.append([]) == []


def test_of_two_writers_the_later_one_appends_nothing_more(store):
    first, second = open_objects(store), open_objects(store)
    first.append([b"first"])
    for _ in range(2):
        with pytest.raises(BusyError, match=r"00000001.log cannot be appended.*(another writer|not the writer)"):
            second.append([b"second"])
    first.append([b"more"])
    assert payloads_of(first) == [b"first", b"more"]


def test_writer_that_was_replaced_is_refused(store):
    first = open_objects(store)
    first.append([b"first"])
    second = open_objects(store)
    second.append([b"second"])
    with pytest.raises(BusyError, match="another writer has published it"):
        first.append([b"late"])
    assert payloads_of(second) == [b"first", b"second"]


def test_append_that_fails_is_named_and_a_later_one_works(store):
    log = open_objects(store)
    log.append([b"1"])
    store.fail = "before"
    with pytest.raises(ConfigError, match=r"00000002.log cannot be written: the request timed out; 1 records are not"):
        log.append([b"2"])
    store.fail = ""
    assert log.append([b"3"]) == [LogPosition(2, SEGMENT_HEADER.size)]
    assert payloads_of(log) == [b"1", b"3"]


def test_append_whose_answer_was_lost_stays_in_the_log(store):
    """The object may have been read by a later writer: it is neither deleted nor taken for that of another writer."""
    log = open_objects(store)
    log.append([b"1"])
    end = log.end
    store.fail = "after"
    with pytest.raises(ConfigError):
        log.append([b"2"])
    store.fail = ""
    assert log.append([b"3"]) == [LogPosition(3, SEGMENT_HEADER.size)]
    assert payloads_of(log, end) == [b"2", b"3"]


def test_faults_at_the_fail_points_of_objects(store, arm):
    log = open_objects(store)
    arm("rollout.append:eio@step1")
    with pytest.raises(ConfigError, match="Input/output error"):
        log.append([b"1"])
    log.append([b"2"])
    assert payloads_of(log) == [b"2"]


def test_object_that_is_missing_is_named(store):
    log = open_objects(store)
    for payload in PAYLOADS:
        log.append([payload])
    store.remove("rollouts/00000002.log")
    log = open_objects(store)
    (damage,) = damage_of(log)
    assert damage.position == LogPosition(2, 0)
    assert "00000002.log" in damage.reason
    assert log.append([b"new"]) == [LogPosition(5, SEGMENT_HEADER.size)]
    assert payloads_of(log) == [PAYLOADS[0], *PAYLOADS[2:], b"new"]


def test_damage_of_an_object_is_named_also_at_its_end(store):
    log = open_objects(store)
    positions = [log.append([payload])[0] for payload in PAYLOADS]
    for number in (2, 4):
        path = Path(store.path(f"rollouts/{number:08d}.log"))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content if number == 2 else content[:-1])
    log = open_objects(store)
    assert [damage.position for damage in damage_of(log)] == [positions[1], positions[3]]
    assert payloads_of(log) == [PAYLOADS[0], PAYLOADS[2]]
    for number in (1, 3):
        with pytest.raises(DataError, match=rf"0000000{number + 1}.log, offset 64: .*expected .* found"):
            log.read(positions[number])
    assert log.append([b"new"])[0].segment == 5


def test_objects_of_another_run_are_refused(store):
    open_objects(store).append([b"1"])
    with pytest.raises(DataError, match=r"00000001.log is the rollout log of another run: expected run .* found"):
        open_objects(store, "run-b")
