"""Reading Kineto traces: every layout, damage, hostile values and bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import ConfigError
from meshwright.insight.diagnose.trace.diagnose import diagnose_traces
from meshwright.insight.diagnose.trace.kineto import event_scanner, trace_file
from meshwright.insight.diagnose.trace.kineto.event_scanner import EventScanner
from meshwright.insight.diagnose.trace.kineto.event_table import EventTable, Kind, TableBuilder
from meshwright.insight.diagnose.trace.kineto.kineto_trace import read_trace
from tests.insight.diagnose.synthetic_traces import LAYOUTS, RocmTraceBuilder, TraceBuilder, training_trace


def columns(events: EventTable) -> list[tuple[object, ...]]:
    names = [events.names[name] for name in events.name]
    kinds, threads = events.kind.tolist(), [events.threads[thread] for thread in events.thread]
    rows = zip(names, kinds, threads, events.start, events.duration, events.correlation, strict=True)
    return sorted(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("suffix", "builder"), [("json", TraceBuilder), ("json.gz", RocmTraceBuilder)])
def test_every_layout_has_the_same_events(
    tmp_path: Path, layout: str, suffix: str, builder: type[TraceBuilder]
) -> None:
    trace = training_trace(builder=builder)
    trace.kernel('void f<"quoted \\" name">()', 1, 2.5)
    read = read_trace(trace.write(tmp_path / f"trace.{suffix}", layout))
    expected = read_trace(trace.write(tmp_path / "expected.json", "2025"))
    links = expected.events.correlation[expected.events.kind <= Kind.RUNTIME]
    assert np.bincount(links).tolist() == [0, *[2] * trace.correlation]  # every launch and what it launches
    assert read.notes == []
    assert columns(read.events) == columns(expected.events)
    assert len(read.events) == len(trace.events)
    assert read.rank == (None if layout == "array" else 0)


@pytest.mark.parametrize("layout", ["2021", "2025", "reordered"])
@pytest.mark.parametrize("size", [7, 100, 4096])
def test_chunks_may_end_anywhere(layout: str, size: int) -> None:
    text = LAYOUTS[layout](training_trace().document()).encode()
    tables = []
    for step in (size, len(text)):
        builder = TableBuilder()
        scanner = EventScanner(builder)
        for start in range(0, len(text), step):
            scanner.feed(text[start : start + step])
        scanner.close()
        assert scanner.notes == []
        tables.append(columns(builder.build()))
    assert tables[0] == tables[1]


def test_events_in_another_layout_are_found_later_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A merged trace: Kineto's events first, then those of a tool with another order of keys."""
    monkeypatch.setattr(event_scanner, "CHECK_EVERY", 1)
    trace, other = training_trace(), TraceBuilder()
    other.kernel("other kernel", 10, 5)
    first = LAYOUTS["2025"](trace.document()).rpartition("]")[0]
    path = tmp_path / "merged.json"
    path.write_text(first + "," + json.dumps(other.events, sort_keys=True)[1:-1] + "]}")
    read = read_trace(path)
    assert "other kernel" in read.events.names
    assert len(read.events) == len(trace.events) + len(other.events)


def test_operators_of_the_host_are_kept_only_without_a_device(tmp_path: Path) -> None:
    for device, kept in ((True, 1), (False, 3)):
        trace = TraceBuilder(device=device)
        trace.add("cpu_op", "aten::mm", 0, 10)
        trace.add("cpu_op", "aten::relu", 10, 10)
        trace.add("python_function", "train.py(3): main", 0, 100)
        trace.add("user_annotation", "gloo:all_reduce", 5, 5, **{"Input Dims": [[1024]], "Input type": ["float"]})
        if device:
            trace.kernel("gemm", 0, 1)
        read = read_trace(trace.write(tmp_path / f"{device}.json"))
        host = read.events.kind >= Kind.ANNOTATION
        assert int(host.sum()) == kept
        assert next(iter(read.events.collectives.values())).message_bytes == 4096


def test_a_trace_that_lists_devices_but_has_no_kernels_keeps_its_operators(tmp_path: Path) -> None:
    trace = TraceBuilder(device=True)
    trace.add("cpu_op", "aten::mm", 0, 10)
    assert read_trace(trace.write(tmp_path / "trace.json")).events.names == ["aten::mm"]


@pytest.mark.parametrize("layout", ["2021", "reordered"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_trace_gives_what_precedes_the_end(tmp_path: Path, layout: str, compressed: bool) -> None:
    content = LAYOUTS[layout](training_trace(50).document()).encode()
    content = gzip.compress(content) if compressed else content
    path = tmp_path / "trace.json"
    path.write_bytes(content[: len(content) * 3 // 4])
    read = read_trace(path)
    assert 100 < len(read.events) < 51 * 7
    assert any("truncated after" in note for note in read.notes)


def test_damaged_compression_is_noted(tmp_path: Path) -> None:
    random.seed(1)
    content = bytearray(gzip.compress(LAYOUTS["2021"](training_trace(2000).document()).encode()))
    content[len(content) // 2 : len(content) // 2 + 64] = random.randbytes(64)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    read = read_trace(path)
    assert "the compressed data is damaged; what precedes the damage is used" in read.notes


HOSTILE = [
    '{"ph": "X", "cat": "kernel", "name": "a", "pid": 1, "tid": 1, "ts": NaN, "dur": 1}',
    '{"ph": "X", "cat": "kernel", "name": "b", "pid": 1, "tid": 1, "ts": 1e400, "dur": 1}',
    '{"ph": "X", "cat": "kernel", "name": "c", "pid": 1, "tid": 1, "ts": 5, "dur": -7}',
    '{"ph": "X", "cat": "kernel", "name": "d", "pid": 1, "tid": 1, "ts": "many", "dur": 1}',
    '{"ph": "X", "cat": "kernel", "name": "e", "pid": 1, "tid": 1, "ts": [1], "dur": null}',
    '{"ph": "X", "cat": "kernel", "name": "f", "pid": 1, "tid": 1, "ts": ' + "9" * 5000 + ', "dur": 1}',
    '{"ph": "X", "cat": "kernel", "name": "g", "pid": 1, "tid": 1, "ts": 5, "dur": 99999999999999999999}',
    '{"ph": "X", "cat": "kernel", "name": "k", "pid": 1, "tid": 1, "ts": 5, "dur": true}',
    '{"ph": "X", "cat": "kernel", "name": "l", "pid": 1, "tid": 1, "ts": false, "dur": 1}',
]
TOLERATED = [
    '{"ph": "X", "cat": "kernel", "name": "h", "pid": 1, "tid": 1, "ts": "12", "dur": "3.5"}',
    '{"ph": "X", "cat": "kernel", "name": null, "pid": {}, "tid": [], "ts": 1, "dur": 2, "args": 7}',
    '{"ph": "X", "cat": "kernel", "name": "\\ud800\\u0000", "pid": 1, "tid": 1, "ts": 1, "dur": 2}',
    '{"ph": "X", "cat": "kernel", "name": "i", "pid": 1, "tid": "stream 7", "ts": 1, "dur": 2, "args": {"stream": -9}}',
    '{"ph": "X", "cat": "kernel", "name": "j", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {"correlation": 1e99}}',
    '{"ph": "X", "cat": "kernel", "name": "m", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {"correlation": true}}',
    '{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv", "pid": 1, "tid": 1, "ts": 1, "dur": 2,'
    ' "args": {"Collective name": "all_to_allv", "In split size": [' + "9" * 400 + ", -1]}}",
    '{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 99999, "dur": 9}',
    '{"ph": "X", "cat": "user_annotation", "name": "nccl:x", "pid": 1, "tid": 1, "ts": 1, "dur": 2,'
    ' "args": {"In msg nelems": "many", "Input Dims": [[-1]], "Collective name": [], "In split size": "[1, null]"}}',
]


@pytest.mark.parametrize("event", HOSTILE)
def test_an_event_with_impossible_times_is_left_out(tmp_path: Path, event: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{TOLERATED[0]}, {event}, {TOLERATED[0]}]}}')
    read = read_trace(path)
    assert {read.events.names[name] for name in read.events.name} == {"h"}
    assert len(read.events) == 2
    assert read.notes in (["1 events with impossible times are left out"], ["1 malformed events are left out"])


@pytest.mark.parametrize("event", TOLERATED)
def test_strange_but_possible_events_are_used(tmp_path: Path, event: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{event}, {TOLERATED[0]}]}}')
    read = read_trace(path)
    assert len(read.events) == 2
    assert read.notes == []
    assert diagnose_traces([path]).findings


def test_deeply_nested_values_are_skipped(tmp_path: Path) -> None:
    deep = '{"ph": "X", "cat": "kernel", "args": ' + "[" * 50_000 + "]" * 50_000 + "}"
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{TOLERATED[0]}, {deep}, {TOLERATED[0]}]}}')
    read = read_trace(path)
    assert len(read.events) == 2
    assert read.notes == ["1 malformed events are left out"]


def test_a_trace_of_nested_event_starts_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{TOLERATED[0]}, ' + '{"ph":' * 300_000)
    read = read_trace(path)
    assert len(read.events) == 1
    assert read.notes == ["more than 1,000 events are malformed; the rest is not read"]


NOT_TRACES = {
    "empty": b"",
    "binary": bytes(range(256)) * 64,
    "other JSON": b'{"steps": [1, 2, 3]}',
    "no events": b'{"traceEvents": []}',
    "metadata only": b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}',
    "empty gzip": gzip.compress(b""),
    "gzip of zeros": gzip.compress(bytes(20 << 20)),
    "one long string": b'{"traceEvents": [{"ph": "X", "name": "' + b"a" * (6 << 20),
}


@pytest.mark.parametrize("content", NOT_TRACES.values(), ids=NOT_TRACES)
def test_a_file_that_is_no_trace_is_reported_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"has no events that can be diagnosed: .*; expected a trace") as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_missing_files_folders_and_pipes_are_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"cannot be read: .*; expected a trace that torch.profiler exported"):
            read_trace(path)


def test_random_damage_never_raises_another_error(tmp_path: Path) -> None:
    random.seed(7)
    path = tmp_path / "trace.json"
    for layout in ("2021", "reordered"):
        text = LAYOUTS[layout](training_trace(2).document()).encode()
        for _ in range(150):
            damaged = bytearray(text)
            for _ in range(random.randrange(1, 20)):
                position = random.randrange(len(damaged))
                damaged[position : position + random.randrange(3)] = random.randbytes(random.randrange(4))
            path.write_bytes(damaged)
            try:
                read_trace(path)
            except ConfigError as error:
                assert "\n" not in str(error)


def test_a_compressed_bomb_of_events_stays_within_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("meshwright.insight.diagnose.trace.kineto.event_table.MAX_EVENTS", 20_000)
    monkeypatch.setattr(trace_file, "MAX_TEXT", 64 << 20)
    event = b'{"ph": "X", "cat": "kernel", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1},'
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + event * 400_000, 1))
    tracemalloc.start()
    read = read_trace(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 20_000 <= len(read.events) < 25_000
    assert any(note.startswith("only the first") for note in read.notes)
    assert peak < 16 << 20


def test_the_number_of_names_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("meshwright.insight.diagnose.trace.kineto.event_table.MAX_NAMES", 10)
    trace = TraceBuilder()
    for number in range(50):
        trace.add("kernel", f"kernel {number}" + "x" * 2000, number, 1)
    read = read_trace(trace.write(tmp_path / "trace.json"))
    assert len(read.events.names) == 11
    assert max(map(len, read.events.names)) == 512
    assert len(read.events) == 50


def test_text_beyond_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace_file, "MAX_TEXT", 1 << 19)
    read = read_trace(training_trace(3000).write(tmp_path / "trace.json"))
    assert any("of text; the rest is not read" in note for note in read.notes)
    assert len(read.events) > 100


def test_text_beyond_many_times_the_compressed_size_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("meshwright.base.io.MIN_GZIP_TEXT", 1 << 16)
    event = b'{"ph": "X", "cat": "kernel", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1},'
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + event * 20_000, 9))
    read = read_trace(path)
    assert any("of text; the rest is not read" in note for note in read.notes)
    assert 100 < len(read.events) < 64 * path.stat().st_size / 80


@pytest.mark.long
def test_a_trace_of_one_gigabyte_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """3 million events of 350 bytes: their columns take 33 bytes each."""
    trace = TraceBuilder()
    for number in range(1000):
        trace.kernel(f"kernel {number % 50}" + "x" * 200, number, 1)
    header, _, events = LAYOUTS["2025"](trace.document()).encode().partition(b'"traceEvents": [')
    block = events.rpartition(b"]")[0] + b","
    total = 0

    def chunks(_: object) -> object:
        nonlocal total
        yield header + b'"traceEvents": ['
        while total < 1 << 30:
            total += len(block)
            yield block
        yield b"]}"

    monkeypatch.setattr(trace_file.TraceFile, "chunks", chunks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = read_trace(tmp_path / "trace.json")
    assert len(read.events) > 2_000_000
    assert np.unique(read.events.name).size == 51
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 400 << 20
