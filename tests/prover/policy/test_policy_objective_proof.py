"""The proof of the policy objective and of log-probabilities: it holds for every layout, and finds seeded bugs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import meshwright.rl.generator.group
import meshwright.rl.objective
from meshwright.prover.oracle.initial_values import initial_values
from meshwright.prover.oracle.policy_objective import policy_reference
from meshwright.prover.policy.logprobs import check_logprobs
from meshwright.prover.policy.objective import as_reference, check_objective, made_up_groups, with_groups
from meshwright.prover.shrink.policy_runs import killed_policy_run, objective_run
from meshwright.rl.objective import policy_loss
from tests.prover.policy.policy_claims import failed_claims, policy_config


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["--rl.clip_high=0.3", "--rl.temperature=0.7", "--rl.kl=0.2"]),
        (2, ["--rl.objective=policy_gradient", "--rl.normalization=sequence", "--layout.shard=parameters"]),
        (2, ["--rl.scale_rewards=false", "--rl.importance_cap=0", "--model.experts=4", "--model.experts_active=2"]),
    ],
)
def test_gradient_equals_the_reference(ranks, overrides):
    claims = list(check_objective(policy_config(*overrides, ranks=ranks)))
    assert len(claims) == 2
    assert failed_claims(claims) == {}


def test_reference_gradient_is_the_slope_of_the_reference_loss():
    config = with_groups(objective_run(policy_config("--rl.kl=0.1")))
    groups = as_reference(made_up_groups(config))
    parameters = {name: value.double() for name, value in initial_values(config).items()}
    gradient = policy_reference(config, parameters, groups).gradients["decoder.norm.weight"]
    direction = torch.from_numpy(np.random.default_rng(0).standard_normal(gradient.shape))
    losses = []
    for sign in (1, -1):
        moved = parameters | {"decoder.norm.weight": parameters["decoder.norm.weight"] + sign * 1e-6 * direction}
        losses.append(policy_reference(config, moved, groups).loss)
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float((gradient * direction).sum()), rel=1e-5)


def clip_on_the_wrong_side(logprobs, values, labels, config):
    """The larger of the two terms in place of the smaller: -A and -r A swap their order if the advantage is negated."""
    flipped = torch.cat((-values[..., :1], values[..., 1:]), dim=-1)
    total, measured = policy_loss(logprobs, flipped, labels, config)
    return -total, measured


def test_clipping_on_the_wrong_side_is_found(monkeypatch):
    monkeypatch.setattr(meshwright.rl.objective, "policy_loss", clip_on_the_wrong_side)
    found = failed_claims(check_objective(policy_config()))
    assert len(found) == 2
    for claim, measured in found.items():
        assert "gradient of the policy objective" in claim
        assert "differs by a relative error" in measured


def test_recorded_log_probabilities_are_bitwise_those_of_the_learner():
    (claim,) = check_logprobs(policy_config("--rl.temperature=0.8"))
    assert claim.passed, claim.measured
    assert "bitwise" in claim.claim


def test_scoring_at_another_temperature_is_found(monkeypatch):
    score = meshwright.rl.generator.group.score

    def without_temperature(model, prompt, completions, shape, _temperature):
        return score(model, prompt, completions, shape, 1.0)

    monkeypatch.setattr(meshwright.rl.generator.group, "score", without_temperature)
    (claim,) = check_logprobs(policy_config("--rl.temperature=0.8"))
    assert not claim.passed
    assert "0 of" in claim.measured


def test_proof_runs_keep_the_settings_of_the_objective():
    user = policy_config(
        "--rl.staleness=3",
        "--rl.objective=policy_gradient",
        "--rl.normalization=sequence",
        "--rl.kl=0.3",
        "--rl.importance_cap=1.5",
        "--rl.dynamic_sampling=false",
        "--rl.temperature=0.9",
    )
    shrunk = killed_policy_run(user, 7).rl
    assert replace(shrunk, group_size=user.rl.group_size, policy="newest") == user.rl
