"""Tests of meshwright.core.data.prepare.prepare: documents, determinism, resuming after SIGKILL, and errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright.core.data.prepare import assemble, parts, readers, workers
from meshwright.core.data.shards import TokenShards
from meshwright.errors import BusyError, ConfigError, DataError
from tests.core.data.prepare.corpus import TEXTS, contents, documents, jsonl, prepare, save_tokenizer

FORK = multiprocessing.get_context("fork")


def test_documents_keep_their_boundaries_across_parts_and_shards(corpus, tmp_path):
    result = prepare(corpus, tmp_path / "out")
    assert documents(tmp_path / "out") == [text + "\0" for text in TEXTS]
    shards = TokenShards(tmp_path / "out")
    assert shards.lengths.tolist() == [len(text) + 1 for text in TEXTS]
    assert result["tokens"] == len(shards) == sum(map(len, TEXTS)) + len(TEXTS)
    assert result["shards"] == -(-len(shards) // 1000)
    assert {file.name for file in (tmp_path / "out").glob(".*")} == {".lock"}


def test_shards_do_not_depend_on_the_number_of_workers(corpus, tmp_path):
    for count in (1, 2, 5):
        prepare(corpus, tmp_path / str(count), workers=count)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "5")


def test_digest_does_not_depend_on_the_size_of_shards(corpus, tmp_path):
    digests = {prepare(corpus, tmp_path / str(size), shard_tokens=size)["digest"] for size in (97, 1000, 10**6)}
    assert len(digests) == 1
    assert documents(tmp_path / "97") == documents(tmp_path / "1000000")


POINTS = {"replace": os, "fsync": os, "atomic_write": assemble, "wait": workers}
"""Functions in which a process is killed -> their modules; `wait` is that of the parent of busy workers."""


def prepare_and_die(inputs, out, name, moment, count):
    """Kills this process at the call number `moment` of a function."""
    real, calls = getattr(POINTS[name], name), iter(range(1, 10**9))

    def call(*args, **kwargs):
        if next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(POINTS[name], name, call)
    prepare(inputs, out, workers=count)


KILLS = [("replace", 1, 1), ("replace", 5, 1), ("wait", 4, 3), ("fsync", 2, 2), ("atomic_write", 1, 2)]


def test_prepare_continues_after_sigkill_with_the_same_bytes(corpus, tmp_path):
    prepare(corpus, tmp_path / "whole")
    out = tmp_path / "out"
    for name, moment, count in KILLS:
        killed = FORK.Process(target=prepare_and_die, args=(corpus, out, name, moment, count))
        killed.start()
        killed.join(60)
        assert killed.exitcode == -signal.SIGKILL, name
        assert not (out / "index.json").exists()
        with pytest.raises(DataError, match=r"has no index\.json"):
            TokenShards(out)
    kept = {file.name: file.stat().st_mtime_ns for file in (out / ".parts").glob("*.part")}
    assert len(kept) >= 5
    damaged = out / ".parts" / "00000001.part"
    damaged.write_bytes(damaged.read_bytes()[:-40])  # as after a power failure
    prepare(corpus, out, workers=2)
    assert contents(out) == contents(tmp_path / "whole")


def test_finished_parts_are_not_encoded_again(corpus, tmp_path, monkeypatch):
    killed = FORK.Process(target=prepare_and_die, args=(corpus, tmp_path / "out", "atomic_write", 1, 1))
    killed.start()
    killed.join(60)
    monkeypatch.setattr("meshwright.core.data.prepare.prepare.encode_part", lambda *_: pytest.fail("encoded again"))
    prepare(corpus, tmp_path / "out")
    assert documents(tmp_path / "out") == [text + "\0" for text in TEXTS]


def test_parts_of_other_inputs_or_settings_are_not_reused(corpus, tmp_path):
    killed = FORK.Process(target=prepare_and_die, args=(corpus, tmp_path / "out", "atomic_write", 1, 1))
    killed.start()
    killed.join(60)
    corpus.write_bytes(corpus.read_bytes().replace(b"document 17", b"document 71"))
    prepare(corpus, tmp_path / "out", end_of_document="none")
    prepare(corpus, tmp_path / "expected", end_of_document="none")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def prepare_or_report(inputs, out, results):
    try:
        results.put(prepare(inputs, out, workers=2)["digest"])
    except BusyError as error:
        results.put(error.exit_code)


def test_two_commands_at_once_on_one_folder(corpus, tmp_path):
    results = FORK.Queue()
    both = [FORK.Process(target=prepare_or_report, args=(corpus, tmp_path / "out", results)) for _ in range(2)]
    for process in both:
        process.start()
    found = {results.get(timeout=60) for _ in both}
    for process in both:
        process.join(60)
    digest = prepare(corpus, tmp_path / "out")["digest"]
    assert digest in found
    assert found <= {digest, 9}
    assert documents(tmp_path / "out") == [text + "\0" for text in TEXTS]


def test_complete_folder_is_reported_and_never_overwritten(corpus, tmp_path):
    first = prepare(corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert prepare(corpus, tmp_path / "out") == first
    with pytest.raises(ConfigError, match="shards of other inputs or settings"):
        prepare(corpus, tmp_path / "out", end_of_document="none")
    with pytest.raises(ConfigError, match=r"shards of 1,000 tokens, and --shard-tokens is 500"):
        prepare(corpus, tmp_path / "out", shard_tokens=500)
    assert contents(tmp_path / "out") == before
    with pytest.raises(ConfigError, match="is not empty"):
        prepare(corpus, tmp_path)


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_damaged_shards_are_named_and_written_again(corpus, tmp_path, damage, capsys):
    out = tmp_path / "out"
    first = prepare(corpus, out)
    before, file = contents(out), out / "documents-00003.bin"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-8] + (b"" if damage == "truncated" else b"\xff" * 8))
    assert prepare(corpus, out) == first
    assert contents(out) == before
    line = capsys.readouterr().err
    assert line.startswith(f"token shard {file} ")
    assert line.endswith("; the shards are written again\n")
    prepare(corpus, out)
    assert capsys.readouterr().err == ""


def test_lines_that_cannot_be_decoded_stop_or_are_skipped_within_the_budget(tmp_path):
    lines = jsonl().splitlines()
    for number in (100, 200, 250):
        lines[number - 1] = b"{broken" if number != 200 else b'{"other": 1}'
    (tmp_path / "c.jsonl").write_bytes(b"\n".join(lines))
    for count in (1, 3):
        with pytest.raises(DataError, match=r"c\.jsonl line 100 cannot be decoded.*--bad-sample-budget"):
            prepare(tmp_path / "c.jsonl", tmp_path / "a", workers=count)
        with pytest.raises(DataError, match=r"c\.jsonl line 250 cannot be decoded"):
            prepare(tmp_path / "c.jsonl", tmp_path / "b", workers=count, bad_sample_budget=2)
    result = prepare(tmp_path / "c.jsonl", tmp_path / "c", workers=2, bad_sample_budget=3)
    assert (result["skipped"], result["documents"]) == (3, 297)


def test_full_disk_is_reported_and_leaves_finished_parts(corpus, tmp_path, monkeypatch):
    real, calls = os.replace, iter(range(10**9))

    def full(source, target):
        if next(calls) == 5:
            raise OSError(28, "No space left on device", str(target))
        return real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(corpus, tmp_path / "out")
    monkeypatch.undo()
    assert sorted(file.suffix for file in (tmp_path / "out" / ".parts").iterdir()) == [".part"] * 5
    monkeypatch.setattr(readers, "PART_BYTES", 512)
    prepare(corpus, tmp_path / "out")
    assert documents(tmp_path / "out") == [text + "\0" for text in TEXTS]


def test_worker_that_is_killed_is_an_error_with_the_place(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parts.PartFolder, "write", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match=r"a worker ended with status -9 at line \d+ or later of .*corpus\.jsonl"):
        prepare(corpus, tmp_path / "out", workers=2)
    assert not multiprocessing.active_children()


def test_ctrl_c_ends_workers_with_exit_code_130_and_keeps_finished_parts(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(jsonl(["text " * 2000] * 450))
    command = [sys.executable, "-m", "meshwright", "data", "prepare", "c.jsonl", "--out", "out", "--workers", "2"]
    command += ["--tokenizer", save_tokenizer(tmp_path / "tokenizer.json")]  # bytes would be done too soon
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out" / ".parts").glob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and to its workers
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert not (tmp_path / "out" / "index.json").exists()
    assert list((tmp_path / "out" / ".parts").glob("*.part"))


def test_workers_are_forked_while_ctrl_c_is_blocked(monkeypatch):
    def report_mask(work, pipe, *_):
        pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    monkeypatch.setattr(workers, "serve", report_mask)
    with workers.Workers(len, 2, ()) as pool:
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert [pipe.poll(30) and pipe.recv() for pipe in pool.processes] == [True, True]
