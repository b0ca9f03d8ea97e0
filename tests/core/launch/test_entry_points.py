"""Entry points: what `MODULE:NAME` imports, and the one line that each mistake gets."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.base.config import RunConfig
from meshwright.base.user_code.entry_points import load_user_code
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.api.run_location import default_name
from meshwright.core.launch.user_code.make_custom_model import make_custom_model, open_user_code
from meshwright.errors import ConfigError

PROJECT = """
from torch import nn

class Points(list):
    pass

class SquaredError(nn.Module):
    def forward(self, outputs, targets):
        return ((outputs - targets) ** 2).sum()

def build():
    return nn.Linear(2, 2)

class Registry:
    build = staticmethod(build)

def broken():
    raise ValueError("no weights")
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in the current folder, which is not on sys.path, as for an installed script."""
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "models.py").write_text(PROJECT)
    (tmp_path / "my_project" / "fails.py").write_text("import nn_modules\n")
    (tmp_path / "my_project" / "syntax.py").write_text("def build(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith("my_project")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["build", "Registry.build"])
def test_entry_points_are_imported_from_the_current_folder(project, name):
    typed = {"model": f"my_project.models:{name}", "loss": "my_project.models:SquaredError"}
    user = load_user_code(typed)
    custom = make_custom_model(user)
    assert isinstance(custom.module, nn.Linear)
    assert type(custom.loss).__name__ == "SquaredError"
    assert user.entry_points == typed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_project.models", "--model my_project.models is not an entry point; expected MODULE:NAME"),
        ("my_project.models:", "is not an entry point"),
        ("models.py:build", "is the path of a file; try --model models:build$"),
        ("../src/models.py:build", r"try --model models:build in the folder \.\./src, or with PYTHONPATH=\.\./src"),
        ("my_project.model:build", "the import of my_project.model raised ModuleNotFoundError: No module named"),
        (
            "my_project.fails:build",
            r"ModuleNotFoundError: No module named 'nn_modules' \(my_project/fails.py, line 1\)",
        ),
        ("my_project.syntax:build", "the import of my_project.syntax raised SyntaxError: invalid syntax"),
        ("my_project.models:biuld", "my_project.models has no attribute biuld; did you mean build?"),
        ("my_project.models:Registry.none", "has no attribute Registry.none"),
    ],
)
def test_wrong_entry_point_is_one_line_with_exit_code_2(project, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_user_code({"model": text})
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_exception_while_the_model_is_built_names_its_line(project):
    user = load_user_code({"model": "my_project.models:broken", "loss": "my_project.models:SquaredError"})
    expected = r"broken\(\) raised ValueError: no weights \(my_project/models.py, line \d+\)"
    with pytest.raises(ConfigError, match=expected):
        make_custom_model(user)


def test_callable_builds_the_model_under_the_seed_and_the_state_is_restored():
    state = torch.get_rng_state()
    first, again, other = (
        make_custom_model(UserCode(model=partial(nn.Linear, 2, 2), loss=nn.MSELoss(reduction="sum")), seed=seed).module
        for seed in (3, 3, 4)
    )
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_model_without_data_is_refused_before_it_is_built():
    with pytest.raises(ConfigError, match=r"a model is given without data: .*; try --source MODULE:NAME"):
        open_user_code(RunConfig(), UserCode(model=dict))


def test_default_run_folder_has_the_name_of_the_model():
    config = RunConfig()
    assert default_name(config, {}) == "tiny"
    assert default_name(config, {"model": "my_project.models:Registry.Net"}) == "net"
    assert [default_name(config, {}, model) for model in (nn.Linear, nn.Linear(1, 1), partial(dict))] == [
        "linear",
        "linear",
        "partial",
    ]


def test_model_that_is_not_a_module_is_a_config_error():
    with pytest.raises(ConfigError, match=r"the model is a dict; expected an nn\.Module"):
        make_custom_model(UserCode(model=dict, loss=nn.MSELoss(reduction="sum")))
    with pytest.raises(ConfigError, match="metrics is given without a model"):
        make_custom_model(UserCode(metrics={}))


def test_nothing_given_is_the_model_of_the_config():
    assert make_custom_model(UserCode()) is None
