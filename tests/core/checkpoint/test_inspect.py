"""Tests of `meshwright checkpoint`: list, verify, digest and diff."""

from __future__ import annotations

import json

import pytest

from meshwright import train
from meshwright.base.cli import main
from tests.kit.small_run import small_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    saving = ("--checkpoint.every=2", "--checkpoint.seconds=0", "--checkpoint.mode=sync")
    for name, ranks, seed in (("one", 1, 0), ("two", 2, 0), ("other", 2, 1)):
        config = small_config(*saving, f"--seed={seed}", "--precision.compute=fp64", steps=4, ranks=ranks)
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
