"""Schedules of faults on simulated hosts, under the real supervisor protocol."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulated_hosts.faults import FAULTS
from tests.simulated_hosts.schedule import run_schedule

SEEDS = range(100)


@pytest.fixture(scope="module")
def results():
    return [run_schedule(seed) for seed in SEEDS]


def test_schedules_of_faults_keep_every_invariant(results):
    assert [(result.seed, str(violation)) for result in results for violation in result.violations] == []


def test_schedules_contain_every_fault_and_outcome(results):
    struck = {fault.partition(" at ")[0] for result in results for fault in result.faults}
    assert {name.partition(" at ")[0] for name in FAULTS} | {"SIGTERM", "lose a host for good"} <= struck
    assert {0, 8, 143} <= {code for result in results for code in result.exit_codes}
    assert max(result.attempts for result in results) > 3


def test_seed_repeats_a_schedule_exactly():
    first, second = run_schedule(7, trace=True), run_schedule(7, trace=True)
    assert first == second
    assert len(first.trace) > 10
    assert run_schedule(8, trace=True).trace != first.trace


def test_command_prints_schedules_per_minute_and_replays_a_seed():
    command = [sys.executable, "-m", "tests.simulated_hosts"]
    many = subprocess.run([*command, "--seeds", "3"], capture_output=True, text=True, timeout=60, check=True)
    assert "3 schedules" in many.stdout
    assert "violations: none" in many.stdout
    one = subprocess.run([*command, "--seed", "7", "--trace"], capture_output=True, text=True, timeout=60, check=True)
    assert "takes the lease of attempt 1" in one.stdout
    assert "seed 7: Scenario(" in one.stdout


@pytest.mark.long
def test_ten_thousand_schedules_keep_every_invariant():
    failed = [seed for seed in range(1000, 11000) if run_schedule(seed).violations]
    assert failed == [], "repeat with python -m tests.simulated_hosts --seed N --trace"
