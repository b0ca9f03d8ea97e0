"""The verb and the function: what a user types and gets, and what is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed as dist

import meshwright
from meshwright.cli import main
from meshwright.config import load_config
from meshwright.errors import ConfigError
from meshwright.simulator.fake_ddp import bucket_counts

SMALL = ["--model.vocab=64", "--model.width=32", "--model.heads=4", "--model.ffn=48", "--data.sequence=16"]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []  # no run folder, nothing else either


def told(capsys, *words: str):
    main(["simulate", *SMALL, *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_verb_tells_what_every_chosen_rank_sends_and_holds(empty, capsys):
    words = ["--ranks", "64", "--layout.shard=parameters", "--batch.global=64", "--model.layers=9"]
    answer = told(capsys, *words, "--rank", "3", "63")
    assert answer["ranks"] == 64
    assert [rank["rank"] for rank in answer["found"]] == [3, 63]
    for rank in answer["found"]:
        assert {(row["axis"], row["collective"]) for row in rank["traffic"]} == {
            ("control", "all_reduce"),
            ("shard", "all_gather"),
            ("shard", "reduce_scatter"),
        }
        assert rank["peak_total"] == sum(rank["at_peak"].values()) > 0
        assert rank["multiplied"] == ["3 and 4 blocks a stage gone through, for 9"]
    main(["simulate", *SMALL, *words])
    shown = capsys.readouterr().out
    assert "shard 64 = 64 ranks" in shown
    assert "reduce_scatter" in shown


def test_of_a_pipeline_both_ends_and_every_rank_s_micro_batches_are_told(empty, capsys):
    answer = told(capsys, "--ranks", "8", "--layout.pipeline=4", "--batch.micro=1", "--model.layers=4")
    assert [rank["rank"] for rank in answer["found"]] == [0, 6]
    assert answer["live"] == [4, 3, 2, 1]
    assert [rank["max_in_flight"] for rank in answer["found"]] == [4, 1]


def test_the_function_is_the_verb_and_leaves_no_process_group(empty):
    found = meshwright.simulate(load_config(overrides=SMALL), ranks=4, rank=[1])
    assert found.found[0].rank == 1
    assert any("DDP" in note for note in found.notes)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "9", "--layout.tensor=2"], "9 ranks do not divide over tensor 2; allowed: 8 or 10 ranks"),
        (["--ranks", "6", "--layout.tensor=3"], "tensor does not divide model.kv_heads"),
        (["--ranks", "1024"], "batch.global = 16 does not divide over data-parallel degree 1024"),
        (["--ranks", "2", "--rank", "2"], "rank 2 is none of the layout replicate 2; allowed: from 0 to 1"),
        (["--ranks", "many"], "--ranks = many has the wrong type"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(empty, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *SMALL, *words])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_what_torch_refuses_is_one_line_too(monkeypatch):
    from meshwright.simulator import simulate

    def refuse(*_args):
        raise RuntimeError("Stages do not meet\n  at dawn")

    monkeypatch.setattr(simulate, "run_second_step", refuse)
    with pytest.raises(ConfigError, match=r"layout replicate 2, rank 0: torch does not build it: Stages do not meet; "):
        meshwright.simulate(load_config(overrides=SMALL))


def test_an_interrupt_ends_it_cleanly(monkeypatch):
    from meshwright.simulator import simulate

    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run_second_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        meshwright.simulate(load_config(overrides=SMALL))
    assert not dist.is_initialized()


def test_its_name_is_there_without_torch():
    code = "import sys, meshwright.observe.simulation_text, meshwright.api; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bucket_is_full_when_it_holds_as_much_as_it_may():
    assert bucket_counts([4, 4, 4, 4, 4], 8) == [2, 2, 1]
    assert bucket_counts([4, 9, 4], 8) == [2, 1]
    assert bucket_counts([], 8) == []
