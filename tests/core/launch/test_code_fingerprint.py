"""The fingerprint of a user's code: what runs counts, and how it is written does not."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.user_code.code_fingerprint import CodeFingerprint
from meshwright.core.launch.user_code.code_record import build_code_record
from meshwright.core.trainer.identity import describe_code_changes

PROJECT = """
import torch
from torch import nn

SCALE = 2.0

def scaled(x):
    return SCALE * x

class Base(nn.Module):
    def scale(self, x):
        return scaled(x)

class Net(Base):
    def __init__(self, rate=0.1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = nn.Dropout(rate)
        self.act = nn.ReLU()
        self.function = torch.relu

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return self.scale(self.dropout(x))

class Data:
    root = "/data/one"

    def __init__(self, root="/data/one"):
        self.root = root

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), index), index

def loss(outputs, targets, factor=1.0):
    return factor * ((outputs - targets) ** 2).sum()
"""

REFORMATTED = (
    PROJECT.replace("SCALE * x", "(  SCALE\n            * x)  # a comment")
    .replace("def forward(self, x):", 'def forward(self, x):\n        """Runs the layers."""')
    .replace("def loss(outputs, targets, factor=1.0):", "\n\n\ndef loss(outputs, targets, factor=1.0):\n    'The sum.'")
    .replace("class Base(nn.Module):", 'class Base(nn.Module):\n    """A base."""\n')
    .replace("def scaled(x):", "def scaled(x: torch.Tensor) -> torch.Tensor:")
)


def record_project(source: str, **changes):
    """The record of a project whose modules are executed, as a notebook does."""
    project = types.ModuleType("project")
    exec(source, vars(project))
    user = UserCode(loss=project.loss, **changes.pop("user", {}))
    return build_code_record(project.Net(**changes), user, project.Data())


def changes_of(old: str, new: str) -> list[str]:
    assert old in PROJECT
    before, now = record_project(PROJECT), record_project(PROJECT.replace(old, new))
    assert before["fingerprint"] != now["fingerprint"]
    return describe_code_changes(before, now)


@pytest.mark.parametrize("source", [PROJECT, REFORMATTED])
def test_comments_formatting_and_docstrings_do_not_change_the_fingerprint(source):
    assert record_project(PROJECT) == record_project(source)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("** 2).sum()", "** 4).sum()", "function project.loss changed"),
        ("factor=1.0", "factor=2.0", "function project.loss changed"),
        ("return self.scale(self.dropout(x))", "return self.dropout(x)", "function project.Net.forward changed"),
        ("return scaled(x)", "return 3 * scaled(x)", "function project.Base.scale changed"),
        ("return SCALE * x", "return SCALE + x", "function project.scaled changed"),
        ("SCALE = 2.0", "SCALE = 3.0", "constant project.SCALE was 2.0 and is 3.0"),
        ("nn.ReLU()", "nn.GELU()", "model.act: ReLU(inplace=False) became model.act: GELU(approximate='none')"),
        ("self.function = torch.relu", "self.function = torch.tanh", "relu) became model: Net(function=torch"),
        ("rate=0.1", "rate=0.2", "model.dropout: Dropout(p=0.1, inplace=False) became model.dropout: Dropout(p=0.2"),
        (
            "torch.full((4,), index), index",
            "torch.full((4,), index), -index",
            "function project.Data.__getitem__ changed",
        ),
    ],
)
def test_change_of_the_code_is_described_by_its_name(old, new, expected):
    assert any(expected in change for change in changes_of(old, new)), changes_of(old, new)


def test_paths_of_a_dataset_do_not_count():
    assert record_project(PROJECT) == record_project(PROJECT.replace("/data/one", "/data/two"))


def test_equal_blocks_share_a_line_of_the_structure():
    [line] = [line for line in record_project(PROJECT)["structure"] if "layers." in line]
    assert line == (
        "model.layers.0-2: Linear(in_features=4, out_features=4, bias=True) weight[4, 4] float32 bias[4] float32"
    )


def test_order_of_modules_and_shared_parameters_count():
    def record(*modules):
        return build_code_record(nn.Sequential(*modules), UserCode())

    assert describe_code_changes(record(nn.ReLU(), nn.Tanh()), record(nn.Tanh(), nn.ReLU()))
    one, two, tied = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    tied.weight = one.weight
    changes = describe_code_changes(record(one, two), record(one, tied))
    assert "none became model.1: Linear(in_features=2, out_features=2, bias=True) weight = model.0.weight" in changes[1]
    assert describe_code_changes(record(one, nn.ReLU(), two), record(one, nn.ReLU(), one))


def test_frozen_parameters_eval_mode_and_the_reduction_count():
    frozen, evaluating = nn.Linear(2, 2), nn.Linear(2, 2).eval()
    frozen.bias.requires_grad_(False)
    plain = build_code_record(nn.Linear(2, 2), UserCode())
    assert describe_code_changes(plain, build_code_record(frozen, UserCode()))
    assert "training=False" in describe_code_changes(plain, build_code_record(evaluating, UserCode()))[0]
    assert describe_code_changes(plain, build_code_record(nn.Linear(2, 2), UserCode(reduction="mean"))) == [
        "reduction was None and is mean"
    ]


def test_closures_partials_lambdas_and_callable_objects_count_by_their_values():
    def scaled(factor):
        return lambda outputs, targets: factor * outputs.sum()

    class Loss:
        def __init__(self, power):
            self.power = power

        def __call__(self, outputs, targets):
            return (outputs - targets).pow(self.power).sum()

    for make in (scaled, Loss, lambda value: functools.partial(torch.sum, dim=value), lambda v: nn.HuberLoss("sum", v)):
        one, same, other = (build_code_record(nn.Linear(1, 1), UserCode(loss=make(n))) for n in (1, 1, 2))
        assert one == same
        assert one["fingerprint"] != other["fingerprint"]


def test_decorated_function_counts_by_what_it_wraps():
    def decorated(power):
        @torch.no_grad()
        def function(x):
            return x**2 if power == 2 else x**3

        return function

    parts = CodeFingerprint()
    parts.add(decorated(2), "loss")
    assert [name for name in parts.parts if "decorated" in name]


def test_another_loss_is_named():
    one = build_code_record(nn.Linear(1, 1), UserCode(loss=nn.functional.mse_loss))
    two = build_code_record(nn.Linear(1, 1), UserCode(loss=nn.functional.l1_loss))
    [change] = describe_code_changes(one, two)
    assert change == "loss was torch.nn.functional.mse_loss and is torch.nn.functional.l1_loss"


def test_model_of_transformers_counts_by_its_config_and_the_version_of_the_package():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }

    def record(**settings):
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, **settings)
        return build_code_record(transformers.LlamaForCausalLM(config), UserCode())

    assert record() == record()
    assert record()["parts"]["package transformers"] == transformers.__version__
    changes = describe_code_changes(record(), record(hidden_act="gelu"))
    assert "model.config.hidden_act: 'silu' became model.config.hidden_act: 'gelu'" in changes


def test_bytecode_of_another_python_is_not_compared():
    before, now = record_project(PROJECT), record_project(PROJECT.replace("** 2", "** 3").replace("nn.ReLU", "nn.GELU"))
    changes = describe_code_changes(before | {"python": "3.1"}, now)
    assert changes[0] == f"Python was 3.1 and is {now['python']}, so code cannot be compared"
    assert len(changes) == 2
    assert "ReLU" in changes[1]
