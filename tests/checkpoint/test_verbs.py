"""`meshwright checkpoint` as a user types it: list, verify, digest, diff."""

from __future__ import annotations

import json

import pytest
from small_run import small_config

from meshwright import train
from meshwright.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("verbs")
    saving = ("--checkpoint.every=2", "--checkpoint.seconds=0", "--checkpoint.mode=sync")
    for name, ranks, seed in (("one", 1, 0), ("two", 2, 0), ("other", 2, 1)):
        config = small_config(*saving, f"--seed={seed}", "--precision.compute=fp64", steps=4, ranks=ranks)
        train(config, run=base / name, quiet=True)
    return base


def say(capsys, *words):
    code = 0
    try:
        main(["checkpoint", *map(str, words)])
    except SystemExit as done:
        code = done.code
    said = capsys.readouterr()
    return code, said.out + said.err


def test_list_shows_every_checkpoint_newest_first(runs, capsys):
    code, said = say(capsys, "list", runs / "two")
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()] == ["step-00000004.a0001", "step-00000002.a0001"]
    assert "replicate 2" in said
    rows = json.loads(say(capsys, "list", runs / "two", "--json")[1])["checkpoints"]
    assert rows[0]["parent"] == rows[1]["digest"]


def test_verify_names_damage_and_exits_4(runs, capsys):
    assert say(capsys, "verify", runs / "other") == (
        0,
        "step-00000004.a0001  intact\nstep-00000002.a0001  intact\n",
    )
    shard = runs / "other" / "checkpoints" / "step-00000004.a0001" / "rank-00001.shard"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        code, said = say(capsys, "verify", runs / "other")
        assert code == 4
        assert "step-00000004.a0001  DAMAGED  rank-00001.shard chunk 0: expected " in said
        assert say(capsys, "verify", runs / "other", "--step", "2")[0] == 0
        code, said = say(capsys, "digest", runs / "other")
        assert code == 4
        assert "is damaged" in said
    finally:
        shard.write_bytes(content)


def test_a_digest_is_of_one_state_at_one_step(runs, capsys):
    digests = {say(capsys, "digest", runs / "two", "--step", step)[1] for step in (2, 4)}
    assert len(digests) == 2
    folder = runs / "two" / "checkpoints" / "step-00000002.a0001"
    assert say(capsys, "digest", folder)[1] == say(capsys, "digest", runs / "two", "--step", "2")[1]


def test_diff_names_the_tensors_that_differ_and_by_how_much(runs, capsys):
    code, said = say(capsys, "diff", runs / "two", runs / "two")
    assert (code, said) == (0, "step-00000004.a0001 and step-00000004.a0001 have the same tensors\n")
    code, said = say(capsys, "diff", runs / "two", runs / "other")
    assert code == 1
    assert "model/decoder.embedding.weight: " in said or "model/" in said
    assert "elements; largest" in said
    code, said = say(capsys, "diff", runs / "one", runs / "two", "--json")
    found = json.loads(said)["differences"]
    assert all(difference["largest"] < 1e-12 for difference in found)  # float64, another order of sums


@pytest.mark.parametrize("words", [("list",), ("verify",), ("digest",), ("digest", "--step", "77")])
def test_what_is_not_there_is_told_in_one_line(runs, tmp_path, capsys, words):
    verb, *rest = words
    where = runs / "two" if rest else tmp_path / "nowhere"
    code, said = say(capsys, verb, where, *rest)
    assert code in (2, 4)
    assert len(said.splitlines()) == 1
