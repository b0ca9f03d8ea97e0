"""Proves a config of one rank without starting a process: the checks of `prove`, of whose runs the first are left."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

import meshwright
from meshwright.core import faults
from meshwright.core.launch import ranks
from meshwright.core.parallel.world import World
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.loop import train_rank
from meshwright.prover import prove, training
from meshwright.prover.claims import proof_folder
from meshwright.prover.custom import proof as custom_proof
from meshwright.prover.custom import training as custom_training
from meshwright.prover.recovery import check_checkpoints
from meshwright.prover.reference import ReferenceTask
from meshwright.prover.state import proof_run
from meshwright.prover.state.recovery_configs import with_real_blocks
from meshwright.prover.stream import check as stream_check

RUNS = ("as configured", "long sequence")
"""The proof runs that are left."""
CHECKS = {"stream", "model", "schedule", "optimizer", "training", "recovery"}


class RankInProcess:
    """One rank, which runs in this process when it is made."""

    def __init__(self, function, count, args=(), *_):
        assert count == 1
        self.values = [function(World(), *map(as_after_fork, args))]

    def poll(self, _timeout):
        return True

    def kill(self):
        """It has ended."""

    def results(self):
        return self.values


def as_after_fork(value):
    """A rank changes its own copy of a model."""
    if isinstance(value, list):
        return [as_after_fork(part) for part in value]
    if isinstance(value, CustomModel):
        return copy.deepcopy(value)
    if isinstance(value, ReferenceTask) and hasattr(value, "custom"):
        return replace(value, custom=copy.deepcopy(value.custom))
    return value


def train_in_process(job):
    job.folder.attempt(1).mkdir(parents=True, exist_ok=True)
    try:
        return train_rank(replace(job, attempt=1), World())
    finally:
        faults.ARMED_FAULTS.clear()


def check_saved_states(config, subject=None):
    """The first two steps of the recovery check, with a checkpoint after each; some samples cannot be decoded."""
    with proof_folder() as folder:
        run = proof_run.RecordedRun(config, with_real_blocks(config, 2, subject is not None), folder, subject)
        run.train()
        yield check_checkpoints(run)


def failed_claims(config) -> list[str]:
    """The claims of `prove` that do not hold."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ranks, training):
            patch.setattr(module, "Ranks", RankInProcess)
        for module in (training, proof_run):
            patch.setattr(module, "supervise_quietly", train_in_process)
        for module, name in ((training, "proof_runs"), (custom_training, "custom_runs")):
            every = getattr(module, name)
            patch.setattr(module, name, lambda *args, every=every: [run for run in every(*args) if run.name in RUNS])
        for module in (prove, custom_proof):
            patch.setattr(module, "check_recovery", check_saved_states)
        claims = {claim: check for claim, check in stream_check.CLAIMS.items() if check in stream_check.NEEDS_FILES}
        patch.setattr(stream_check, "CLAIMS", claims)
        results = meshwright.prove(config)["checks"]
    assert {result["check"] for result in results} >= CHECKS
    return [f"{result['claim']}: {result['measured']}" for result in results if not result["passed"]]
