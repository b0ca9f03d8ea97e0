"""Proof that can fail: the contracts hold on real configs, and every seeded fault is caught and named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.config import config_from_dict, load_config
from meshwright.data.loader import Loader
from meshwright.data.permutation import Permutation
from meshwright.data.stream import Stream
from meshwright.prover.layouts import check_layouts
from meshwright.prover.prove import CheckResult, build_certificate, run_checks
from meshwright.prover.scale_down import scale_model
from meshwright.prover.stream import check_stream
from meshwright.topology.layout import Layout
from meshwright.trainer.step import Step

SMALL = ["--data.kind=synthetic", "--data.samples=700", "--data.sequence=16"]
MIXTURE = [
    '--data.mixture=[{kind="synthetic", samples=300, weight=3}, {kind="synthetic", samples=90}]',
    "--data.sequence=16",
]


def broken(check, config) -> str:
    return "; ".join(f"{promise}: {measured}" for promise, kept, measured in check(config) if not kept)


@pytest.mark.parametrize(
    "words", [SMALL, MIXTURE, [*SMALL, "--eval.holdout=0"], [*SMALL, "--batch.global=60", "--data.samples=61"]]
)
def test_the_stream_contract_holds(words):
    assert broken(check_stream, load_config(overrides=words)) == ""


@pytest.mark.parametrize("preset", ["tiny", "llama-405b", "mixtral-8x7b"])
def test_gradients_hold_for_every_kind_of_model_on_two_and_four_ranks(preset):
    for ranks in (2, 4):
        config = config_from_dict({"preset": preset, "layout": {"replicate": ranks}})
        assert broken(check_layouts, config) == ""


def test_a_model_is_scaled_down_in_size_not_in_structure_and_that_is_said():
    config = config_from_dict({"preset": "llama-405b"})
    model, said = scale_model(config, Layout(replicate=2))
    assert (model.heads, model.kv_heads, model.layers, model.tie) == (4, 1, 2, False)
    assert "layers 126 to 2" in said
    assert scale_model(replace(config, model=model), Layout(replicate=2)) == (model, "")


def test_prove_prints_a_table_and_writes_a_certificate(tmp_path, capsys):
    main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    said = capsys.readouterr().out
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert certificate["kept"]
    assert {f["check"] for f in certificate["findings"]} == {"stream", "layout", "traffic", "recovery"}
    assert f"{len(certificate['findings'])} of {len(certificate['findings'])} promises kept" in said


def test_a_broken_promise_exits_1(tmp_path, monkeypatch):
    monkeypatch.setattr(Stream, "held_out_samples", lambda self, most: self.step(0))
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    assert stop.value.code == 1
    assert not json.loads((tmp_path / "c.json").read_text())["kept"]


def test_a_certificate_without_findings_is_worth_nothing():
    assert not build_certificate(load_config(), [])["kept"]
    assert build_certificate(load_config(), [CheckResult("a", "b", True, "c")])["kept"]


def test_ranks_that_fail_inside_a_check_are_a_broken_promise(monkeypatch):
    monkeypatch.setattr(Step, "gradient", lambda *_: 1 / 0)
    found = list(run_checks(load_config(overrides=SMALL)))
    assert [f.kept for f in found if f.check == "layout"] == [False]
    assert "ZeroDivisionError" in found[-1].measured


def test_a_config_whose_data_cannot_be_opened_is_refused_not_certified(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), "--data.kind=text", "--data.path=/nowhere"])
    assert stop.value.code == 6
    assert not (tmp_path / "c.json").exists()


@pytest.mark.long
def test_a_static_graph_and_a_tiny_source_in_a_mixture_are_proven_too():
    tiny = [
        '--data.mixture=[{kind="synthetic", samples=100_000_000}, {kind="synthetic", samples=3}]',
        "--data.sequence=16",
    ]
    assert broken(check_stream, load_config(overrides=tiny)) == ""
    assert broken(check_layouts, load_config(overrides=["--ddp.static_graph=true", "--model.layers=1"])) == ""


STREAM_FAULTS = {
    "a slice shifted by one": (
        Stream,
        "slice",
        lambda self, step, c, r: self.at(
            np.arange(self.global_batch // r, dtype=np.uint64)
            + np.uint64(step * self.global_batch + c * (self.global_batch // r) + 1)
        ),
    ),
    "every epoch in one order": (
        Stream,
        "_epoch",
        lambda self, index, _epoch: Permutation(self.parts[index].trained, "fixed"),
    ),
    "a permutation that repeats": (Permutation, "__call__", lambda self, x: x // np.uint64(2)),
    "held-out samples trained on": (Stream, "held_out_samples", lambda self, most: self.step(0)),
    "a loader that resumes at the epoch's start": (Loader, "_micro_batch_ids", None),
    "an inverse that is off by one": (Permutation, "inverse", lambda self, y: (y + np.uint64(1)) % np.uint64(self.n)),
}


@pytest.mark.parametrize("fault", STREAM_FAULTS)
def test_a_seeded_fault_of_the_stream_is_caught(fault, monkeypatch):
    owner, name, wrong = STREAM_FAULTS[fault]
    if wrong is None:
        right = Loader._micro_batch_ids
        wrong = lambda self, first, end: right(self, 0, end - first)  # noqa: E731
    monkeypatch.setattr(owner, name, wrong)
    assert broken(check_stream, load_config(overrides=SMALL)) != ""
