"""The merged trace of recorded spans: one process per rank, tracks in order, arrows from the last rank to arrive."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.cli import main
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.spans import SpanLog
from meshwright.errors import ConfigError
from meshwright.insight.trace.trace_text import write_trace
from tests.insight.observe.trace.trace_format import arrows, check_format, read_trace, slices

NOW = 1_790_000_000.0


def write_rank(
    folder: Path, rank: int, coordinates: dict[str, int], steps: list[dict[str, Any]], **place: Any
) -> SpanLog:
    """Writes the spans of a rank; steps begin every second."""
    log = SpanLog(RunFolder(folder).spans(rank), 1, {"rank": rank, "ranks": 2, "coordinates": coordinates, **place})
    for number, step in enumerate(steps):
        log.write("step", step=number, begin=NOW + number + place.get("clock_offset", 0.0), **step)
    return log


def plain_step(wait: tuple[int, int]) -> dict[str, Any]:
    phases = [["fetch", 0], ["forward", 1000], ["backward", 40_000], ["sync", 80_000], ["update", 90_000]]
    return {"phases": phases, "end": 100_000, "waits": [wait, (81_000, 81_005)]}


@pytest.fixture
def tensor_run(tmp_path: Path) -> Path:
    """Rank 1 arrives late in the first collective of every step; its clock is an hour ahead."""
    write_rank(tmp_path, 0, {"tensor": 0}, [plain_step((5000, 30_000))] * 3).close()
    log = write_rank(tmp_path, 1, {"tensor": 1}, [plain_step((29_000, 30_000))] * 3, clock_offset=3600.0)
    log.write("span", name="evaluate", step=3, begin=NOW + 3603.5, seconds=0.25)
    log.write("span", name="checkpoint", step=3, begin=NOW + 3603.5, seconds=2.0)
    log.close()
    return tmp_path


def test_trace_shows_phases_waits_and_other_spans_on_aligned_clocks(tensor_run: Path) -> None:
    summary = write_trace(tensor_run)
    events = read_trace(tensor_run / "trace.json.gz")
    check_format(events)
    assert (summary.ranks, summary.steps) == (2, 3)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (tensor 0)", 1: "rank 1 (tensor 1)"}
    first, second = (
        [(e["name"], e["ts"], e["dur"]) for e in slices(events, "steps and phases", rank)] for rank in (0, 1)
    )
    assert first == second  # an hour apart on their own clocks
    assert [name for name, _, _ in first][:7] == ["step 0", "fetch", "forward", "backward", "sync", "update", "step 1"]
    assert [e["name"] for e in slices(events, "evaluation")] == ["evaluate"]
    assert [e["dur"] for e in slices(events, "checkpoints")] == [2e6]


def test_waits_name_the_last_rank_to_arrive_and_arrows_come_from_it(tensor_run: Path) -> None:
    write_trace(tensor_run, out=tensor_run / "trace.json")
    events = read_trace(tensor_run / "trace.json")
    waits = slices(events, "waits", 0)
    assert [e["args"]["last rank"] for e in waits] == [1, 0] * 3  # nobody is late in the second one
    assert [(a["pid"], b["pid"]) for a, b in arrows(events)] == [(1, 0)] * 3


def test_steps_option_selects_steps(tensor_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["trace", str(tensor_run), "--steps", "1:2", "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 1
    for steps, code in (("5:9", 2), ("2:1", 2), ("0:1,2:3", 2)):
        with pytest.raises(SystemExit) as exit_:
            main(["trace", str(tensor_run), "--steps", steps])
        assert exit_.value.code == code
        assert "\n" not in capsys.readouterr().err.strip()


def test_pipeline_passes_are_linked_by_stage_and_micro_batch(tmp_path: Path) -> None:
    passes = [
        ("forward", 1),
        ("sync", 2),
        ("forward", 3),
        ("sync", 4),
        ("backward", 13),
        ("sync", 14),
        ("backward", 17),
    ]
    first = {
        "phases": [["fetch", 0], *([name, 1000 * at] for name, at in passes), ["sync", 18_000]],
        "actions": [[0, 0], [0, 1], [0, 0], [0, 1]],
    }
    passes = [("forward", 6), ("sync", 7), ("backward", 8), ("sync", 9), ("forward", 10), ("backward", 12)]
    second = {
        "phases": [["fetch", 0], *([name, 1000 * at] for name, at in passes), ["sync", 15_000]],
        "actions": [[1, 0], [1, 0], [1, 1], [1, 1]],
    }
    for rank, step in enumerate((first, second)):
        log = write_rank(tmp_path, rank, {"pipeline": rank}, [step | {"end": 20_000, "waits": []}], stages=[rank])
        log.close()
    write_trace(tmp_path)
    events = read_trace(tmp_path / "trace.json.gz")
    check_format(events)
    names = [e["name"] for e in slices(events, "pipeline", 1)]
    assert names == ["forward 0", "backward 0", "forward 1", "backward 1"]
    assert slices(events, "pipeline", 1)[2]["args"] == {"step": 0, "stage": 1, "micro-batch": 1}
    base = min(e["ts"] for e in slices(events, "steps"))
    linked = [(a["pid"], round((b["ts"] - base) / 1000)) for a, b in arrows(events) if b["tid"] == 2]
    assert sorted(linked) == [(0, 6), (0, 10), (1, 13), (1, 17)]
    syncs = [e for e in slices(events, "steps") if e.get("args", {}).get("last rank") is not None]
    assert [e["args"]["last rank"] for e in syncs] == [0, 0]  # stage 0 ends its last backward pass after stage 1


def test_trace_of_a_run_without_spans_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no spans"):
        write_trace(tmp_path)


HOSTILE = [
    b"\xff\xfe garbage\n",
    b"[" * 100_000 + b"\n",
    b'{"kind":"rank","coordinates":{"a":"b","tensor":1e400},"stages":{"x":1},"clock_offset":NaN}\n',
    b'{"kind":"step","step":1,"begin":1e300,"phases":[["fetch",0]],"end":5}\n',
    b'{"kind":"step","step":1,"begin":5,"phases":[["fetch",9],["copy",3]],"end":10}\n',
    b'{"kind":"step","step":1,"begin":5,"phases":[["<script>",0]],"end":10}\n',
    b'{"kind":"step","step":-1,"begin":5,"phases":[],"end":10}\n',
    b'{"kind":"span","name":"evaluate","step":1,"begin":5,"seconds":-1}\n',
    b'{"kind":"step","step":99999999999999999999,"begin":5,"phases":[["fetch",0]],"end":10}\n',
    b'{"kind":"span","name":"evaluate","step":1,"begin":' + b"9" * 5000 + b',"seconds":1}\n',
]


def test_trace_is_not_written_through_a_link_in_the_run_folder(tensor_run: Path) -> None:
    """The folder may come from somebody else."""
    victim = tensor_run.parent / "victim"
    victim.write_text("precious")
    (tensor_run / "trace.json.gz").symlink_to(victim)
    with pytest.raises(ConfigError, match="is a symbolic link; expected a regular file"):
        write_trace(tensor_run)
    assert victim.read_text() == "precious"


def test_hostile_lines_of_spans_are_skipped(tensor_run: Path) -> None:
    write_trace(tensor_run, out=tensor_run / "clean.json")
    path = RunFolder(tensor_run).spans(0)
    path.write_bytes(path.read_bytes() + b"".join(HOSTILE) + b"x" * (3 << 20) + b"\n" + b'{"kind":"st')
    write_trace(tensor_run, out=tensor_run / "hostile.json")
    assert read_trace(tensor_run / "clean.json") == read_trace(tensor_run / "hostile.json")


@pytest.mark.parametrize(
    "content",
    [
        b"not gzip",
        gzip.compress(b"not JSON"),
        gzip.compress(b'{"traceEvents": [{"ph":"X","name":"a"'),
        gzip.compress(b'{"meshwright": {"collectives": [[1],2]}, "traceEvents": [' + b"[" * 100_000),
        gzip.compress(b'{"traceEvents": [' + b"{" * (5 << 20))[:-9],
    ],
    ids=["not gzip", "not JSON", "truncated JSON", "nested lists", "truncated gzip"],  # gzip writes the time of day
)
def test_damaged_profiles_are_a_note_in_the_trace(tensor_run: Path, content: bytes) -> None:
    RunFolder(tensor_run).profile(0, range(0, 1), 1).write_bytes(content)
    summary = write_trace(tensor_run)
    assert summary.notes
    check_format(read_trace(tensor_run / "trace.json.gz"))


def test_numbers_that_are_too_large_for_json_are_not_copied(tensor_run: Path) -> None:
    event = b'{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":1e999,"args":{"b":1e999,"c":NaN,"d":0.5}}'
    RunFolder(tensor_run).profile(0, range(0, 1), 1).write_bytes(gzip.compress(b'{"traceEvents": [' + event + b"]}"))
    write_trace(tensor_run)
    text = gzip.decompress((tensor_run / "trace.json.gz").read_bytes()).decode()
    assert '"args":{"b":null,"c":null,"d":0.5}' in text
    assert not any(word in text for word in ("Infinity", "NaN"))
