"""The proof of rollouts: a killed run keeps the contract, and a seeded bug makes the claim about it fail."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from meshwright.prover.policy.proof import policy_checks, policy_not_proven, require_built_in_policy
from meshwright.prover.policy.rollouts import check_killed_rollouts
from meshwright.rl.queue.rollout_queue import RolloutQueue
from tests.prover.policy.policy_claims import failed_claims, policy_config

pytestmark = pytest.mark.timeout(200)

TRAINED_ONCE = "each rollout is trained at most once"
LINEAGE = "no step trains a rollout of a policy that a restart has lost"
CONSERVATION = "generated = trained + dropped by cause + in flight"


def test_a_run_killed_at_every_point_keeps_the_contract(tmp_path):
    claims = list(check_killed_rollouts(policy_config("--rl.staleness=1"), tmp_path))
    assert len(claims) == 8
    assert failed_claims(claims) == {}


def test_a_queue_without_lineage_trains_rollouts_of_a_lost_policy(tmp_path, monkeypatch):
    def judge_without_lineage(self, header):
        if self._stale(header.version):
            return "stale"
        return "duplicate" if header.group < self._frontier or header.group in self._present else "accepted"

    monkeypatch.setattr(RolloutQueue, "_judge", judge_without_lineage)
    found = failed_claims(check_killed_rollouts(policy_config(), tmp_path))
    assert any(LINEAGE in claim and "the weights descend from" in measured for claim, measured in found.items())


@pytest.mark.long
def test_a_queue_that_counts_rollouts_of_a_lost_policy_as_stale_is_found(tmp_path, monkeypatch):
    judge = RolloutQueue._judge

    def call_lost_stale(self, header):
        verdict = judge(self, header)
        return "stale" if verdict == "lost_timeline" else verdict

    monkeypatch.setattr(RolloutQueue, "_judge", call_lost_stale)
    found = failed_claims(check_killed_rollouts(policy_config(), tmp_path))
    assert [measured for claim, measured in found.items() if CONSERVATION in claim and "stale is" in measured]


def test_every_check_of_a_run_on_samples_has_its_counterpart_or_a_reason():
    config = policy_config("--rl.staleness=1")
    checks = policy_checks(config)
    assert list(checks) == [
        "stream", "model", "schedule", "optimizer", "objective", "log-probabilities", "rollouts", "recovery"
    ]  # fmt: skip
    reasons = policy_not_proven(config)
    for check in ("stream", "training", "communication", "recovery"):
        assert any(reason.startswith(f"{check}:") for reason in reasons)
    assert any("rl.policy = newest" in reason for reason in reasons)


def test_code_of_the_user_is_refused():
    with pytest.raises(ConfigError, match=r"reward of your own is unsupported"):
        require_built_in_policy(policy_config(), {"reward": "rewards:reward", "model": None})
    require_built_in_policy(policy_config("--rl.objective=none"), {"model": "models:model"})
