"""`prove` runs the checks, prints a table, writes a certificate, and exits 1 if a claim does not hold."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from meshwright.base.cli import main
from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.core.data.stream import Stream
from meshwright.core.recover.watchdog import Watchdog
from meshwright.core.trainer.step import Step
from meshwright.errors import ConfigError
from meshwright.prover import prove as prove_module
from meshwright.prover import recovery
from meshwright.prover.claims import Claim
from meshwright.prover.prove import CheckResult, build_certificate
from meshwright.prover.recovery import check_recovery
from meshwright.prover.stream import check_stream
from meshwright.prover.training import check_training
from tests.kit.small_run import load_cpu_config

SMALL = ["--data.kind=synthetic", "--data.samples=700", "--data.sequence=16"]
TINY = [*SMALL, "--model.layers=1", "--model.width=16", "--model.ffn=18", "--steps=3"]


def only(name, check):
    """The table of checks with a single check of a config."""
    return {name: lambda config, _full: check(config)}


def prove(path, capfd, *options):
    """Proves a config from the command line, and returns what was printed and the certificate, which are complete."""
    main(["prove", "--out", str(path), *TINY, *options])
    printed, errors = capfd.readouterr()
    certificate = json.loads(path.read_text())
    assert certificate["passed"]
    checks = certificate["checks"]
    assert {result["check"] for result in checks} == {*prove_module.CHECKS, "communication"}
    assert set(checks[0]) == {"check", "claim", "passed", "measured", "seconds", "changes", "not_proven"}
    assert f"{len(checks)} of {len(checks)} claims hold; certificate in {path}" in printed
    assert re.search(r" *check +claim +result +measured +seconds", printed)
    assert "FutureWarning" not in errors
    return printed, certificate


def test_prove_prints_a_table_and_writes_a_certificate(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(recovery, "KILL_POINTS", ("step.update", "save.after_shard", "start.restored"))
    _, certificate = prove(tmp_path / "c.json", capfd)
    killed = [result["claim"] for result in certificate["checks"] if "killed with SIGKILL" in result["claim"]]
    assert killed
    assert "3 fail points" in killed[0]


@pytest.mark.long
def test_prove_of_many_ranks_says_what_is_not_proven(tmp_path, capfd):
    printed, certificate = prove(tmp_path / "c.json", capfd, "--layout.replicate=16", "--batch.global=64")
    training = next(result for result in certificate["checks"] if result["check"] == "training")
    assert "layout.replicate 16 to 4" in training["changes"]
    assert "layout.replicate 16 to 4" in printed
    assert any("replicate parallelism of degree 16" in line for line in certificate["not_proven"])
    assert "not proven: replicate parallelism of degree 16" in printed


def test_failed_claim_exits_1(tmp_path, monkeypatch):
    monkeypatch.setattr(prove_module, "CHECKS", only("stream", check_stream))
    monkeypatch.setattr(Stream, "held_out_samples", lambda self, most: self.step(0))
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    assert stop.value.code == 1
    assert not json.loads((tmp_path / "c.json").read_text())["passed"]


def test_certificate_without_checks_does_not_pass():
    assert not build_certificate(load_cpu_config(), [], [])["passed"]
    assert build_certificate(load_cpu_config(), [CheckResult("a", "b", True, "c")], [])["passed"]


def test_run_that_fails_is_a_failed_claim(monkeypatch):
    monkeypatch.setattr(Step, "gradient", lambda *_: 1 / 0)
    claims = list(check_training(load_cpu_config(overrides=TINY)))
    assert claims
    for claim in claims:
        assert not claim.passed
        assert "ZeroDivisionError" in claim.measured


def test_check_that_hangs_is_a_failed_claim_of_the_table_and_the_certificate(tmp_path, monkeypatch, capsys):
    def hangs(_config):
        yield Claim("the first claim", True, "measured")
        raise RanksFailed([Failure(1, "Hang", "rank 1 has not advanced for 60 s", 8, 0.0)])

    monkeypatch.setattr(prove_module, "CHECKS", only("training", hangs) | only("stream", check_stream))
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    assert stop.value.code == 1
    certificate = json.loads((tmp_path / "c.json").read_text())
    failed = [result for result in certificate["checks"] if not result["passed"]]
    assert [result["measured"] for result in failed] == ["rank 1 has not advanced for 60 s"]
    assert {result["check"] for result in certificate["checks"]} == {"training", "stream"}
    assert "rank 1 has not advanced for 60 s" in capsys.readouterr().out


def test_full_proof_gives_its_size_to_the_checks(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(prove_module, "CHECKS", {"size": lambda _config, full: [sizes.append(full)] * 0})
    for flags in ([], ["--full"]):
        with pytest.raises(SystemExit):  # no claim holds
            main(["prove", "--out", str(tmp_path / "c.json"), *SMALL, *flags])
    assert sizes == [False, True]


def test_ctrl_c_during_prove_exits_130_and_keeps_the_certificate(tmp_path, monkeypatch, capsys):
    """SIGINT arrives while the supervisor of the recovery check watches the ranks."""
    (tmp_path / "c.json").write_text("an older certificate")
    monkeypatch.setattr(prove_module, "CHECKS", only("recovery", check_recovery))
    check, sent = Watchdog.check, []

    def interrupted(watchdog):
        if not sent:
            sent.append(watchdog)
            os.kill(os.getpid(), signal.SIGINT)
        return check(watchdog)

    monkeypatch.setattr(Watchdog, "check", interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), *SMALL])
    assert sent
    assert isinstance(stop.value, KeyboardInterrupt) or stop.value.code == 130
    assert (tmp_path / "c.json").read_text() == "an older certificate"


def test_prove_refuses_an_output_folder_before_the_first_check(tmp_path, monkeypatch):
    monkeypatch.setattr(prove_module, "CHECKS", only("training", lambda _config: pytest.fail("a check ran")))
    with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
        prove_module.prove(load_cpu_config(overrides=SMALL), tmp_path)


def test_config_whose_data_cannot_be_opened_gets_no_certificate(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / "c.json"), "--data.kind=text", "--data.path=/nowhere"])
    assert stop.value.code == 6
    assert not (tmp_path / "c.json").exists()
