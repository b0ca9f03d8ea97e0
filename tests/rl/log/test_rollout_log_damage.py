"""Damage of a rollout log: a torn tail is cut, and everything else is named and kept."""

from __future__ import annotations

import shutil

import pytest

from meshwright.errors import DataError
from meshwright.rl.log.frames import RECORD_MAGIC, SEGMENT_HEADER, digest_run_id
from meshwright.rl.log.interface import DamagedRecord, LogPosition
from meshwright.rl.log.posix_log import encode_records
from tests.rl.log.rollout_logs import (
    PAYLOADS,
    RUN,
    damage_of,
    open_log,
    open_reader,
    payloads_of,
    record_bytes,
    segment_file,
    write_log,
)


def test_torn_tail_is_cut_at_every_byte_of_the_last_record(tmp_path):
    positions = write_log(tmp_path)
    path, last = segment_file(tmp_path), positions[-1]
    content = path.read_bytes()
    for size in range(last.offset, len(content)):
        path.write_bytes(content[:size])
        reader = open_reader(tmp_path)
        assert payloads_of(reader) == PAYLOADS[:-1]
        assert damage_of(reader) == []  # as while another process appends
        assert reader.end == last
        log = open_log(tmp_path)
        assert log.end == last
        assert path.stat().st_size == last.offset
        if size == last.offset:
            assert log.cut == ()
        else:
            (cut,) = log.cut
            assert (cut.position, cut.length) == (last, size - last.offset)
            assert "expected" in cut.reason
        assert log.append([b"again"]) == [last]
        assert payloads_of(log) == [*PAYLOADS[:-1], b"again"]
        assert damage_of(log) == []
        log.close()


def test_torn_creation_of_a_segment_is_removed_at_every_byte(tmp_path):
    write_log(tmp_path, [b"first"])
    whole = tmp_path / "whole"
    write_log(whole, [b"first", b"second"], segment_bytes=0)
    for number, earlier in ((2, [b"first"]), (1, [])):
        content = segment_file(whole, number).read_bytes()
        for size in range(SEGMENT_HEADER.size + 10):
            root = tmp_path / f"{number}-{size}"
            root.mkdir()
            (root / "rollouts").mkdir()
            if number == 2:
                shutil.copy(segment_file(whole), segment_file(root))
            segment_file(root, number).write_bytes(content[:size])
            reader = open_reader(root)
            assert payloads_of(reader) == earlier
            log = open_log(root, segment_bytes=0)
            assert len(log.cut) == (size != SEGMENT_HEADER.size)
            log.append([b"again"])
            assert payloads_of(log) == [*earlier, b"again"]
            assert damage_of(log) == []
            log.close()


def test_zeros_at_the_end_are_a_torn_tail(tmp_path):
    """After a power loss a file may have its new size, and zeros."""
    write_log(tmp_path)
    with segment_file(tmp_path).open("ab") as file:
        file.write(bytes(5000))
    log = open_log(tmp_path)
    assert [cut.length for cut in log.cut] == [5000]
    assert payloads_of(log) == PAYLOADS
    log.close()


@pytest.mark.parametrize("number", [1, 3])
def test_flipped_bit_in_every_byte_of_a_record_is_named_and_costs_that_record_alone(tmp_path, number):
    """Record 1 is in the middle. Record 3 is the last one: it was acknowledged, so it is not cut."""
    positions = write_log(tmp_path)
    path, position = segment_file(tmp_path), positions[number]
    content = bytearray(path.read_bytes())
    size = record_bytes(PAYLOADS[number])
    reasons = set()
    for index in range(size):
        damaged = bytearray(content)
        damaged[position.offset + index] ^= 1 << (index % 8)
        path.write_bytes(damaged)
        log = open_log(tmp_path) if index % 7 == 0 else open_reader(tmp_path)
        (damage,) = damage_of(log)
        assert (damage.position, damage.length) == (position, size)
        assert payloads_of(log) == [payload for other, payload in enumerate(PAYLOADS) if other != number]
        with pytest.raises(DataError, match=rf"00000001.log, offset {position.offset}: .*(expected|recorded)"):
            log.read(position)
        assert path.read_bytes() == damaged
        reasons.add(damage.reason.split(":")[0].split(" has checksum")[0].split(", found")[0])
        if index % 7 == 0:
            log.append([b"after"])
            assert payloads_of(log)[-1] == b"after"
            assert damage_of(log) == [damage]
        log.close()
    assert len(reasons) == 3, reasons  # the magic, the rest of the header, the payload


def test_flipped_bit_in_every_byte_of_a_segment_header_is_named(tmp_path):
    write_log(tmp_path)
    path = segment_file(tmp_path)
    content = path.read_bytes()
    for index in range(SEGMENT_HEADER.size):
        damaged = bytearray(content)
        damaged[index] ^= 0x10
        path.write_bytes(damaged)
        log = open_log(tmp_path)
        (damage,) = damage_of(log)
        assert (damage.position, damage.length) == (LogPosition(1, 0), SEGMENT_HEADER.size)
        assert payloads_of(log) == PAYLOADS
        log.close()


def test_record_of_another_run_is_named_as_such(tmp_path):
    positions = write_log(tmp_path / "own")
    write_log(tmp_path / "other", run_id="run-b")
    start, stop = positions[1].offset, positions[2].offset
    content = bytearray(segment_file(tmp_path / "own").read_bytes())
    content[start:stop] = segment_file(tmp_path / "other").read_bytes()[start:stop]
    segment_file(tmp_path / "own").write_bytes(content)
    log = open_log(tmp_path / "own")
    reason = f"a record of another run: expected run {digest_run_id(RUN).hex()}, found {digest_run_id('run-b').hex()}"
    assert damage_of(log) == [DamagedRecord(positions[1], stop - start, reason)]
    assert payloads_of(log) == [PAYLOADS[0], *PAYLOADS[2:]]
    log.close()


def test_record_of_another_place_is_named_as_such(tmp_path):
    positions = write_log(tmp_path, [b"a" * 50, b"b" * 50, b"c" * 50])
    path = segment_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[positions[1].offset : positions[2].offset] = content[positions[0].offset : positions[1].offset]
    path.write_bytes(content)
    reader = open_reader(tmp_path)
    reason = f"a record of another place: expected {positions[1]}, found {positions[0]}"
    assert damage_of(reader) == [DamagedRecord(positions[1], record_bytes(b"b" * 50), reason)]
    assert payloads_of(reader) == [b"a" * 50, b"c" * 50]
    with pytest.raises(DataError, match=f"offset {positions[1].offset}: {reason}"):
        reader.read(positions[1])


def test_record_that_was_copied_to_the_end_is_not_a_second_record(tmp_path):
    positions = write_log(tmp_path)
    path = segment_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content + content[positions[1].offset : positions[2].offset])
    log = open_log(tmp_path)
    assert log.cut == ()
    (damage,) = damage_of(log)
    assert "a record of another place" in damage.reason
    assert payloads_of(log) == PAYLOADS
    log.append([b"after"])
    assert payloads_of(log) == [*PAYLOADS, b"after"]
    log.close()


def test_scan_does_not_take_the_content_of_a_damaged_record_for_records(tmp_path):
    """A payload may contain a record, even one that names this run and another place."""
    inner = b"".join(encode_records(digest_run_id(RUN), LogPosition(1, SEGMENT_HEADER.size), [b"inner"])[0])
    positions = write_log(tmp_path, [b"first", RECORD_MAGIC * 100 + inner, b"last"])
    path = segment_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[positions[1].offset] ^= 1
    path.write_bytes(content)
    reader = open_reader(tmp_path)
    assert payloads_of(reader) == [b"first", b"last"]
    assert [damage.position for damage in damage_of(reader)] == [positions[1]]


def test_deleted_bytes_damage_what_follows_and_nothing_before(tmp_path):
    positions = write_log(tmp_path)
    path = segment_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: positions[1].offset + 80] + content[positions[1].offset + 90 :])
    log = open_log(tmp_path)
    assert payloads_of(log) == PAYLOADS[:1]
    assert damage_of(log)
    log.append([b"after"])
    assert payloads_of(log) == [PAYLOADS[0], b"after"]
    log.close()


def test_truncated_segment_before_the_last_is_damage(tmp_path):
    positions = write_log(tmp_path, [b"a" * 50, b"b" * 50, b"c" * 50], segment_bytes=100)
    assert [position.segment for position in positions] == [1, 2, 3]
    path = segment_file(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-5])
    log = open_log(tmp_path)
    assert log.cut == ()
    (damage,) = damage_of(log)
    assert (damage.position, damage.length) == (positions[1], record_bytes(b"b" * 50) - 5)
    assert payloads_of(log) == [b"a" * 50, b"c" * 50]
    log.close()


def test_damage_across_blocks_is_skipped(tmp_path):
    """The next record may begin anywhere in the blocks in which a segment is read."""
    for size in range(150, 450, 7):
        root = tmp_path / str(size)
        positions = write_log(root, [b"a" * size, b"b" * 20, b"c"])
        path = segment_file(root)
        content = bytearray(path.read_bytes())
        content[positions[0].offset + 3] ^= 1
        path.write_bytes(content)
        with open_reader(root).open_segment(1, 256) as opened:
            found = list(opened.records(0))
        assert [record.position for record in found] == positions
        assert isinstance(found[0], DamagedRecord)


def test_lengths_are_checked_before_memory_is_allocated(tmp_path):
    """The header of a record is intact and names a length that the file does not have."""
    write_log(tmp_path)
    path = segment_file(tmp_path)
    end = path.stat().st_size
    (header, _), _, _ = encode_records(digest_run_id(RUN), LogPosition(1, end), [b"x" * (1 << 20)])
    with path.open("ab") as file:
        file.write(header + b"short")
    read = []
    with open_reader(tmp_path).open_segment(1) as opened:
        inner = opened.read_range
        opened.read_range = lambda start, length: (read.append(length), inner(start, length))[1]
        list(opened.records(0))
    assert max(read) <= path.stat().st_size
