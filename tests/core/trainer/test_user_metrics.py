"""A run on dict batches: metrics and the parts of a loss are summed exactly over ranks and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from meshwright.base.config import EvalConfig
from meshwright.base.records.events import read_events
from meshwright.core.checkpoint.inspect import find_published
from meshwright.core.data.stream import Stream
from tests.kit.custom_model import custom_config, run_custom, step_records


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)
        self.right.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, item, query):
        self.calls += 1
        return self.left(item) + self.right(query)


class Pairs:
    """Dicts whose keys alternate in order; every fifth label is ignored."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        entries = {"query": np.full(2, index / 8), "item": np.full(4, index % 7 / 7), "labels": index % 3}
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


def expected_values(model, ids):
    samples = [Pairs()[int(i)] for i in ids]
    batch = {key: torch.tensor(np.stack([s[key] for s in samples])) for key in ("item", "query", "labels")}
    with torch.no_grad():
        outputs = model.double()(batch["item"].double(), batch["query"])
    valid = batch["labels"] != -100
    sums = {name: float(value) / int(valid.sum()) for name, value in losses(outputs, batch).items()}
    return sums | {"valid": float(valid.double().mean()), "first": float(outputs[:, 0].mean())}


def test_metrics_and_parts_of_the_loss_are_exact_sums_over_ranks(tmp_path):
    torch.manual_seed(0)
    model, initial = Towers(), Towers()
    initial.load_state_dict(model.state_dict())
    config = custom_config(steps=3, ranks=2, eval=EvalConfig(holdout=0.2, every=3, samples=8))
    metrics = {"valid": valid_share, "first": first_output}
    result, steps = run_custom(tmp_path, config, model=model, loss=losses, source=Pairs(), metrics=metrics)
    events = list(read_events(tmp_path / "events" / "rank-00000.jsonl"))
    [start], [evaluation] = ([e for e in events if e["kind"] == kind] for kind in ("start", "eval"))
    stream = Stream.from_lengths(config.seed, 8, [40], [1.0], 0.2)

    expected = expected_values(initial, stream.step(0))
    assert steps[0]["metrics"] == pytest.approx(expected, rel=1e-5)
    assert steps[0]["loss"] == pytest.approx(expected["class"] + expected["size"], rel=1e-5)
    assert steps[0]["metrics"] == step_records(tmp_path, rank=1)[0]["metrics"]
    assert result.metrics == steps[-1]["metrics"]
    assert evaluation["metrics"] == pytest.approx(expected_values(model, stream.held_out_samples(8)), rel=1e-5)
    assert (start["unit"], start["notes"]) == ("samples", ["2 of 4 parameters are frozen: right.weight, right.bias"])

    # frozen parameters and buffers are saved and come back; only trained parameters have moments
    assert torch.equal(model.right.weight.double(), initial.right.weight)
    assert model.calls > 0
    [newest, *_] = find_published(tmp_path, None)
    names = set(newest.manifest.tensors)
    assert {"model.right.weight", "model.calls"} <= {name.split("/")[-1] for name in names}
    assert not [name for name in names if "right" in name and ("exp_avg" in name or "moment" in name)]
