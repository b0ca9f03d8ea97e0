"""The identity of a run: what may change on resume, what is refused, and what identity.json records."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from meshwright import train
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.terminal.terminal import Terminal
from meshwright.core.optim.schedule import learning_rate
from meshwright.core.trainer.identity import (
    check_run_folder,
    code_fingerprint,
    describe_differences,
    write_run_folder,
)
from meshwright.errors import ConfigError, IdentityError, MeshwrightError


def events_of(folder, kind: str) -> list[dict]:
    return [e for e in read_events(folder / "events" / "rank-00000.jsonl") if e["kind"] == kind]


def identity_of(folder) -> dict:
    return json.loads((folder / "identity.json").read_text())


def run(folder, config, **options):
    return train(config, run=folder, quiet=True, **options)


def test_banner_shows_the_fingerprints_of_identity_json(tmp_path, small):
    config = small(steps=1, ranks=1)
    run(tmp_path / "r", config)
    [start] = events_of(tmp_path / "r", "start")
    stream = io.StringIO()
    Terminal(config, tmp_path / "r", 1, stream).show(start)
    record = identity_of(tmp_path / "r")
    shown = re.search(r"identity (\w{16})  placement (\w{16})", stream.getvalue())
    assert shown is not None
    assert shown.groups() == (record["identity_fingerprint"], record["placement_fingerprint"])


def test_extending_a_finished_run_with_a_constant_schedule_equals_one_longer_run(tmp_path, small):
    words = ("--schedule.kind=constant", "--schedule.warmup=1")
    run(tmp_path / "r", small(*words, steps=3))
    extended = run(tmp_path / "r", small(*words, steps=6))
    uninterrupted = run(tmp_path / "once", small(*words, steps=6))
    assert extended.steps == 6
    assert extended.parameters_digest == uninterrupted.parameters_digest
    assert [e["step"] for e in events_of(tmp_path / "r", "step")] == list(range(6))


def test_extending_a_finished_run_records_the_change_of_the_learning_rate(tmp_path, small):
    run(tmp_path / "r", small(steps=3, ranks=1))
    config = small(steps=6, ranks=1)
    assert run(tmp_path / "r", config).steps == 6
    [event] = events_of(tmp_path / "r", "extended")
    before, after = (learning_rate(3, steps, config.optimizer.lr, config.schedule) for steps in (3, 6))
    assert (event["step"], event["steps_before"], event["steps"]) == (3, 3, 6)
    assert (event["lr_before"], event["lr"]) == (before, after)
    assert events_of(tmp_path / "r", "step")[3]["lr"] == after
    record = identity_of(tmp_path / "r")
    assert record["identity"]["steps"] == 6
    assert record["extensions"] == [{"attempt": 2, "step": 3, "from": 3, "to": 6}]
    stream = io.StringIO()
    Terminal(config, tmp_path / "r", 2, stream).show(event)
    assert f"step 3: extended from 3 to 6 steps: learning rate {after:.3e} instead of {before:.3e}" in stream.getvalue()


def test_extending_an_interrupted_run_continues_from_its_newest_checkpoint(tmp_path, small, monkeypatch):
    words = ("--checkpoint.every=2", "--checkpoint.mode=sync")
    with monkeypatch.context() as patch:
        patch.setenv("MESHWRIGHT_FAULT", "step.forward:raise@step3")
        with pytest.raises(MeshwrightError):
            run(tmp_path / "r", small(*words, "--launch.restarts=0", steps=6, ranks=1))
    assert run(tmp_path / "r", small(*words, steps=8, ranks=1)).steps == 8
    [event] = events_of(tmp_path / "r", "extended")
    [restored] = events_of(tmp_path / "r", "restored")
    assert (event["step"], event["steps_before"], event["steps"]) == (restored["step"], 6, 8)
    assert identity_of(tmp_path / "r")["extensions"] == [{"attempt": 2, "step": 2, "from": 6, "to": 8}]


def test_extending_a_run_without_a_checkpoint_starts_at_its_first_step(tmp_path, small):
    run(tmp_path / "r", small("--checkpoint.mode=off", steps=2, ranks=1))
    assert run(tmp_path / "r", small("--checkpoint.mode=off", steps=3, ranks=1)).steps == 3
    [event] = events_of(tmp_path / "r", "extended")
    assert (event["step"], event["steps_before"], event["steps"]) == (0, 2, 3)


def test_shortening_a_run_is_refused_with_the_smallest_legal_value(tmp_path, small):
    run(tmp_path / "r", small(steps=3, ranks=1))
    before = (tmp_path / "r" / "identity.json").read_bytes()
    with pytest.raises(IdentityError) as failed:
        run(tmp_path / "r", small(steps=2, ranks=1))
    assert "steps was 3 and is 2" in str(failed.value)
    assert "steps=3 or more" in str(failed.value)
    assert (tmp_path / "r" / "identity.json").read_bytes() == before
    assert run(tmp_path / "r", small(steps=3, ranks=1)).steps == 3  # complete already


def test_fork_onto_a_checkpoint_of_another_model_leaves_identity_json_as_it_is(tmp_path, small):
    run(tmp_path / "r", small(steps=1, ranks=1))
    before = [(tmp_path / "r" / name).read_bytes() for name in ("identity.json", "run.toml")]
    with pytest.raises(IdentityError, match="another model"):
        run(tmp_path / "r", small("--model.layers=3", steps=2, ranks=1), fork=True)
    assert [(tmp_path / "r" / name).read_bytes() for name in ("identity.json", "run.toml")] == before
    assert run(tmp_path / "r", small(steps=2, ranks=1)).steps == 2


def test_fork_with_fewer_steps_than_the_checkpoint_is_refused(tmp_path, small):
    run(tmp_path / "r", small(steps=3, ranks=1))
    before = (tmp_path / "r" / "identity.json").read_bytes()
    with pytest.raises(IdentityError, match=r"newest checkpoint has 3 steps, and steps = 2 ends before it.*3 or more"):
        run(tmp_path / "r", small(steps=2, ranks=1), fork=True)
    assert (tmp_path / "r" / "identity.json").read_bytes() == before


def test_differences_show_key_and_both_values_and_content_hashes_in_words():
    before = {"seed": 0, "source[0].fingerprint": "a" * 64, "model": "1" * 16}
    now = {"seed": 5, "source[0].fingerprint": "b" * 64, "model": "2" * 16}
    assert describe_differences(before, now).split(", ") == [
        "the names or shapes of the model's parameters changed (hash 11111111 -> 22222222)",
        "seed was 0 and is 5",
        "the content of data source 0 (its files or its tokenizer) changed (hash aaaaaaaa -> bbbbbbbb)",
    ]
    assert describe_differences({}, {"source[1].fingerprint": "b" * 64}) == "data source 1 was added"
    assert describe_differences({"model.layers": 4}, {"model": "2" * 16}) == (
        "the model was the built-in model and is a custom model"
    )


def test_changed_data_is_refused_in_words(tmp_path, small):
    text = tmp_path / "text.txt"
    words = ("--data.kind=text", f"--data.path={text}", "--eval.holdout=0")
    text.write_text("to be or not to be " * 200)
    run(tmp_path / "r", small(*words, steps=1, ranks=1))
    text.write_text("to be and yet not to be " * 200)
    with pytest.raises(IdentityError, match=r"the content of data source 0 \(its files or its tokenizer\) changed"):
        run(tmp_path / "r", small(*words, steps=1, ranks=1))


def test_more_steps_are_no_difference_and_fewer_are(tmp_path):
    assert describe_differences({"steps": 3}, {"steps": 4}) == ""
    assert describe_differences({"steps": 4}, {"steps": 3}) == "steps was 4 and is 3"
    record = check_run_folder(RunFolder(tmp_path), {"identity": {"steps": 4}}, fork=0, attempt=1, newest=-1)
    assert (record["timeline"], record["extensions"]) == (1, [])
    assert not (tmp_path / "identity.json").exists()


def test_run_that_moves_to_another_kind_of_device_is_told_how_to_keep_its_precision(tmp_path):
    began = {"identity": {"steps": 4, "precision.compute": "fp32"}}
    (tmp_path / "identity.json").write_text(json.dumps(began))
    now = {"identity": {"steps": 4, "precision.compute": "bf16"}}
    with pytest.raises(IdentityError) as refused:
        check_run_folder(RunFolder(tmp_path), now, fork=0, attempt=2, newest=-1)
    assert "precision.compute was 'fp32' and is 'bf16'" in str(refused.value)
    assert "try --precision.compute=fp32 to keep the precision of the run" in str(refused.value)


LINEAGE = {"run": "r", "timeline": 1, "until": {"1": 5}, "forked_by": 0, "extensions": []}


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        "text",
        {},
        {"identity": []},
        {"identity": {"steps": "4"}},
        {"identity": {"steps": True}},
        {"identity": {}, "run": 5},
        {"identity": {}, "timeline": "1"},
        {"identity": {}, "until": []},
        {"identity": {}, "until": {"1": "5"}},
        {"identity": {}, "until": {"first": 5}},
        {"identity": {}, "extensions": [3]},
        {"identity": {}, "extensions": [{"attempt": 1}]},
    ],
)
@pytest.mark.parametrize("fork", [0, 2])
def test_odd_identity_record_is_one_line_with_exit_code_2(tmp_path, content, fork):
    (tmp_path / "identity.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"identity\.json is not a valid identity record: .*; try to put the original"
    ):
        check_run_folder(RunFolder(tmp_path), {"identity": {"steps": 4}}, fork=fork, attempt=2, newest=-1)


@pytest.mark.parametrize(
    ("content", "found"), [("[" * 5000, "levels of nesting"), (" " * (17 << 20), "is larger than")]
)
def test_nested_or_large_identity_record_is_one_line_with_exit_code_2(tmp_path, content, found):
    (tmp_path / "identity.json").write_text(content)
    with pytest.raises(ConfigError, match=f"identity.json .*{found}"):
        check_run_folder(RunFolder(tmp_path), {"identity": {"steps": 4}}, fork=0, attempt=2, newest=-1)


def test_valid_lineage_is_continued_and_long_values_are_cut(tmp_path):
    (tmp_path / "identity.json").write_text(json.dumps({"identity": {"steps": 4, "seed": "x" * 5000}} | LINEAGE))
    with pytest.raises(IdentityError) as refused:
        check_run_folder(RunFolder(tmp_path), {"identity": {"steps": 4}}, fork=0, attempt=2, newest=-1)
    assert len(str(refused.value)) < 1000
    record = check_run_folder(RunFolder(tmp_path), {"identity": {"steps": 9}}, fork=2, attempt=2, newest=7)
    assert (record["timeline"], record["until"]) == (2, {"1": 7})


def test_run_folder_on_a_full_disk_is_one_line(tmp_path, monkeypatch, small):
    def full_disk(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshwright.core.trainer.identity.atomic_write", full_disk)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_run_folder(RunFolder(tmp_path), small(), {})


def test_fingerprint_of_the_code_covers_every_area(monkeypatch):
    before, read = code_fingerprint(), Path.read_bytes
    for area in ("base", "core", "rl"):
        part = f"meshwright/{area}/"
        monkeypatch.setattr(Path, "read_bytes", lambda file, part=part: read(file) + b"#" * (part in str(file)))
        assert code_fingerprint() != before
