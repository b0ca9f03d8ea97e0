"""Every seeded fault of checkpoints and restarts is found by the recovery check, by the claim that it breaks."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from meshwright.core.faults import FAIL_POINTS
from meshwright.prover import recovery
from meshwright.prover.recovery import check_damage_and_reshard, check_kills, check_recovery
from meshwright.prover.state.checkpoint_content import CheckpointContent
from meshwright.prover.state.large_files import check_large_files
from meshwright.prover.state.proof_run import RecordedRun
from meshwright.prover.state.shard_regions import check_real_layout, compare_regions
from tests.kit.small_run import SMALL, load_cpu_config
from tests.prover.recovery_faults import DAMAGED, FAULTS, KILLS

FEW_KILLS = ("step.update", "save.after_shard", "start.restored")


def config_with(*options: str):
    return load_cpu_config(overrides=[*SMALL, "--layout.replicate=1", *options])


def failed_claims(claims):
    return [(claim, measured) for claim, passed, measured, *_ in claims if not passed]


def run_part(part: str, config, base: Path):
    """The claims of one part of the check, as they are made."""
    if part == KILLS:
        yield from check_kills(config, base)
    elif part == DAMAGED:
        yield from check_damage_and_reshard(config, base / "resharded")
    else:
        yield check_large_files()


QUICK = (
    "staging by reference",
    "moments are not restored",
    "resume skips one step of the stream",
    "attempt starts from step 0 although a checkpoint exists",
    "evaluations after a restart are not recorded",
    "retention keeps one checkpoint",
    "digest covers the first chunk only",
    "resharding reads the region from its start",
    "another layout restores an older checkpoint",
    "reads wrap at four gib",
)
"""At least one fault of every claim; the others take minutes."""


def test_quick_faults_cover_every_claim():
    assert {FAULTS[name].claim for name in QUICK} == {fault.claim for fault in FAULTS.values()}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAULTS]
)
def test_seeded_recovery_fault_is_found_by_its_own_claim(name, monkeypatch, tmp_path):
    """The claims before it hold: one fault does not break the claims about something else."""
    fault = FAULTS[name]
    monkeypatch.setattr(recovery, "KILL_POINTS", FEW_KILLS)
    fault.inject(monkeypatch)
    for claim, passed, measured, *_ in run_part(fault.part, config_with(*fault.options), tmp_path):
        if fault.claim in claim:
            assert not passed, f"not found: {measured}"
            assert fault.expected in measured, measured
            return
        assert passed, f"{claim}: {measured}"
    pytest.fail(f"no claim contains {fault.claim!r}")


CLEAN = {
    "DDP, async": ("--layout.replicate=2",),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("options", CLEAN.values(), ids=CLEAN)
def test_recovery_check_has_no_false_alarm(options, monkeypatch):
    monkeypatch.setattr(recovery, "KILL_POINTS", FEW_KILLS)
    claims = list(check_recovery(config_with(*options)))
    assert failed_claims(claims) == []
    assert len(claims) == 15


LONG = {
    "FSDP, sync, fp16": ("--layout.replicate=2", "--layout.shard=parameters", "--precision.compute=fp16",
                         "--checkpoint.mode=sync"),
    "one rank, 12 blocks": ("--model.layers=12",),
    "tensor": ("--layout.tensor=2",),
    "pipeline, tied": ("--layout.pipeline=2", "--model.tie=true", "--batch.micro=4"),
    "experts, offload": ("--layout.replicate=2", "--layout.shard=parameters", "--model.experts=4", "--layout.expert=2",
                         "--model.router_bias_rate=0.01", "--optimizer.cpu_offload=true"),
    "hybrid": ("--layout.replicate=2", "--layout.shard=parameters", "--layout.pipeline=2", "--batch.micro=4"),
    "context": ("--layout.context=2",),
    "off": ("--layout.replicate=2", "--checkpoint.mode=off"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("options", LONG.values(), ids=LONG)
def test_recovery_check_has_no_false_alarm_on_other_axes(options):
    assert failed_claims(check_recovery(config_with(*options))) == []


def test_run_is_killed_at_every_fail_point():
    """A preflight precedes the run, and only a run of reinforcement learning has rollouts, generators and policies."""
    others = ("preflight.", "rollout.", "generator.", "policy.")
    assert sorted(recovery.KILL_POINTS) == sorted(point for point in FAIL_POINTS if not point.startswith(others))


def test_disk_or_limit_that_is_too_small_for_large_files_is_a_failed_claim():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        _, passed, measured, *_ = check_large_files()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not passed
    assert "cannot be written" in measured
    assert "File too large" in measured


def test_tensor_that_a_checkpoint_lacks_is_a_problem(tmp_path):
    (tmp_path / "manifest.json").write_text('{"tensors": {}, "files": {}}')
    problems = list(compare_regions(CheckpointContent(tmp_path), config_with()))
    assert "model/decoder.embedding.weight is missing" in problems


@pytest.mark.parametrize(("overtaken", "claimed"), [(0, False), (3, True)])
def test_overtaken_writer_is_claimed_only_if_it_was_observed(overtaken, claimed, monkeypatch, tmp_path):
    run = RecordedRun(config_with(), config_with(), tmp_path)
    monkeypatch.setattr(recovery, "published_checkpoints", lambda root: [CheckpointContent(tmp_path / "step-1.a0001")])
    monkeypatch.setattr(recovery, "compare_with_memory", lambda *args: [])
    monkeypatch.setattr(recovery, "compare_regions", lambda *args: [])
    monkeypatch.setattr(recovery, "overtaken_checkpoints", lambda run, delay: overtaken)
    claim, passed, measured, *_ = recovery.check_checkpoints(run, delay=7.0)
    assert passed
    assert ("updates overtake the writer" in claim) == claimed
    assert ("was not observed with a writer 7 s late" in measured) != claimed


@pytest.mark.parametrize(
    ("replicas", "text"),
    [(4, "the files of 4 ranks were compared, the largest"), (256, "of 8 ranks were compared, without")],
)
def test_claim_about_the_real_layout_says_what_was_compared(replicas, text):
    _, passed, measured, *_ = check_real_layout(config_with(f"--layout.replicate={replicas}", "--batch.global=256"))
    assert passed, measured
    assert text in measured


def test_rank_that_hangs_is_a_failed_claim_that_names_rank_step_and_phase(monkeypatch, tmp_path):
    config = config_with("--layout.replicate=2", "--launch.hang_timeout=3")
    right = recovery.nonfinite_faults
    monkeypatch.setattr(recovery, "nonfinite_faults", lambda: right() + ",step.forward:rank1:hang@step4")
    [(claim, passed, measured, *_)] = check_kills(config, tmp_path)
    assert "an undisturbed run completes" in claim
    assert not passed
    assert "rank 1 has made no progress" in measured
    assert "step 4, forward" in measured
