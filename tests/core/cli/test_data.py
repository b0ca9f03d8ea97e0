"""Tests of `meshwright data`: which samples a step reads, computed without reading data, for past and future steps."""

from __future__ import annotations

import json
import time

import pytest

from meshwright import train
from meshwright.base.cli import main
from meshwright.core.data.sample_lookup import open_sample_lookup
from tests.kit.small_run import small_config


def run_data_verb(capsys, *args: str):
    main(["data", *args, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "run"
    train(small_config("--batch.micro=4", steps=2), run=folder, quiet=True)
    return str(folder)


def test_data_show_lists_a_step_in_global_order_and_the_samples_of_each_rank(run, capsys):
    step = run_data_verb(capsys, "show", run, "--step", "5")
    assert step["step"] == 5
    assert len(step["samples"]) == 16
    ranks = [run_data_verb(capsys, "show", run, "--step", "5", "--rank", str(r)) for r in (0, 1)]
    assert ranks[0]["samples"] + ranks[1]["samples"] == step["samples"]
    assert ranks[1]["micro_steps"] == [step["samples"][8:12], step["samples"][12:]]


def test_data_find_returns_the_step_rank_and_micro_step_of_a_sample(run, capsys):
    sample = run_data_verb(capsys, "show", run, "--step", "5")["samples"][13]
    occurrences = run_data_verb(capsys, "find", run, "--sample", str(sample))["occurrences"]
    assert (occurrences[0]["step"], occurrences[0]["rank"], occurrences[0]["micro_step"], occurrences[0]["epoch"]) == (
        5,
        1,
        1,
        0,
    )
    assert len(occurrences) == 3


def test_data_find_reports_held_out_samples(run, capsys):
    held_out = [s for s in range(500) if run_data_verb(capsys, "find", run, "--sample", str(s))["held_out"]]
    assert len(held_out) == 5


def test_data_show_takes_constant_time_at_step_100_million_of_a_trillion_samples(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[data]\nkind = "synthetic"\nsamples = 1_000_000_000_000\n[batch]\nglobal = 1024\n')
    start = time.perf_counter()
    step = run_data_verb(capsys, "show", str(file), "--step", "100000000")
    assert time.perf_counter() - start < 1.0  # no data is read and no table is built
    assert len(set(step["samples"])) == 1024
    assert max(step["samples"]) > 10**11


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "RUN", "--step", "-1"], "--step -1 is negative"),
        (["show", "RUN", "--step", "0", "--rank", "2"], "--rank 2: the run has 2 rank(s)"),
        (["show", "RUN"], "--step"),
        (["show", "/nowhere", "--step", "0"], "/nowhere does not exist"),
        (["find", "RUN", "--sample", "500"], "sample 500 is not in the stream"),
        (["find", "RUN", "--sample", "x"], "--sample"),
    ],
)
def test_invalid_arguments_of_data_are_one_line_with_exit_code_2_or_6(run, args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", *[run if arg == "RUN" else arg for arg in args]])
    err = capsys.readouterr().err
    assert stop.value.code in (2, 6)
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"stream": {"seed": 0, "global_batch": 0, "sources": []}}', '{"stream": 3}']
)
def test_invalid_identity_file_is_named_in_the_error(content, capsys, tmp_path):
    (tmp_path / "identity.json").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["data", "show", str(tmp_path), "--step", "0"])
    assert stop.value.code == 2
    assert "identity.json" in capsys.readouterr().err


def test_tensor_parallel_ranks_read_the_same_samples(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[data]\nkind = "synthetic"\nsamples = 500\n[layout]\nshard = "parameters"\ntensor = 2\n')
    lookup = open_sample_lookup(file)
    shown = [lookup.show(3, rank)["samples"] for rank in range(4)]
    assert shown[0] == shown[1] != shown[2] == shown[3]
    assert shown[0] + shown[2] == lookup.show(3)["samples"]
    assert lookup.find(shown[2][0], 1)["occurrences"][0]["rank"] == 2
