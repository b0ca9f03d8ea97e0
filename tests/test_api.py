"""The Python surface: a script, torchrun, and code without a file, as in a notebook cell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright
from meshwright import RunConfig, train
from meshwright.errors import ConfigError

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable],
        [str(BIN / "torchrun"), "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"],
    ],
)
def test_the_example_trains_a_users_own_model(tmp_path, launcher):
    command = [*launcher, str(ROOT / "examples" / "custom_model.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    right = float(re.search(r"([\d.]+)% of all points", done.stdout)[1])
    assert right > 95


NOTEBOOK = """
import torch, numpy as np
from meshwright import train, RunConfig
from meshwright.config import BatchConfig, EvalConfig, OptimizerConfig

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
for again in range(2):
    train(config, model=model, loss=lambda out, y: ((out - y) ** 2).sum(), source=data, run="runs/cell", quiet=True)
print("factor", float(model.factor))
"""


def test_code_without_a_file_trains_as_in_a_notebook_cell(tmp_path):
    """No module to import and no __main__ guard: what spawn-based launchers cannot do."""
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


def test_the_package_imports_without_torch_and_knows_its_names():
    code = "import sys, meshwright; meshwright.RunConfig; meshwright.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert meshwright.RunConfig is RunConfig
    with pytest.raises(AttributeError):
        _ = meshwright.nothing


def test_a_model_without_its_loss_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="come together"):
        train(RunConfig(), loss=lambda a, b: a, run=tmp_path / "r", quiet=True)


TWICE = """
import sys
from meshwright import train
from meshwright.config import load
for name in ("one", "two"):
    config = load(steps=2, ranks=2, overrides=["--model.layers=1", "--data.kind=synthetic"])
    train(config, run=name, quiet=True)
"""


def test_two_trainings_in_one_torchrun_process_do_not_meet_each_others_keys(tmp_path):
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
import time
import torch
from meshwright import RunConfig, train
from meshwright.config import BatchConfig, DataConfig, EvalConfig

class Sleepy:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        print("asked", flush=True)
        time.sleep(100)

data = DataConfig(workers=1, worker_kind="process")
config = RunConfig(batch=BatchConfig(global_=8), eval=EvalConfig(holdout=0.0), data=data)
source = Sleepy()
source.fingerprint = lambda: "sleepy"
train(config, model=torch.nn.Linear(2, 2), loss=lambda a, b: a.sum(), source=source, run="hung", quiet=True)
"""


def test_two_interrupts_end_a_hung_run_at_once_and_its_workers_with_it(tmp_path):
    script = tmp_path / "hung.py"
    script.write_text(HUNG)
    job = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    log = tmp_path / "hung" / "attempts" / "0001" / "rank-00000.log"
    end = time.monotonic() + 60
    while not (log.exists() and "asked" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    for _ in range(2):
        job.send_signal(signal.SIGINT)
        time.sleep(1.0)
    _, err = job.communicate(timeout=20)  # the pipe would stay open while a worker lives
    assert "a second signal 2: the ranks were killed where they stood" in err
