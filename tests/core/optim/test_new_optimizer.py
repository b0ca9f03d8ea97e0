"""The recipe "An optimizer" of CONTRIBUTING, carried out in a copy of the package with a variant of Muon."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RULE = '''"""Orbit: the gradient and its momentum are orthogonalized together, by as many iterations as it is told."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from meshwright.core.optim.interface import UpdateRule
from meshwright.core.optim.matrix_exchange import MatrixExchange
from meshwright.core.optim.muon import orthogonalize


class Orbit(UpdateRule):
    """Updates matrices by the orthogonalized sum of gradient and momentum."""

    def __init__(self, parameters, config, layout, world, group=None) -> None:
        super().__init__(parameters, config, layout, world, group)
        self.state = {p.local: {"velocity": torch.zeros_like(p.local)} for p in parameters}
        self.exchange = MatrixExchange(parameters, layout, world, group)

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        if not self.is_finite(finite):
            return
        self.divide_gradients(divisor)
        directions = {}
        for p in self.parameters:
            gradient = torch.zeros_like(p.local) if p.local.grad is None else p.local.grad
            velocity = self.state[p.local]["velocity"].mul_(self.config.momentum).add_(gradient)
            directions[p.name] = velocity + gradient
        self.exchange.map_matrices(directions, partial(orthogonalize, steps=self.config.orbit_steps))
        for p in self.parameters:
            rate = lr * p.settings.lr_factor
            p.local.mul_(1 - rate * p.settings.weight_decay).add_(directions[p.name], alpha=-rate)
'''
DECLARATION = """
    "orbit": RuleDeclaration(
        lambda _config, shape: moments(shape, "velocity"),
        ("momentum", "orbit_steps"),
        whole_matrices=True,
        matmuls=lambda config, short, long: ((short, short, long), (short, long, short)) * config.orbit_steps,
        otherwise="adamw",
    ),"""
DEFINITION = """
def orbit(parameter: Tensor, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
    velocity = rates.config.momentum * moment(state, "velocity", parameter) + gradient
    direction = velocity + gradient
    matrices = direction if direction.ndim == 3 else direction[None]
    update = torch.stack([polar_factor(matrix, rates.config.orbit_steps) for matrix in matrices]).view_as(parameter)
    return parameter - rates.lr * (update + rates.decay * parameter), {"velocity": velocity}


"""
SETTING = '''    orbit_steps: Annotated[int, Range(minimum=1, maximum=20)] = 3
    """orbit: iterations that orthogonalize"""
'''
EDITS = {
    "meshwright/base/config/optimizer.py": [
        ('"adafactor", "custom"]', '"orbit", {}'),
        ("    clip: ", SETTING + "{}"),
    ],
    "meshwright/base/topology/optimizer_state.py": [("RULES: dict[str, RuleDeclaration] = {", "{}" + DECLARATION)],
    "meshwright/core/optim/build.py": [
        ("from meshwright.core.optim.sgd import SGD\n", "{}from meshwright.core.optim.orbit import Orbit\n"),
        ("RULES: dict[str, type[UpdateRule]] = {", '{}"orbit": Orbit, '),
    ],
    "meshwright/prover/oracle/update_rules.py": [
        ("UPDATES: dict[str, Update] = {", DEFINITION + '{}"orbit": orbit, '),
        ("MATRIX_RULES = {", '{}"orbit": "adamw", '),
    ],
}
"""File -> what is replaced, and by what; {} stands for what was there."""
SCRIPT = """
import json, os, sys
from pathlib import Path
import meshwright
from tests.kit.small_run import small_config, step_records

def config(mode):
    saves = ["--checkpoint.every=2", "--checkpoint.seconds=0", "--checkpoint.mode=sync"]
    options = ["--optimizer.kind=orbit", "--precision.compute=fp64", "--optimizer.lr=0.02", f"--layout.shard={mode}"]
    return small_config(*options, *saves, steps=4)

folder, proved = Path(sys.argv[1]), sys.argv[2]
found = {"package": meshwright.__file__, "losses": {}, "attempts": {}}
for mode in sys.argv[3:]:
    assert meshwright.plan(config(mode), "h100:2").chosen.phases["update"] > 0
    os.environ["MESHWRIGHT_FAULT"] = "step.forward:rank1:kill@step3#0"
    run = meshwright.train(config(mode), run=folder / mode, quiet=True).folder
    del os.environ["MESHWRIGHT_FAULT"]
    found["losses"][mode] = [record["loss"] for _, record in sorted(step_records(run).items())]
    found["attempts"][mode] = len(list(run.glob("attempts/*/incident.json")))
    if mode == proved:
        found["passed"] = meshwright.prove(config(mode), out=folder / "certificate.json")["passed"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the package with the optimizer that the recipe adds."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("meshwright", "tests/kit"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tests/__init__.py").touch()
    (root / "meshwright/core/optim/orbit.py").write_text(RULE)
    for name, edits in EDITS.items():
        text = (root / name).read_text()
        for before, after in edits:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after.replace("{}", before))
        (root / name).write_text(text)
    return root


def follow(copy: Path, folder: Path, proved: str, *modes: str) -> dict:
    """Plans and trains the optimizer in each mode of sharding, and resumes after a kill; proves it in one of them."""
    variables = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder), proved, *modes]
    done = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["package"].startswith(str(copy))
    assert set(found["attempts"].values()) == {2}, "the killed run has resumed"
    return found


def test_recipe_names_every_file_that_a_new_optimizer_needs():
    recipe = re.search(r"\*\*An optimizer\.\*\*.*?\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert not [name for name in (*EDITS, "meshwright/core/optim/NAME.py") if f"`{name}`" not in recipe[0]]


def test_new_optimizer_is_planned_trains_and_resumes(copy, tmp_path):
    [losses] = follow(copy, tmp_path, "", "parameters")["losses"].values()
    assert len(losses) == 4
    assert len(set(losses)) == 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_new_optimizer_is_proved_and_trains_in_every_sharding(copy, tmp_path):
    found = follow(copy, tmp_path, "parameters", "none", "optimizer", "gradients", "parameters")
    assert found["passed"]
    assert all(losses == pytest.approx(found["losses"]["none"], abs=1e-10) for losses in found["losses"].values())
