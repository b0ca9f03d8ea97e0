"""The values of a user's objects are part of the fingerprint; caches, counters and running statistics are not."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.user_code.code_record import build_code_record
from meshwright.core.trainer.identity import describe_code_changes

PROJECT = """
import argparse
import enum
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import nn

class Mode(enum.Enum):
    one = 1
    two = 2

@dataclass
class Config:
    scale: float = 1.5
    extra: dict = field(default_factory=lambda: {"bias": 0.5})
    tags: frozenset = frozenset({"a", "b", "c"})

class Helper:
    __slots__ = ("factor",)
    def __init__(self):
        self.factor = 7

args = argparse.Namespace(alpha=0.25, steps=100)
crit = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0]))
TABLE = {"power": 2}
WEIGHTS = torch.tensor([3.0, 4.0])
CACHE = {}

@functools.cache
def cached():
    return 11

class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self._gain = 2.0
        self.acts = [torch.relu, torch.tanh]
        self.helper = Helper()
        self.mode = Mode.one
        self.partial = functools.partial(torch.mul, other=torch.tensor([8.0]))
        self.register_buffer("class_weights", torch.tensor([0.5, 0.25]))
        self.register_buffer("mean", torch.zeros(2))
        self._build()
        self.calls = 0
        self._memory = {}

    def _build(self):
        self.late = 9

    def forward(self, x):
        self.calls += 1
        self._memory[self.calls] = x
        self.mean.mul_(0.9).add_(x.mean())
        return self.acts[0](x) * self.cfg.scale * self._gain + self.cfg.extra["bias"] * self.late + len(self.cfg.tags)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = Config()
        self.cfg = cfg
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(2))
        self.norm = nn.BatchNorm1d(2)
        self.features = Features()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("directions", torch.randn(4))

class Objective:
    def __init__(self):
        self.margin = 0.75
        self.count = 0

    def loss(self, outputs, targets):
        self.count += 1
        CACHE[self.count] = targets
        return (args.alpha * crit(outputs, targets) ** TABLE["power"] * WEIGHTS * cached() + self.margin).sum()

loss = Objective().loss
"""


def run_project(source: str = PROJECT) -> types.ModuleType:
    project = types.ModuleType("project")
    sys.modules["project"] = project  # dataclasses look for their module
    exec(source, vars(project))
    return project


def record_project(source: str = PROJECT):
    project = run_project(source)
    return build_code_record(project.Net(), UserCode(loss=project.loss))


@pytest.fixture(autouse=True)
def _forget_project():
    yield
    sys.modules.pop("project", None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("scale: float = 1.5", "scale: float = 2.5", "model.cfg.scale: 1.5 became model.cfg.scale: 2.5"),
        ('{"bias": 0.5}', '{"bias": 0.6}', "model.cfg.extra.'bias': 0.5 became"),
        ('"b", "c"}', '"b", "d"}', "model.cfg.tags: {'a', 'b', 'c'} became"),
        ("self._gain = 2.0", "self._gain = 3.0", "_gain=3.0"),
        ("[torch.relu, torch.tanh]", "[torch.tanh, torch.relu]", "acts.0: torch"),
        ("self.factor = 7", "self.factor = 8", "helper.factor: 7 became"),
        ("self.mode = Mode.one", "self.mode = Mode.two", "mode: project.Mode.one became"),
        ("torch.tensor([8.0])", "torch.tensor([9.0])", "partial.other: [1] float32 = 8 became"),
        ("torch.tensor([0.5, 0.25])", "torch.tensor([0.5, 0.35])", "class_weights[2] float32 = 0.5 0.35"),
        ("self.late = 9", "self.late = 10", "late=10"),
        ("label_smoothing=0.1", "label_smoothing=0.2", "constant project.crit.label_smoothing was 0.1 and is 0.2"),
        ("[1.0, 2.0]", "[1.0, 5.0]", "constant project.crit.weight was [2] float32 = 1 2 and is [2] float32 = 1 5"),
        ('"power": 2', '"power": 4', "constant project.TABLE.'power' was 2 and is 4"),
        ("torch.tensor([3.0, 4.0])", "torch.tensor([3.0, 6.0])", "constant project.WEIGHTS was"),
        ("alpha=0.25", "alpha=0.5", "constant project.args.alpha was 0.25 and is 0.5"),
        ("self.margin = 0.75", "self.margin = 0.5", "loss.self.margin was 0.75 and is 0.5"),
        ("return 11", "return 12", "function project.cached changed"),
    ],
)
def test_value_that_the_code_uses_counts(old, new, expected):
    assert PROJECT.count(old) == 1
    changes = describe_code_changes(record_project(), record_project(PROJECT.replace(old, new)))
    assert any(expected in change for change in changes), changes


@pytest.mark.parametrize(("old", "new"), [("steps=100", "steps=200"), ("CACHE = {}", "CACHE={1: 2}")])
def test_setting_that_the_code_does_not_mention_and_a_cache_do_not_count(old, new):
    assert record_project() == record_project(PROJECT.replace(old, new))


def test_use_of_a_model_does_not_change_its_fingerprint():
    import torch

    project = run_project()
    model, user = project.Net(), UserCode(loss=project.loss)
    before = build_code_record(model, user)
    outputs = model(torch.ones(3, 2))
    user.loss(model.norm(outputs), torch.tensor([0, 1, 1]))
    torch.nn.init.zeros_(model.norm.weight)
    assert (project.loss.__self__.count, model.blocks[0].calls, len(project.CACHE)) == (1, 1, 1)
    assert build_code_record(model, user) == before


def test_fingerprint_is_the_same_in_another_process(tmp_path):
    script = tmp_path / "script.py"
    lines = ["import sys", "sys.path.insert(0, sys.argv[1])", "import test_value_fingerprint as test"]
    script.write_text("\n".join([*lines, "print(test.record_project()['fingerprint'])"]))
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    command = [sys.executable, str(script), os.path.dirname(__file__)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert found.stdout.split() == [record_project()["fingerprint"]]


def test_many_values_are_one_line_and_a_cycle_ends():
    many = PROJECT.replace("self.helper = Helper()", "self.helper = {n: n for n in range(5000)}")
    [line] = [line for line in record_project(many)["structure"] if "blocks.0.helper" in line]
    assert "of 5001 values, hash" in line
    cycle = PROJECT.replace("self.helper = Helper()", "self.helper = [self]")
    assert "the same object as model.blocks.0" in "\n".join(record_project(cycle)["structure"])
