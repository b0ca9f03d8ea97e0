"""`prove` runs the checks, writes a certificate, and fails on every seeded fault of the sample stream."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
from layout_checks import failed_claims

from meshwright.cli import main
from meshwright.config import config_from_dict, load_config
from meshwright.data.loader import Loader
from meshwright.data.permutation import Permutation
from meshwright.data.stream import Stream
from meshwright.errors import ConfigError
from meshwright.prover import prove as prove_module
from meshwright.prover.layouts import check_layouts
from meshwright.prover.prove import CheckResult, build_certificate, run_checks
from meshwright.prover.recovery import check_recovery
from meshwright.prover.scale_down import scale_model
from meshwright.prover.stream import check_stream
from meshwright.topology.layout import Layout
from meshwright.trainer.step import Step

SMALL = ["--data.kind=synthetic", "--data.samples=700", "--data.sequence=16"]
MIXTURE = [
    '--data.mixture=[{kind="synthetic", samples=300, weight=3}, {kind="synthetic", samples=90}]',
    "--data.sequence=16",
]


@pytest.mark.parametrize(
    "options", [SMALL, MIXTURE, [*SMALL, "--eval.holdout=0"], [*SMALL, "--batch.global=60", "--data.samples=61"]]
)
def test_stream_contract_holds(options):
    assert failed_claims(check_stream(load_config(overrides=options))) == []


@pytest.mark.parametrize("preset", ["tiny", "llama-405b", "mixtral-8x7b"])
def test_ddp_equals_single_process_on_two_and_four_ranks(preset):
    for ranks in (2, 4):
        config = config_from_dict({"preset": preset, "layout": {"replicate": ranks}})
        assert failed_claims(check_layouts(config)) == []


def test_scale_model_keeps_the_structure_and_describes_the_changes():
    config = config_from_dict({"preset": "llama-405b"})
    model, changes = scale_model(config, Layout(replicate=2))
    assert (model.heads, model.kv_heads, model.layers, model.tie) == (4, 1, 2, False)
    assert "layers 126 to 2" in changes
    assert scale_model(replace(config, model=model), Layout(replicate=2)) == (model, "")


def test_prove_prints_a_table_and_writes_a_certificate(tmp_path, capsys):
    main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    printed = capsys.readouterr()
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert certificate["passed"]
    checks = certificate["checks"]
    assert {result["check"] for result in checks} == {"stream", "layout", "communication", "recovery"}
    assert set(checks[0]) == {"check", "claim", "passed", "measured", "seconds"}
    assert f"{len(checks)} of {len(checks)} claims hold; certificate in {tmp_path / 'c.json'}" in printed.out
    assert re.match(r" *check +claim +result +measured +seconds", printed.out)


def test_failed_claim_exits_1(tmp_path, monkeypatch):
    monkeypatch.setattr(prove_module, "CHECKS", {"stream": check_stream})
    monkeypatch.setattr(Stream, "held_out_samples", lambda self, most: self.step(0))
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    assert stop.value.code == 1
    assert not json.loads((tmp_path / "c.json").read_text())["passed"]


def test_certificate_without_checks_does_not_pass():
    assert not build_certificate(load_config(), [])["passed"]
    assert build_certificate(load_config(), [CheckResult("a", "b", True, "c")])["passed"]


def test_check_whose_ranks_fail_has_failed(monkeypatch):
    monkeypatch.setattr(prove_module, "CHECKS", {"layout": check_layouts})
    monkeypatch.setattr(Step, "gradient", lambda *_: 1 / 0)
    [result] = run_checks(load_config(overrides=SMALL))
    assert not result.passed
    assert "ZeroDivisionError" in result.measured


def test_ctrl_c_during_prove_exits_130_and_keeps_the_certificate(tmp_path, monkeypatch, capsys):
    """SIGINT arrives while the supervisor of the recovery check watches the ranks."""
    (tmp_path / "c.json").write_text("an older certificate")
    monkeypatch.setattr(prove_module, "CHECKS", {"recovery": check_recovery})
    interrupt = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    interrupt.join()
    assert isinstance(stop.value, KeyboardInterrupt) or stop.value.code == 130
    assert (tmp_path / "c.json").read_text() == "an older certificate"


def test_prove_refuses_an_output_folder_before_the_first_check(tmp_path, monkeypatch):
    monkeypatch.setattr(prove_module, "CHECKS", {"layout": lambda _config: pytest.fail("a check ran")})
    with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
        prove_module.prove(load_config(overrides=SMALL), tmp_path)


def test_ddp_construction_shows_no_future_warning(capfd):
    assert failed_claims(check_layouts(load_config(overrides=[*SMALL, "--model.layers=1"]))) == []
    assert "FutureWarning" not in capfd.readouterr().err


def test_config_whose_data_cannot_be_opened_gets_no_certificate(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), "--data.kind=text", "--data.path=/nowhere"])
    assert stop.value.code == 6
    assert not (tmp_path / "c.json").exists()


@pytest.mark.long
def test_static_graph_and_a_tiny_source_in_a_mixture_pass():
    tiny = [
        '--data.mixture=[{kind="synthetic", samples=100_000_000}, {kind="synthetic", samples=3}]',
        "--data.sequence=16",
    ]
    assert failed_claims(check_stream(load_config(overrides=tiny))) == []
    static_graph = load_config(overrides=["--ddp.static_graph=true", "--model.layers=1"])
    assert failed_claims(check_layouts(static_graph)) == []


STREAM_FAULTS = {
    "rank slice is shifted by one": (
        Stream,
        "local_samples",
        lambda self, step, rank, degree: self.sample_ids(
            np.arange(self.global_batch // degree, dtype=np.uint64)
            + np.uint64(step * self.global_batch + rank * (self.global_batch // degree) + 1)
        ),
    ),
    "every epoch has the same order": (
        Stream,
        "_epoch_permutation",
        lambda self, index, _epoch: Permutation(self.sources[index].trained, "fixed"),
    ),
    "permutation repeats samples": (Permutation, "__call__", lambda self, x: x // np.uint64(2)),
    "held-out samples are trained on": (Stream, "held_out_samples", lambda self, most: self.step(0)),
    "loader resumes at step 0": (Loader, "_micro_batch_ids", None),
    "inverse permutation is off by one": (
        Permutation,
        "inverse",
        lambda self, y: (y + np.uint64(1)) % np.uint64(self.n),
    ),
}


@pytest.mark.parametrize("fault", STREAM_FAULTS)
def test_seeded_stream_fault_is_found(fault, monkeypatch):
    owner, name, wrong = STREAM_FAULTS[fault]
    if wrong is None:
        right = Loader._micro_batch_ids
        wrong = lambda self, first, end: right(self, 0, end - first)  # noqa: E731
    monkeypatch.setattr(owner, name, wrong)
    assert failed_claims(check_stream(load_config(overrides=SMALL))) != []
