"""The scoring pass computes, bit for bit on CPU, what the learner's forward pass computes on the same rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.config.model import OptionTable
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.errors import DataError
from meshwright.rl.generator.sampling import SamplingSettings, sample_group
from meshwright.rl.generator.scoring import MicroBatchShape, group_tokens, score
from meshwright.rl.logprobs import token_logprobs
from tests.kit.family_models import MODELS
from tests.kit.small_policies import PROMPT, family_policy

SEQUENCE = 16
TEMPERATURE = 0.7
DTYPES = (torch.float32, torch.float64)
POSITIONS = OptionTable({"positions": 32})
LONG = {
    name: replace(config, options=POSITIONS) if config.family == "gpt2" else config for name, config in MODELS.items()
}
DENSE = [name for name, config in LONG.items() if not config.experts]


class LearnerHead(HeadLoss):
    """A head that keeps the log-probabilities, as the objective of the learner computes them."""

    logprobs: torch.Tensor

    def forward(self, hidden, labels):
        self.logprobs = token_logprobs(self.logits(hidden), labels, TEMPERATURE)
        return self.logprobs.sum(), (labels != IGNORE_INDEX).sum()


def learner_logprobs(module: torch.nn.Module, tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """A forward pass of the model in training mode, with a graph, as a step runs it."""
    head, module.head.__class__ = module.head.__class__, LearnerHead
    try:
        total, _ = module.train()(torch.from_numpy(tokens), torch.from_numpy(labels))
        total.backward()
        return module.head.logprobs.detach().double().numpy()
    finally:
        module.head.__class__ = head
        module.eval()


def completions_of(policy, rollouts: int, group: int) -> list[np.ndarray]:
    settings = SamplingSettings(9, TEMPERATURE, frozenset({9, 40}))
    return [completion.tokens for completion in sample_group(policy, PROMPT, rollouts, settings, 0, group)]


def assert_same_bits(policy, tokens, labels, start: int, completions, scored) -> None:
    found = learner_logprobs(policy.module, tokens, labels)
    for row, (completion, logprobs) in enumerate(zip(completions, scored, strict=True)):
        expected = found[start + row, len(PROMPT) - 1 :][: len(completion)]
        assert expected.tobytes() == logprobs.tobytes()
        assert np.count_nonzero(found[start + row]) == len(completion)


@pytest.mark.parametrize(("dtype", "separator"), [(torch.float32, None), (torch.float32, 40), (torch.float64, None)])
@pytest.mark.parametrize("name", LONG)
def test_scores_are_the_learners_if_micro_batches_divide_groups(name, dtype, separator):
    """Every family, with experts, odd sequences and documents: the micro-batches are those of the learner."""
    policy = family_policy(replace(LONG[name], separator=separator), dtype)
    completions = completions_of(policy, 6, 0)
    for micro, sequence in ((2, SEQUENCE), (3, 13), (6, 17)):
        scored = score(policy, PROMPT, completions, MicroBatchShape(micro, sequence), TEMPERATURE)
        tokens, labels = group_tokens(PROMPT, completions, sequence)
        for start in range(0, 6, micro):
            rows = slice(start, start + micro)
            assert_same_bits(policy, tokens[rows], labels[rows], 0, completions[rows], scored[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DENSE)
def test_scores_of_dense_models_are_the_learners_at_every_row_of_a_larger_micro_batch(name, dtype):
    """Other groups are in the rows before and after. The sequence is a multiple of 8: see rl/generator/scoring.py."""
    policy = family_policy(LONG[name], dtype)
    own, others = completions_of(policy, 2, 0), completions_of(policy, 6, 1)
    scored = score(policy, PROMPT, own, MicroBatchShape(8, SEQUENCE), TEMPERATURE)
    for start in range(7):
        rows = [*others[:start], *own, *others[start:]]
        tokens, labels = group_tokens(PROMPT, rows, SEQUENCE)
        assert_same_bits(policy, tokens, labels, start, own, scored)


def test_labels_are_the_tokens_of_the_completion():
    tokens, labels = group_tokens([5, 6], [np.array([7, 8], np.int32), np.array([9], np.int32)], 6)
    assert tokens.tolist() == [[5, 6, 7, 8, 0, 0], [5, 6, 9, 0, 0, 0]]
    assert labels.tolist() == [[IGNORE_INDEX, 7, 8, *[IGNORE_INDEX] * 3], [IGNORE_INDEX, 9, *[IGNORE_INDEX] * 4]]


def test_rollout_that_exceeds_the_sequence_is_refused():
    with pytest.raises(DataError, match=r"2 prompt tokens and 2 completion tokens, and data\.sequence is 3"):
        group_tokens([5, 6], [np.array([7, 8], np.int32)], 3)
