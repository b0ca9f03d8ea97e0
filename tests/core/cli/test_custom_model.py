"""A custom model on the command line: typed entry points, and runs whose recorded ones are never imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.base.cli import main
from meshwright.base.cli.args import parse
from meshwright.base.config import CustomModelConfig, load_config
from meshwright.errors import ConfigError
from meshwright.prover.cli.simulate import simulate

PROJECT = """
import numpy as np
import torch
from torch import nn

print("imported")

class Points:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return np.full(4, index / 32, np.float32), index % 3

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")
"""
TYPED = [
    "--model",
    "my_project.models:build",
    "--loss",
    "my_project.models:loss",
    "--source",
    "my_project.models:Points",
]
CALLBACK = """
from meshwright import Callback

class Witness(Callback):
    def on_incident(self, record, run):
        (run.path.parent / "incident.txt").write_text(f"{record['outcome']} {record['step']} {run.attempt}")
"""
SMALL = ["--batch.global=8", "--eval.holdout=0", "--launch.device=cpu", "--steps", "2"]
MESHWRIGHT = str(Path(sys.executable).with_name("meshwright"))


def run(folder, *args):
    return subprocess.run([MESHWRIGHT, *args], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with the run of its model in the folder `r`."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_project").mkdir()
    (folder / "my_project" / "models.py").write_text(PROJECT)
    done = run(folder, "train", *TYPED, "--run", "r", *SMALL)
    assert done.returncode == 0, done.stderr
    return folder


def test_run_folder_records_entry_points_class_and_code(project):
    record = load_config(project / "r").custom_model
    assert (record.class_, record.model) == ("torch.nn.modules.container.Sequential", "my_project.models:build")
    code = json.loads((project / "r" / "identity.json").read_text())["code"]
    assert code["fingerprint"] == record.code
    assert "function my_project.models.loss" in code["parts"]


COMMANDS = [
    "prove r",
    "prove r/run.toml",
    "simulate r",
    "simulate r/run.toml",
    "train r",
    "train r/run.toml --run r",
    "plan r/run.toml",
    "data show r/run.toml --step 1",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_verb_on_a_run_of_a_custom_model_prints_what_to_type_and_imports_nothing(project, command, monkeypatch, capsys):
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as exit:
        main(command.split())
    output = capsys.readouterr()
    assert exit.value.code == 2
    assert f"no model is given; try {' '.join(TYPED)}\n" in output.err
    assert "imported" not in output.out
    assert "my_project.models" not in sys.modules


def test_report_of_a_custom_model_names_it_without_importing_it(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    main(["report", "r"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"custom model torch.nn.modules.container.Sequential; for other verbs: {' '.join(TYPED)}" in shown
    assert "my_project.models" not in sys.modules


def test_plan_best_is_refused_for_a_custom_model(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--plan", "best", *TYPED])
    assert "--plan best plans the model of the config; try meshwright plan --model" in capsys.readouterr().err


def test_reduction_is_typed_and_recorded(project, monkeypatch):
    typed = parse(simulate, "simulate", [*TYPED, "--reduction", "mean"])["entry_points"]
    assert typed["reduction"] == "mean"
    options = CustomModelConfig(**typed).options
    assert options == " ".join([*TYPED, "--reduction", "mean"])
    with pytest.raises(ConfigError, match="invalid choice: 'max'"):
        parse(simulate, "simulate", [*TYPED, "--reduction", "max"])


@pytest.mark.parametrize("text", ["a:b; rm -rf .", "a:b $(id)", "`id`", "a:b\nc", "--model"])
def test_recorded_text_that_is_not_an_entry_point_is_never_printed(project, tmp_path, text, capsys):
    shutil.copytree(project / "r", tmp_path / "r")
    file = tmp_path / "r" / "run.toml"
    file.write_text(file.read_text().replace('"my_project.models:build"', json.dumps(text)))
    with pytest.raises(SystemExit) as exit:
        main(["simulate", str(tmp_path / "r")])
    main(["report", str(tmp_path / "r")])
    output = capsys.readouterr()
    assert exit.value.code == 2
    assert "custom_model.model is not an entry point; expected MODULE:NAME" in output.err
    assert text not in output.out + output.err.replace("--model MODULE", "")


def test_typed_code_is_compared_with_the_record(project, tmp_path):
    (tmp_path / "my_project").mkdir()
    changed = PROJECT.replace("nn.ReLU()", "nn.GELU()")
    (tmp_path / "my_project" / "models.py").write_text(changed)
    (tmp_path / "r").symlink_to(project / "r")
    refused = run(tmp_path, "simulate", "r", *TYPED)
    assert refused.returncode == 3
    assert "the code of the model, loss, collate or source is not that of the run of the config" in refused.stderr
    same = run(project, "simulate", "r", *TYPED, "--json")
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout.removeprefix("imported\n"))["parameters"] == 67


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ('model = "my_project.models:build"', "--model"),
        ('loss = "my_project.models:loss"', "--loss"),
        ('source = "my_project.models:Points"', "--source"),
        ('parallel_spec = "my_project.models:SPEC"', "--parallel-spec"),
    ],
)
def test_entry_point_in_a_run_file_is_refused(tmp_path, capsys, line, option):
    (tmp_path / "run.toml").write_text(line + "\n")
    with pytest.raises(SystemExit) as exit:
        main(["train", str(tmp_path / "run.toml")])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert f"code of your own is never imported from a run file; try {option} MODULE:NAME" in error


def test_custom_model_section_of_a_strangers_run_file_imports_nothing(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('[custom_model]\nmodel = "antigravity:build"\n')
    with pytest.raises(SystemExit):
        main(["simulate", str(tmp_path / "run.toml")])
    assert "no model is given; try --model antigravity:build" in capsys.readouterr().err
    assert "antigravity" not in sys.modules


def test_a_callback_is_an_entry_point_and_gets_the_incident_of_a_job_that_gives_up(tmp_path, monkeypatch):
    (tmp_path / "my_callbacks.py").write_text(CALLBACK)
    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.forward:rank0:raise@step1")
    options = ["--callbacks", "my_callbacks:Witness", "--restarts", "0", "--run", "r", *SMALL, "--data.sequence=8"]
    done = run(tmp_path, "train", *options)
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "incident.txt").read_text() == "failed 1 1"

    done = run(tmp_path, "train", "--callbacks", "my_callbacks:Witnes", "--run", "r", *SMALL)
    assert done.returncode == 2
    assert "did you mean Witness?" in done.stderr
