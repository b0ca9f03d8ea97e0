"""Tests of the public Python API: scripts, torchrun, notebook cells, errors, and the names of the package."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import meshwright
from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, DataConfig, EvalConfig
from meshwright.base.records.heartbeat import read_heartbeat
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError, DataError, IdentityError, NumericsError, RankError
from meshwright.prover.claims import Claim

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable],
        pytest.param(
            [str(BIN / "torchrun"), "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_example_of_a_custom_model_trains_in_a_script_and_under_torchrun(tmp_path, launcher):
    command = [*launcher, str(ROOT / "examples" / "custom_model.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"([\d.]+)% of all points", done.stdout)[1])
    assert accuracy > 95


NOTEBOOK = """
import torch, numpy as np
from meshwright import train, RunConfig
from meshwright.base.config import BatchConfig, EvalConfig, OptimizerConfig

class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros(1))
    def forward(self, x):
        return self.factor * x

model = Twice()
data = [(float(i), 2.0 * i) for i in range(1, 65)]
data = [(np.array([x], np.float32), np.array([y], np.float32)) for x, y in data]
optimizer = OptimizerConfig(lr=0.05, weight_decay=0.0)
config = RunConfig(steps=150, batch=BatchConfig(global_=8), eval=EvalConfig(holdout=0.0), optimizer=optimizer)
for _ in range(2):
    train(config, model=model, loss=lambda out, y: ((out - y) ** 2).sum(), source=data, run="runs/cell", quiet=True)
print("factor", float(model.factor))
"""


def test_train_works_in_code_without_a_file_as_in_a_notebook_cell(tmp_path):
    """There is no module to import and no __main__ guard, which launchers that spawn processes need."""
    done = subprocess.run(
        [sys.executable, "-"],
        input=NOTEBOOK,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == pytest.approx(2.0, abs=0.2)


def test_import_meshwright_does_not_import_torch():
    code = (
        "import sys, meshwright; meshwright.RunConfig; meshwright.train; meshwright.plan('tiny', 'h100:2')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_lists_the_public_names_and_each_of_them_resolves():
    assert dir(meshwright) == sorted(meshwright.__all__)
    for name in (
        "train",
        "plan",
        "simulate",
        "prove",
        "report",
        "Result",
        "RunConfig",
        "ParallelSpec",
        "errors",
        "testing",
        "__version__",
    ):
        assert name in dir(meshwright)
        assert getattr(meshwright, name) is not None
    assert meshwright.RunConfig is RunConfig
    with pytest.raises(AttributeError, match="module 'meshwright' has no attribute 'nothing'"):
        _ = meshwright.nothing


@pytest.mark.parametrize("name", ["train", "plan", "simulate", "prove", "report"])
def test_every_argument_of_a_public_function_is_documented(name):
    function = getattr(meshwright, name)
    arguments, _, rest = inspect.getdoc(function).partition("Args:")[2].partition("Returns:")
    assert "Raises:" in rest
    for parameter in inspect.signature(function).parameters:
        assert f"\n    {parameter}: " in arguments


def test_loss_without_a_model_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match="loss is given without a model"):
        train(RunConfig(), loss=lambda a, b: a, run=tmp_path / "r", quiet=True)


TWICE = """
from meshwright import train
from meshwright.base.config import load_config
for name in ("one", "two"):
    overrides = ["--model.layers=1", "--data.kind=synthetic", "--launch.device=cpu"]
    config = load_config(steps=2, ranks=2, overrides=overrides)
    train(config, run=name, quiet=True)
"""


@pytest.mark.long
def test_train_can_be_called_twice_in_one_torchrun_process(tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    command = [
        str(BIN / "torchrun"),
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--nproc-per-node=2",
        "twice.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


HUNG = """
import os
import time
import torch
from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, DataConfig, EvalConfig

class Sleepy:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        if os.path.exists("hung/attempts"):  # the ranks have started
            print("reading", flush=True)
            time.sleep(100)
        return torch.zeros(2), torch.zeros(2)

data = DataConfig(workers=1, worker_kind="process")
config = RunConfig(batch=BatchConfig(global_=8), eval=EvalConfig(holdout=0.0), data=data)
source = Sleepy()
source.fingerprint = lambda: "sleepy"
train(config, model=torch.nn.Linear(2, 2), loss=lambda a, b: a.sum(), source=source, run="hung", quiet=True)
"""


def test_second_ctrl_c_kills_the_ranks_and_their_data_loader_workers(tmp_path):
    script = tmp_path / "hung.py"
    script.write_text(HUNG)
    job = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    log = tmp_path / "hung" / "attempts" / "0001" / "rank-00000.log"
    end = time.monotonic() + 120
    while not (log.exists() and "reading" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    heartbeat = RunFolder(tmp_path / "hung").heartbeat(1, 0)
    while read_heartbeat(heartbeat).signal != signal.SIGINT and time.monotonic() < end:  # two at once would be one
        time.sleep(0.01)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=120)  # the pipe stays open as long as a worker lives
    assert "KeyboardInterrupt: a second signal 2 killed the ranks" in err
    assert job.returncode == -signal.SIGINT


INTERRUPTED = """
from meshwright import train
from meshwright.base.config import load_config
settings = ["model.layers=1", "model.width=32", "model.ffn=32", "data.kind=synthetic", "data.sequence=16"]
train(load_config(steps=100000, ranks=2, overrides=[*settings, "launch.device=cpu"]), run="run", quiet=True)
"""


def test_ctrl_c_in_a_script_raises_keyboard_interrupt_after_a_checkpoint(tmp_path):
    """The script must end as any interrupted Python script does: killed by SIGINT, which a shell shows as 130."""
    (tmp_path / "script.py").write_text(INTERRUPTED)
    job = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    events = tmp_path / "run" / "events" / "rank-00000.jsonl"
    end = time.monotonic() + 60
    while not (events.exists() and '"kind":"step"' in events.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=120)
    assert "KeyboardInterrupt: stopped by signal 2 before step" in err
    assert job.returncode == -signal.SIGINT
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))


def linear_run(tmp_path, loss, source=None, **settings):
    config = RunConfig(batch=BatchConfig(global_=4), eval=EvalConfig(holdout=0.0), steps=3)
    sample = (np.ones(2, np.float32), np.ones(2, np.float32))
    model = torch.nn.Linear(2, 2)
    return train(config, model=model, loss=loss, source=source or [sample] * 8, run=tmp_path, quiet=True, **settings)


def squared_error(outputs, targets):
    return ((outputs - targets) ** 2).sum()


def test_nonfinite_loss_raises_numerics_error_with_rank_and_step(tmp_path):
    with pytest.raises(NumericsError) as raised:
        linear_run(tmp_path / "r", lambda outputs, targets: squared_error(outputs, targets) * float("nan"))
    assert type(raised.value) is NumericsError
    assert raised.value.rank in (0, 1)
    assert raised.value.step == 0
    assert raised.value.exit_code == 7


def test_invalid_loss_raises_config_error_of_the_rank(tmp_path):
    with pytest.raises(ConfigError, match="shape") as raised:
        linear_run(tmp_path / "r", lambda outputs, targets: (outputs - targets) ** 2)
    assert raised.value.rank in (0, 1)


class BrokenSource:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise OSError(f"sample {index} is unreadable")


def test_unreadable_sample_raises_data_error(tmp_path):
    with pytest.raises(DataError, match="unreadable"):
        linear_run(tmp_path / "r", squared_error, BrokenSource())


def test_exception_in_the_users_loss_raises_rank_error_with_its_line_and_traceback(tmp_path):
    def failing_loss(outputs, targets):
        if outputs.dtype == torch.float32:  # in the run, not in the check of the first batch, which is in float64
            raise ZeroDivisionError("my mistake")
        return outputs.sum()

    expected = (
        r"rank [01]\S*.*: ZeroDivisionError: my mistake \(\S*test_api.py, line \d+\); deterministic: failed again"
    )
    with pytest.raises(RankError, match=expected) as raised:
        linear_run(tmp_path / "r", failing_loss)
    error = raised.value
    assert error.rank in (0, 1)
    assert error.phase
    assert "failing_loss" in error.traceback
    assert error.__notes__ == [error.traceback]
    [log] = (tmp_path / "r" / "attempts" / "0001").glob(f"rank-{error.rank:05d}.log")
    assert "failing_loss" in log.read_text()


def test_identity_error_advises_keyword_arguments_not_command_line_options(tmp_path):
    config = RunConfig(steps=1, eval=EvalConfig(holdout=0.0), data=DataConfig(kind="synthetic"))
    train(config, run=tmp_path / "r", quiet=True)
    with pytest.raises(IdentityError) as raised:
        train(dataclasses.replace(config, seed=1), run=tmp_path / "r", quiet=True)
    assert "fresh=True" in str(raised.value)
    assert "--" not in str(raised.value)


def test_plan_takes_a_preset_or_a_config_and_returns_the_ranking():
    result = meshwright.plan("llama-8b", "h100:8", top=3)
    assert result.chosen.job == result.search.ranked[0].job
    fixed = meshwright.plan(RunConfig(), "h100:2", batch=32, overrides=["layout.tensor=2"])
    assert fixed.chosen.job.layout.tensor == 2
    assert fixed.chosen.job.batch.global_ == 32
    with pytest.raises(ConfigError, match="3 ranks on 2 devices; expected 1 to 2 ranks"):
        meshwright.plan("tiny", "h100:2", ranks=3)


def test_plan_and_simulate_take_a_users_model():
    model, data = torch.nn.Linear(2, 2), [(np.ones(2, np.float32), np.ones(2, np.float32))] * 8
    config = RunConfig(batch=BatchConfig(global_=8), eval=EvalConfig(holdout=0.0))
    assert meshwright.simulate(config, model=model, loss=squared_error, source=data).parameters == 6
    result = meshwright.plan(config, "h100:2", model=model, loss=squared_error, source=data)
    assert result.workload.model.parameters == 6
    with pytest.raises(ConfigError, match=r"source is given without a model; try model=MODULE:NAME, or no source"):
        meshwright.simulate(config, source=data)


def test_prove_returns_the_certificate_and_writes_it(tmp_path, monkeypatch):
    checks = {"stream": lambda config, full: iter([Claim("the stream is a permutation", True, "1 of 1")])}
    monkeypatch.setattr("meshwright.prover.prove.CHECKS", checks)
    certificate = meshwright.prove(RunConfig(), out=tmp_path / "certificate.json")
    assert certificate["passed"] is True
    assert json.loads((tmp_path / "certificate.json").read_text()) == json.loads(json.dumps(certificate))
    with pytest.raises(ConfigError, match="cannot be written"):
        meshwright.prove(RunConfig(), out=tmp_path)
