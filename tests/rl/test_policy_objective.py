"""The loss, its gradient and what it measures equal a plain float64 computation with loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.config.rl import RLConfig
from meshwright.errors import ConfigError, DataError
from meshwright.rl.advantages import group_advantages
from meshwright.rl.entropy import token_entropy
from meshwright.rl.objective import PolicyLoss, k3, logits_loss, policy_loss
from meshwright.rl.rollout import Rollout
from meshwright.rl.rows import completion_row, group_rows
from tests.rl.policy_rollouts import random_groups, random_rows

VOCAB, SEQUENCE, ROWS = 11, 12, 8
GRPO = RLConfig("grpo", clip=0.2, clip_high=0.3, kl=0.3, temperature=0.7, importance_cap=1.5)
CONFIGS = {
    "grpo": GRPO,
    "grpo without KL": replace(GRPO, kl=0.0, clip_high=None),
    "grpo by sequence": replace(GRPO, normalization="sequence", importance_cap=0.0, scale_rewards=False),
    "policy gradient": replace(GRPO, objective="policy_gradient"),
    "policy gradient by sequence": replace(GRPO, objective="policy_gradient", kl=0.0, normalization="sequence"),
}


def plain_objective(groups, logits, config):
    """The objective written out: the loss sum, its gradient by the logits, and the measured means, token by token, from
    the rollouts themselves.
    """
    gradient = np.zeros_like(logits)
    sums = dict.fromkeys(config.measured_names, 0.0)
    total, row = 0.0, 0
    rollouts = [r for g in groups for r in g.rollouts]
    tokens = sum(len(r.tokens) for r in rollouts)
    for group in groups:
        rewards = [r.reward for r in group.rollouts]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for rollout in group.rollouts:
            advantage = rollout.reward - mean
            if config.objective == "grpo" and config.scale_rewards:
                advantage /= deviation + 1e-6
            for i, token in enumerate(rollout.tokens):
                t = len(group.prompt) - 1 + i
                exps = [math.exp(z / config.temperature) for z in logits[row, t]]
                probs = [e / sum(exps) for e in exps]
                new, old = math.log(probs[token]), rollout.logprobs[i]
                weight = 1.0
                if config.importance_cap:
                    weight = min(math.exp(rollout.logprobs[i] - rollout.sampler_logprobs[i]), config.importance_cap)
                if config.normalization == "sequence":
                    weight *= tokens / (len(rollouts) * len(rollout.tokens))
                ratio = math.exp(new - old)
                high = 1 + (config.clip if config.clip_high is None else config.clip_high)
                clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < 1 - config.clip)
                if config.objective == "grpo":
                    limited = min(max(ratio, 1 - config.clip), high)
                    loss = -min(ratio * advantage, limited * advantage)
                    slope = 0.0 if clipped else -ratio * advantage
                else:
                    loss, slope = -new * advantage, -advantage
                if config.kl:
                    d = rollout.reference_logprobs[i] - new
                    loss += config.kl * (math.exp(d) - d - 1)
                    slope += config.kl * (1 - math.exp(d))
                    sums["kl"] += math.exp(d) - d - 1
                total += weight * loss
                for v in range(len(probs)):  # d log p(token) / d z(v) = (1[v = token] - p(v)) / temperature
                    gradient[row, t, v] += weight * slope * ((v == token) - probs[v]) / config.temperature
                sums["ratio"] += ratio
                sums["approx_kl"] += ratio - 1 - (new - old)
                sums["entropy"] -= sum(p * math.log(p) for p in probs)
                if config.objective == "grpo":
                    sums["clip_share"] += clipped
            row += 1
    return total, gradient, {name: value / tokens for name, value in sums.items()}


def rows_and_logits(config):
    groups = random_groups(ROWS // 4, 4, SEQUENCE, VOCAB, seed=3)
    rows = group_rows(groups, config, SEQUENCE, np.float64)
    logits = 0.3 * torch.randn(ROWS, SEQUENCE, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return groups, rows, logits


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_gradient_and_metrics_equal_a_plain_computation(name):
    config = CONFIGS[name]
    groups, rows, logits = rows_and_logits(config)
    expected, gradient, metrics = plain_objective(groups, logits.numpy(), config)

    logits.requires_grad_()
    total, measured = logits_loss(logits, torch.from_numpy(rows.values), torch.from_numpy(rows.labels), config)
    total.backward()
    assert float(total.detach()) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(logits.grad, torch.from_numpy(gradient), rtol=1e-11, atol=1e-14)
    found = {name: float(value / count) for name, (value, count) in measured.items()}
    assert found == pytest.approx(metrics, rel=1e-12)
    assert set(found) == set(config.measured_names)
    assert {int(count) for _, count in measured.values()} == {sum(group.tokens for group in groups)}


def test_cases_clip_on_both_sides_and_truncate_weights():
    """The comparison above would prove little otherwise."""
    groups, rows, logits = rows_and_logits(GRPO)
    labels, values = torch.from_numpy(rows.labels), torch.from_numpy(rows.values)
    valid = labels != IGNORE_INDEX
    new = torch.log_softmax(logits / GRPO.temperature, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    ratio, advantage = (new - values[..., 1]).exp()[valid], values[..., 0][valid]
    assert ((ratio > 1.3) & (advantage > 0)).any()
    assert ((ratio < 0.8) & (advantage < 0)).any()
    assert ((ratio > 1.3) & (advantage < 0)).any()  # not clipped: the smaller of the two products
    assert ((ratio > 0.8) & (ratio < 1.3)).any()
    assert 0 < rows.mismatch.truncated_share < 1
    assert rows.values[..., 2].max() == pytest.approx(GRPO.importance_cap)


def test_sequence_normalization_weights_every_rollout_equally():
    groups, rows, _ = rows_and_logits(CONFIGS["grpo by sequence"])
    per_rollout = rows.values[..., 2].sum(1) / rows.valid_targets
    np.testing.assert_allclose(per_rollout, 1 / ROWS, rtol=1e-12)
    assert len({len(rollout.tokens) for group in groups for rollout in group.rollouts}) > 3


def test_values_of_positions_without_a_label_have_no_effect():
    _, rows, logits = rows_and_logits(GRPO)
    labels = torch.from_numpy(rows.labels)
    values = torch.from_numpy(rows.values)
    spoiled = torch.where((labels == IGNORE_INDEX)[..., None], math.nan, values)
    gradients = []
    for case in (values, spoiled):
        leaf = logits.clone().requires_grad_()
        logits_loss(leaf, case, labels, GRPO)[0].backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert gradients[0].isfinite().all()


def test_on_policy_ratio_is_exactly_one_in_float32():
    logprobs = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)) - 3
    values = torch.zeros(2, 5, 4)
    values[..., 1], values[..., 2] = logprobs, 1
    _, measured = policy_loss(logprobs, values, torch.ones(2, 5, dtype=torch.long), replace(GRPO, kl=0.0))
    assert [float(measured[name][0]) for name in ("ratio", "approx_kl", "clip_share")] == [10.0, 0.0, 0.0]


def test_k3_is_accurate_where_it_is_small():
    assert float(k3(torch.tensor(1e-6, dtype=torch.float64))) == pytest.approx(0.5e-12, rel=1e-3)


def test_entropy_handles_impossible_tokens():
    logits = torch.tensor([[[0.0, 0.0, -math.inf, -math.inf]]])
    assert token_entropy(logits).tolist() == [[pytest.approx(math.log(2))]]


def test_equal_rewards_have_no_advantage():
    assert group_advantages([0.25] * 4, GRPO).tolist() == [0.0] * 4


def test_rows_have_the_completion_as_labels_of_the_positions_before_it():
    [group, *_] = random_groups(1, 2, SEQUENCE, VOCAB)
    rows = group_rows([group], GRPO, SEQUENCE, np.float32)
    rollout, start = group.rollouts[1], len(group.prompt)
    end = start + len(rollout.tokens)
    assert rows.tokens[1].tolist() == [*group.prompt, *rollout.tokens, *[0] * (SEQUENCE - end)]
    expected = [IGNORE_INDEX] * (start - 1) + rollout.tokens.tolist() + [IGNORE_INDEX] * (SEQUENCE - end + 1)
    assert rows.labels[1].tolist() == expected
    assert rows.values.dtype == np.float32
    assert rows.values[1, start - 1 : end - 1, 1].tolist() == rollout.logprobs.astype(np.float32).tolist()
    assert not rows.values[1, : start - 1].any()
    assert not rows.values[1, end - 1 :].any()


def test_mismatch_equals_a_plain_computation():
    groups = random_groups(2, 4, SEQUENCE, VOCAB)
    differences = [
        scored - sampled
        for group in groups
        for rollout in group.rollouts
        for scored, sampled in zip(rollout.logprobs, rollout.sampler_logprobs, strict=True)
    ]
    count = len(differences)
    assert group_rows(groups, GRPO, SEQUENCE).mismatch.to_json() == pytest.approx(
        {
            "tokens": count,
            "mean_difference": sum(map(abs, differences)) / count,
            "max_difference": max(map(abs, differences)),
            "kl": sum(math.exp(d) - 1 - d for d in differences) / count,
            "mean_weight": sum(min(math.exp(d), 1.5) for d in differences) / count,
            "truncated_share": sum(math.exp(d) > 1.5 for d in differences) / count,
        }
    )


def test_a_huge_difference_of_logprobs_is_truncated_without_overflow():
    [group, *_] = random_groups(1, 2, SEQUENCE, VOCAB)
    first = group.rollouts[0]
    far = Rollout(first.tokens, first.logprobs - 5000, first.logprobs, first.reference_logprobs, first.reward)
    with np.errstate(all="raise"):
        rows = group_rows([replace(group, rollouts=(far, group.rollouts[1]))], GRPO, SEQUENCE)
    assert rows.values[0, len(group.prompt) - 1, 2] == pytest.approx(1.5)
    assert math.isfinite(rows.mismatch.kl)


def test_rows_name_the_rollout_that_cannot_be_trained():
    [group, *_] = random_groups(1, 2, SEQUENCE, VOCAB)
    first, second = group.rollouts
    without = replace(second, reference_logprobs=np.zeros(0))
    with pytest.raises(DataError, match=r"rollout 0\.1@1\.0 has no log-probabilities of the reference policy"):
        group_rows([replace(group, rollouts=(first, without))], GRPO, SEQUENCE)
    with pytest.raises(DataError, match=r"group 0 of policy 1\.0 has no rewards: a reward is not finite"):
        group_rows([replace(group, rollouts=(first, replace(second, reward=math.nan)))], GRPO, SEQUENCE)
    with pytest.raises(DataError, match=rf"rollout 0\.0@1\.0 has {len(group.prompt)} prompt tokens"):
        group_rows([group], GRPO, len(group.prompt))
    with pytest.raises(DataError, match="0 prompt tokens"):
        completion_row(np.zeros(0, np.int32), np.ones(2, np.int32), SEQUENCE)


def test_policy_loss_takes_logits_in_any_output_and_names_what_is_missing():
    rows = random_rows(GRPO, ROWS, SEQUENCE, VOCAB)
    batch = {"labels": torch.from_numpy(rows.labels), "values": torch.from_numpy(rows.values)}
    logits = torch.randn(ROWS, SEQUENCE, VOCAB, dtype=torch.float64)
    loss = PolicyLoss(GRPO)
    assert torch.equal(loss(logits, batch), loss({"logits": logits}, batch))
    assert len(loss.take_measured()) == 2 * len(loss.measured_names)
    with pytest.raises(ConfigError, match=r"the model returned a tensor of shape \(8, 11\)"):
        loss(logits[:, 0], batch)
