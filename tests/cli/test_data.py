"""`meshwright data`: from the contract alone, at once, at any distance, past or future."""

from __future__ import annotations

import json
import time

import pytest

from meshwright import train
from meshwright.cli import main
from meshwright.data.sample_lookup import open_sample_lookup


def answer(capsys, *words: str):
    main(["data", *words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def run(tmp_path, small):
    train(small("--batch.micro=4", steps=2), run=tmp_path / "r", quiet=True)
    return str(tmp_path / "r")


def test_show_gives_a_step_in_global_order_and_a_rank_its_part(run, capsys):
    whole = answer(capsys, "show", run, "--step", "5")
    assert whole["step"] == 5
    assert len(whole["samples"]) == 16
    ranks = [answer(capsys, "show", run, "--step", "5", "--rank", str(r)) for r in (0, 1)]
    assert ranks[0]["samples"] + ranks[1]["samples"] == whole["samples"]
    assert ranks[1]["micro_steps"] == [whole["samples"][8:12], whole["samples"][12:]]


def test_find_leads_back_to_the_step_rank_and_micro_step(run, capsys):
    sample = answer(capsys, "show", run, "--step", "5")["samples"][13]
    places = answer(capsys, "find", run, "--sample", str(sample))["occurrences"]
    assert (places[0]["step"], places[0]["rank"], places[0]["micro_step"], places[0]["epoch"]) == (5, 1, 1, 0)
    assert len(places) == 3


def test_a_held_out_sample_is_said_to_be(run, capsys):
    held = [s for s in range(500) if answer(capsys, "find", run, "--sample", str(s))["held_out"]]
    assert len(held) == 5


def test_a_trillion_samples_at_step_a_hundred_million_is_instant(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[data]\nkind = "synthetic"\nsamples = 1_000_000_000_000\n[batch]\nglobal = 1024\n')
    start = time.perf_counter()
    found = answer(capsys, "show", str(file), "--step", "100000000")
    assert time.perf_counter() - start < 1.0  # there is nothing to wait for: no data, no table
    assert len(set(found["samples"])) == 1024
    assert max(found["samples"]) > 10**11


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "RUN", "--step", "-1"], "--step -1 is negative"),
        (["show", "RUN", "--step", "0", "--rank", "2"], "--rank 2: the run has 2 rank(s)"),
        (["show", "RUN"], "--step"),
        (["show", "/nowhere", "--step", "0"], "/nowhere does not exist"),
        (["find", "RUN", "--sample", "500"], "sample 500 is not in the stream"),
        (["find", "RUN", "--sample", "x"], "--sample"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(run, words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", *[run if word == "RUN" else word for word in words]])
    err = capsys.readouterr().err
    assert stop.value.code in (2, 6)
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"stream": {"seed": 0, "global_batch": 0, "sources": []}}', '{"stream": 3}']
)
def test_a_broken_identity_is_named_not_a_stack_trace(run, content, capsys, tmp_path):
    (tmp_path / "r" / "identity.json").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["data", "show", run, "--step", "0"])
    assert stop.value.code == 2
    assert "identity.json" in capsys.readouterr().err


def test_ranks_that_differ_on_tensor_alone_show_the_same_samples(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[data]\nkind = "synthetic"\nsamples = 500\n[layout]\nshard = "parameters"\ntensor = 2\n')
    contract = open_sample_lookup(file)
    shown = [contract.show(3, rank)["samples"] for rank in range(4)]
    assert shown[0] == shown[1] != shown[2] == shown[3]
    assert shown[0] + shown[2] == contract.show(3)["samples"]
    assert contract.find(shown[2][0], 1)["occurrences"][0]["rank"] == 2
