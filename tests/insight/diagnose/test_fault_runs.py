"""`meshwright diagnose` names the injected fault of a run first, with its place, and calls a clean run healthy."""

from __future__ import annotations

import json
import subprocess

import pytest

from meshwright.errors import ConfigError
from meshwright.insight.diagnose.api import diagnose_folder, try_first_finding
from tests.insight.diagnose.fault_runs import BIN, FAULTS, POISONED_SAMPLES, Variant, model, run_fault, step_of_sample
from tests.insight.diagnose.network_namespaces import missing_permission
from tests.insight.diagnose.synthetic_run import SyntheticRun

QUICK = ("slow loader", "slow rank in data", "skewed experts")
"""Faults that the default run of the tests injects; the others take longer, or need a quiet machine."""


def has_waited(finding):
    """Whether the verdict is that another program on this machine may have made the ranks wait for each other."""
    return (finding.cause, finding.variant) == ("not judged", "waits")


def diagnose_fault(name, folder):
    """Runs the test variant of a fault, and compares the first finding with what was injected."""
    if name == "throttled link" and (reason := missing_permission()):
        pytest.skip(reason)
    fault = FAULTS[name]
    run = run_fault(fault.test, folder)
    findings = diagnose_folder(run).findings
    if fault.cause == "healthy" and has_waited(findings[0]):  # a false verdict shows in the second run as well
        (folder / "again").mkdir()
        findings = diagnose_folder(run_fault(fault.test, folder / "again")).findings
        if has_waited(findings[0]):
            pytest.skip(f"the ranks of two clean runs have waited for each other: {findings[0].sentence}")
    first, told = findings[0], [(one.cause, one.variant, one.sentence) for one in findings]
    assert first.cause == fault.cause, told
    assert fault.variant in ("", first.variant), told
    place = dict(fault.test.place)
    if name == "poisoned sample":
        place["step"] = step_of_sample(run, POISONED_SAMPLES["test"])
    assert {key: getattr(first, key) for key in place} == place, told
    if fault.cause != "healthy":
        assert first.evidence
        assert first.change.settings or first.change.action
        assert first.check.startswith("meshwright ")


@pytest.mark.parametrize("name", QUICK)
def test_diagnosis_names_the_injected_fault(name, tmp_path):
    diagnose_fault(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in QUICK])
def test_diagnosis_names_every_injected_fault(name, tmp_path):
    diagnose_fault(name, tmp_path)


def test_there_are_twenty_faults_with_two_variants_each():
    assert len(FAULTS) == 20
    assert all(fault.development != fault.test for fault in FAULTS.values())


@pytest.mark.long
def test_trial_measures_the_change_and_leaves_the_run_folder_alone(tmp_path, monkeypatch):
    """Saves cost much more than everything else, so that noise does not matter."""
    fault = "save.before_manifest:slow=0.6"
    monkeypatch.setenv("MESHWRIGHT_FAULT", fault)
    settings = (*model(32, 1, 16, 4, 12), "--checkpoint.every=4", "--checkpoint.mode=sync")
    run = run_fault(Variant(settings, fault), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = subprocess.run(
        [str(BIN / "meshwright"), "diagnose", str(run), "--try", "--steps", "9", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    trial = json.loads(done.stdout)["trial"]
    assert trial["settings"] == ['checkpoint.mode = "async"']
    assert trial["first_step"] == 12
    assert trial["after"] < trial["predicted"] + (trial["before"] - trial["predicted"]) / 2
    assert trial["came_true"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_trial_of_a_change_of_the_numbers_needs_fork(tmp_path):

    job = SyntheticRun(tmp_path, "--model.experts=4", "--layout.expert=2")
    job.other_events = [{"kind": "experts", "step": 20, "loads": [[0, 0, 50, 50]], "dropped": [0]}]
    job.history()
    with pytest.raises(ConfigError, match="changes the numbers of the run; try --fork"):
        try_first_finding(job.folder, {})


def test_trial_of_a_finding_without_settings_says_what_to_do(tmp_path):

    job = SyntheticRun(tmp_path)
    job.phases = lambda rank, _step: {"forward": 0.1} if rank else {}
    job.history()
    with pytest.raises(
        ConfigError, match="proposes settings that change the step time; try look at that rank's device"
    ):
        try_first_finding(job.folder, {})
