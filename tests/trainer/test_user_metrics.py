"""A run on dict batches: metrics and the parts of a loss are summed exactly over ranks and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from custom_model import custom_config, run_custom, samples_of_step, step_records
from torch import nn
from torch.nn.functional import cross_entropy

from meshwright.config import EvalConfig
from meshwright.telemetry.events import read_events


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, item, query):
        return self.left(item) + self.right(query)


class Pairs:
    """Dicts whose keys alternate in order; every fifth label is ignored."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        entries = {"query": np.full(2, index / 8), "item": np.full(4, index % 7), "labels": index % 3}
        entries["labels"] = -100 if index % 5 == 0 else entries["labels"]
        return dict(reversed(entries.items())) if index % 2 else entries


def losses(outputs, batch):
    return {
        "class": cross_entropy(outputs, batch["labels"], reduction="sum"),
        "size": outputs[batch["labels"] != -100].pow(2).sum() / 10,
    }


def valid_share(outputs, batch):
    return (batch["labels"] != -100).sum(), len(batch["labels"])


def first_output(outputs, batch):
    return outputs[:, 0]


def test_metrics_and_parts_of_the_loss_are_exact_sums_over_ranks(tmp_path):
    torch.manual_seed(0)
    model = Towers()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    config = custom_config(steps=3, ranks=2, eval=EvalConfig(holdout=0.2, every=3, samples=8))
    options = {"model": model, "loss": losses, "source": Pairs()}
    result, steps = run_custom(tmp_path / "r", config, metrics={"valid": valid_share, "first": first_output}, **options)
    plain = Towers()
    plain.load_state_dict(initial)
    events = read_events(tmp_path / "r" / "events" / "rank-00000.jsonl")
    ids = next(e for e in events if e["kind"] == "start")
    assert (ids["unit"], steps[0]["samples"]) == ("samples", 8)

    expected = expected_values(plain, samples_of_step(tmp_path / "r", 0))
    assert steps[0]["metrics"] == pytest.approx(expected, rel=1e-6)
    assert steps[0]["loss"] == pytest.approx(expected["class"] + expected["size"], rel=1e-6)
    assert steps[0]["metrics"] == step_records(tmp_path / "r", rank=1)[0]["metrics"]
    assert result.metrics == pytest.approx(steps[-1]["metrics"])

    held_out = held_out_samples(tmp_path / "r")
    [evaluation] = [e for e in events if e["kind"] == "eval"]
    assert evaluation["metrics"] == pytest.approx(expected_values(model, held_out), rel=1e-6)
