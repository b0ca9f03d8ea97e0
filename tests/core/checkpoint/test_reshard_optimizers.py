"""The state of every optimizer moves between layouts: a run that changes its layout after each step takes the same
steps as one that never does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.base.config import CheckpointConfig, RunConfig
from meshwright.base.store.posix import PosixStore
from meshwright.base.topology.optimizer_state import RULES
from meshwright.base.topology.unsupported import validate
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.saver import CheckpointSaver
from meshwright.core.checkpoint.state import collect_state
from meshwright.core.optim.build import build_optimizer
from meshwright.core.optim.check_user_optimizer import examine_optimizer
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.parallel.world import World
from meshwright.core.trainer.build import build_parallel_decoder
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.step import Step, StepContext
from meshwright.testing import run_ranks
from tests.core.checkpoint.checkpoint_fixtures import ATTEMPT_FIELDS, LINEAGE, metadata_at
from tests.kit.small_run import small_config
from tests.kit.step_harness import LR, build_loader

SIZES = ("--model.layers=2", "--model.vocab=64", "--model.experts=4", "--model.capacity_factor=0", "--batch.global=4")
LAYOUTS = {
    "shard": ("--layout.shard=parameters", "--optimizer.cpu_offload=true"),
    "tensor": ("--layout.tensor=2",),
    "pipeline": ("--layout.pipeline=2",),
    "expert": ("--layout.expert=2", "--layout.shard=optimizer"),
    "replicate": (),
}
KINDS = [*RULES, "custom"]
STEPS = len(LAYOUTS)


def config_of(kind: str, layout: str) -> RunConfig:
    options = ("--batch.micro=1", "--data.sequence=16", "--precision.compute=fp64", *SIZES, *LAYOUTS[layout])
    config = small_config(*options, f"--optimizer.kind={kind}", "--optimizer.lr=0.01", ranks=2)
    if kind == "custom":
        state = examine_optimizer(torch.optim.RMSprop, config.optimizer).state
        config = replace(config, optimizer=replace(config.optimizer, state=state))
    return config


class Run:
    """A run on one layout: its step, and the state that its checkpoints have."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self.world, self.config = world, config
        self.layout, _ = validate(config)
        precision = Precision(config.precision, world.device)
        self.model = build_parallel_decoder(config, self.layout, precision, world)
        factory = torch.optim.RMSprop if config.optimizer.kind == "custom" else None
        parameters, blocks = self.model.parameters(), self.model.block_patterns
        self.optimizer = build_optimizer(parameters, config.optimizer, self.layout, world, blocks, "", factory)
        context = StepContext.for_rank(config, self.layout, world, self.model, self.optimizer, precision)
        self.step, self.loader = Step(context), build_loader(world, config)
        self.step.warmup_backward(self.loader.first)

    def train(self, first: int, last: int) -> None:
        batches = self.loader.steps(first, last)
        for step in range(first, last):
            self.step.run(step, LR, batches)

    def state(self):
        return collect_state(self.model.module, self.model.parameters(), self.optimizer.moments())

    def save(self, store: PosixStore, done: int) -> None:
        mode = CheckpointConfig(mode="sync")
        saver = CheckpointSaver(mode, store, self.world, LINEAGE, 1, ATTEMPT_FIELDS, self.state, layout=self.layout)
        (saved,) = saver.save(metadata_at(done))
        saver.close()
        assert saved.error is None, saved.error

    def load(self, store: PosixStore) -> None:
        options = {"fallback": False, "on_damaged": lambda *_: None}
        assert restore(store, self.world, LINEAGE, self.state(), lambda _: None, **options) is not None
        self.optimizer.after_restore(True)
        self.model.after_update()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: full_tensor(parameter).clone() for name, parameter in self.model.parameters().items()}


def largest_difference(world: World, folder: str, kinds: list[str]) -> dict[str, float]:
    """By kind: the largest difference between the parameters of a run on one layout and of one that changes it."""
    differences = {}
    for kind in kinds:
        unchanged = Run(world, config_of(kind, "replicate"))
        unchanged.train(0, STEPS)
        run = None
        for done, layout in enumerate(LAYOUTS):
            previous, run = run, Run(world, config_of(kind, layout))
            if previous is not None:
                path = Path(folder, f"{kind}-{done}")
                path.mkdir(exist_ok=True)
                store = PosixStore(path)
                previous.save(store, done)
                run.load(store)
            run.train(done, done + 1)
        expected, found = unchanged.parameters(), run.parameters()
        assert expected.keys() == found.keys()
        differences[kind] = max(float((expected[name] - found[name]).abs().max()) for name in expected)
    return differences


@pytest.mark.parametrize("kinds", [["sgd", "lion", "custom"], pytest.param(KINDS, marks=pytest.mark.long)])
def test_run_that_changes_its_layout_takes_the_steps_of_one_that_does_not(tmp_path, kinds):
    differences = run_ranks(largest_difference, 2, str(tmp_path), kinds)[0]
    assert all(difference < 1e-10 for difference in differences.values()), differences
