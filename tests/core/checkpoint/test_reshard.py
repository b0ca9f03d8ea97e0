"""Resharding: a checkpoint of one data- or tensor-parallel layout restores bitwise in any other."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from meshwright import train
from meshwright.base.checkpoint.listing import list_published
from meshwright.base.config import CheckpointConfig, RunConfig
from meshwright.base.store.posix import PosixStore
from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.saver import CheckpointSaver
from meshwright.core.checkpoint.state import collect_state
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.trainer.build import build_parallel_decoder
from meshwright.core.trainer.precision import Precision
from meshwright.testing import run_ranks
from tests.core.checkpoint.checkpoint_fixtures import ATTEMPT_FIELDS, LINEAGE, metadata_at
from tests.kit.small_run import small_config, step_records

UNEVEN = ("--model.vocab=250", "--model.ffn=46", "--model.kv_heads=2", "--batch.global=24")
LAYOUTS = {
    "one": ("--layout.replicate=1",),
    "replicate 2": ("--layout.replicate=2",),
    "shard 3": ("--layout.replicate=3", "--layout.shard=parameters"),
    "optimizer 2": ("--layout.replicate=2", "--layout.shard=optimizer"),
    "tensor 2": ("--layout.replicate=1", "--layout.tensor=2"),
    "replicate 2 x shard 2": ("--layout.replicate=2", "--layout.shard=gradients", "--layout.shard_degree=2"),
    "shard 2 x tensor 2": ("--layout.replicate=2", "--layout.shard=parameters", "--layout.tensor=2"),
    "replicate 2 x tensor 2": ("--layout.replicate=2", "--layout.tensor=2"),
}
ROUTE = (
    "one",
    "shard 3",
    "shard 2 x tensor 2",
    "replicate 2",
    "tensor 2",
    "replicate 2 x shard 2",
    "replicate 2 x tensor 2",
    "optimizer 2",
    "one",
)


def config_of(name: str, *more: str) -> RunConfig:
    return small_config(*UNEVEN, *more, *LAYOUTS[name], ranks=None)


def load_and_save(world, config: RunConfig, source: str, target: str) -> None:
    """Load the checkpoint of one folder and save it in another; without a source, save distinct values."""
    layout = Layout.from_config(config.layout)
    parallel_model = build_parallel_decoder(config, layout, Precision(config.precision, world.device), world)
    optimizer = build_optimizer(
        parallel_model.parameters(), config.optimizer, layout, world, parallel_model.block_patterns
    )
    state = collect_state(parallel_model.module, dict(parallel_model.module.named_parameters()), optimizer.moments())
    if source:
        result = restore(
            PosixStore(source), world, LINEAGE, state, lambda _: None, fallback=False, on_damaged=lambda *_: None
        )
        assert result is not None
    else:
        for number, (name, tensor) in enumerate(sorted(state.items())):
            local = local_shard(tensor).local
            if name.startswith("optimizer"):
                local += number + (0 if not local.ndim else local.new_tensor(range(local.numel())).view_as(local) / 7)
    mode = CheckpointConfig(mode="sync")
    saver = CheckpointSaver(mode, PosixStore(target), world, LINEAGE, 1, ATTEMPT_FIELDS, lambda: state, layout=layout)
    (saved,) = saver.save(metadata_at(1))
    saver.close()
    if saved.error is not None:
        raise saved.error


def digest(folder) -> str:
    return state_digest(list_published(PosixStore(folder))[0])


def reshard(source: str, config: RunConfig, target) -> str:
    target.mkdir(parents=True)
    run_ranks(load_and_save, Layout.from_config(config.layout).ranks, config, source, str(target))
    return digest(target)


@pytest.mark.parametrize("tie", ["false", pytest.param("true", marks=pytest.mark.long)])
def test_state_digest_is_kept_through_every_kind_of_layout(tmp_path, tie):
    more = (f"--model.tie={tie}",)
    first = reshard("", config_of("one", *more), tmp_path / "0")
    for index, name in enumerate(ROUTE, 1):
        assert reshard(str(tmp_path / str(index - 1)), config_of(name, *more), tmp_path / str(index)) == first, name


@pytest.mark.long
def test_checkpoint_of_each_layout_loads_in_each_other(tmp_path):
    start = reshard("", config_of("one"), tmp_path / "start")
    for name in LAYOUTS:
        assert reshard(str(tmp_path / "start"), config_of(name), tmp_path / name) == start
    for one, other in permutations(LAYOUTS, 2):
        assert reshard(str(tmp_path / one), config_of(other), tmp_path / f"{one} to {other}") == start


def test_each_replicated_shard_is_saved_by_one_rank(tmp_path):
    reshard("", config_of("replicate 2 x tensor 2"), tmp_path / "saved")
    manifest = list_published(PosixStore(tmp_path / "saved"))[0].manifest
    assert manifest is not None
    assert len(manifest.parts) == 4
    sizes = [part.shard_bytes for part in manifest.parts.values()]
    assert max(sizes) < 1.5 * min(sizes)


def test_training_resumes_on_another_layout_with_the_same_losses(tmp_path):
    """The reference is a run that never changes its layout."""
    names = ("shard 3", "shard 2 x tensor 2", "replicate 2")
    exact = ("--precision.compute=fp64", "--data.samples=500", "--schedule.kind=constant")
    reference = small_config(*UNEVEN, *exact, *LAYOUTS["replicate 2"], ranks=None, steps=6)
    train(reference, run=tmp_path / "reference", quiet=True)
    for index, name in enumerate(names, 1):
        config = small_config(*UNEVEN, *exact, *LAYOUTS[name], ranks=None, steps=6)
        train(replace(config, steps=2 * index), run=tmp_path / "resumed", quiet=True, fork=index > 1)
    expected, found = (step_records(tmp_path / name) for name in ("reference", "resumed"))
    assert sorted(found) == list(range(6))
    for step, record in found.items():
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(expected[step][key], rel=1e-10), (step, key)
