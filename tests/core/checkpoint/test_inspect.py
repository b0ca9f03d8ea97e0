"""Tests of `meshwright checkpoint`: list, verify, digest and diff."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshwright import train
from meshwright.base.checkpoint.format.canonical import canonical_digest, parse, recorded_digest, serialize
from meshwright.base.cli import main
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from tests.kit.small_run import small_config

SAVING = ("--checkpoint.every=2", "--checkpoint.seconds=0", "--checkpoint.mode=sync")
NEWEST = Path("checkpoints", "step-00000004.a0001")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    for name, ranks, seed in (("one", 1, 0), ("two", 2, 0), ("other", 2, 1)):
        config = small_config(*SAVING, f"--seed={seed}", "--precision.compute=fp64", steps=4, ranks=ranks)
        train(config, run=base / name, quiet=True)
    return base


def run_command(capsys, *args):
    code = 0
    try:
        main(["checkpoint", *map(str, args)])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_checkpoint_list_is_newest_first(runs, capsys):
    code, output = run_command(capsys, "list", runs / "two")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == ["step-00000004.a0001", "step-00000002.a0001"]
    assert "replicate 2" in output
    rows = json.loads(run_command(capsys, "list", runs / "two", "--json")[1])["checkpoints"]
    assert rows[0]["parent"] == rows[1]["digest"]


def test_checkpoint_verify_reports_damage_and_exits_4(runs, capsys):
    assert run_command(capsys, "verify", runs / "other") == (
        0,
        "step-00000004.a0001  intact\nstep-00000002.a0001  intact\n",
    )
    shard = runs / "other" / "checkpoints" / "step-00000004.a0001" / "rank-00001.shard"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        code, output = run_command(capsys, "verify", runs / "other")
        assert code == 4
        assert "step-00000004.a0001  DAMAGED  rank-00001.shard chunk 0: expected " in output
        assert run_command(capsys, "verify", runs / "other", "--step", "2")[0] == 0
        code, output = run_command(capsys, "digest", runs / "other")
        assert code == 4
        assert "is damaged" in output
    finally:
        shard.write_bytes(content)


def test_checkpoint_digest_is_of_one_step(runs, capsys):
    digests = {run_command(capsys, "digest", runs / "two", "--step", step)[1] for step in (2, 4)}
    assert len(digests) == 2
    folder = runs / "two" / "checkpoints" / "step-00000002.a0001"
    assert run_command(capsys, "digest", folder)[1] == run_command(capsys, "digest", runs / "two", "--step", "2")[1]


def test_checkpoint_diff_lists_the_tensors_that_differ(runs, capsys):
    code, output = run_command(capsys, "diff", runs / "two", runs / "two")
    assert (code, output) == (0, "step-00000004.a0001 and step-00000004.a0001 have the same tensors\n")
    code, output = run_command(capsys, "diff", runs / "two", runs / "other")
    assert code == 1
    assert "model/decoder.embedding.weight: " in output or "model/" in output
    assert "elements; largest" in output
    code, output = run_command(capsys, "diff", runs / "one", runs / "two", "--json")
    found = json.loads(output)["differences"]
    assert all(difference["largest"] < 1e-12 for difference in found)  # float64, in another order of summation


@pytest.mark.parametrize("args", [("list",), ("verify",), ("digest",), ("digest", "--step", "77")])
def test_missing_checkpoint_is_a_one_line_error(runs, tmp_path, capsys, args):
    verb, *rest = args
    where = runs / "two" if rest else tmp_path / "nowhere"
    code, output = run_command(capsys, verb, where, *rest)
    assert code in (2, 4)
    assert len(output.splitlines()) == 1


def rewrite(path, change):
    """Changes the values of a manifest or of a part, with a digest that fits."""
    values, _ = parse(path.read_bytes(), path.name)
    change(values)
    content = serialize(values, canonical_digest(values))
    path.write_bytes(content)
    return content


def without(*keys):
    """A change of the manifest: the values without a key."""

    def change(values):
        *tables, last = keys
        for key in tables:
            values = values[key]
        del values[last]

    return change


def replaced(table, key, value):
    return lambda values: values[table].update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("schedule", "lr"), "the field schedule.lr, found none"),
        (replaced("schedule", "lr", "0.1"), "a value of schedule.lr that a run writes, found '0.1'"),
        *[(without("data", key), f"data.{key}") for key in ("step", "position", "epoch", "next")],
        *[(without("counters", key), f"counters.{key}") for key in ("bad_samples", "skipped", "in_a_row", "loss")],
        (without("counters", "evaluations"), "counters.evaluations"),
        (replaced("counters", "evaluations", [[1]]), "counters.evaluations"),
        (without("rng", "data/0"), "rng.data/0"),
        (replaced("rng", "data/0", 10**25), "rng.data/0"),
        (replaced("data", "step", 3), "data.step = 4, the step of the checkpoint"),
        (replaced("scaler", "scale", 1.0), "scaler.finite_steps"),
        (replaced("identity", "precision.compute", "fp16"), "scaler.scale"),
        (replaced("identity", "steps", "4"), "identity.steps"),
    ],
)
def test_checkpoint_with_digests_that_no_run_can_resume_from_is_damaged(runs, tmp_path, capsys, change, message):
    run = shutil.copytree(runs / "two", tmp_path / "run")
    rewrite(run / NEWEST / "manifest.json", change)
    code, output = run_command(capsys, "verify", run)
    assert code == 4
    assert "step-00000004.a0001  DAMAGED  manifest.json: expected " in output
    assert message in output
    assert "step-00000002.a0001  intact" in output


@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.part.json"])
def test_resume_skips_what_verify_reports(runs, tmp_path, capsys, file):
    run = shutil.copytree(runs / "two", tmp_path / "run")
    if file == "manifest.json":
        rewrite(run / NEWEST / file, without("schedule", "lr"))
    else:
        content = rewrite(run / NEWEST / file, without("state", "noise", "signal"))
        record = {"size": len(content), "digest": recorded_digest(content)}
        rewrite(run / NEWEST / "manifest.json", lambda values: values["parts"][file].update(record))
    code, output = run_command(capsys, "verify", run)
    assert (code, f"step-00000004.a0001  DAMAGED  {file}: expected the field " in output) == (4, True)
    train(small_config(*SAVING, "--seed=0", "--precision.compute=fp64", steps=4), run=run, quiet=True)
    events = list(read_events(RunFolder(run).events(0)))
    assert [event["step"] for event in events if event["kind"] == "restored"] == [2]
    assert [event["checkpoint"] for event in events if event["kind"] == "damaged"] == ["step-00000004.a0001"]
