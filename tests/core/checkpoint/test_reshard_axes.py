"""Resharding over every axis: all layouts write the same state and restore each other's checkpoints bitwise."""

from __future__ import annotations

import zlib
from math import prod

import pytest
import torch

from meshwright.base.checkpoint.listing import list_published
from meshwright.base.config import CheckpointConfig, RunConfig
from meshwright.base.store.posix import PosixStore
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.saver import CheckpointSaver
from meshwright.core.checkpoint.state import CheckpointState, collect_state
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.local_shard import LocalShard, local_shard, local_tensor
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.world import World
from meshwright.core.trainer.build import build_parallel_decoder
from meshwright.core.trainer.precision import Precision
from meshwright.testing import run_ranks
from tests.core.checkpoint.checkpoint_fixtures import ATTEMPT_FIELDS, LINEAGE, metadata_at
from tests.kit.small_run import small_config

SIZES = ("--model.layers=4", "--model.vocab=250", "--model.ffn=46", "--model.kv_heads=2", "--batch.global=8")
PIPELINE = ("--layout.pipeline=2", "--batch.micro=1")
DENSE = {
    "one": (1, ()),
    "replicate": (2, ()),
    "optimizer": (2, ("--layout.shard=optimizer",)),
    "tensor": (2, ("--layout.tensor=2",)),
    "context": (2, ("--layout.context=2",)),
    "1f1b": (2, PIPELINE),
    "interleaved": (2, (*PIPELINE, "--pipeline.schedule=interleaved")),
    "zbv": (2, (*PIPELINE, "--pipeline.schedule=zbv")),
    "shard": (4, ("--layout.shard=parameters",)),
    "replicate x shard": (4, ("--layout.shard=gradients", "--layout.shard_degree=2")),
    "four stages": (4, ("--layout.pipeline=4", "--batch.micro=1")),
    "zbv x shard": (4, (*PIPELINE, "--pipeline.schedule=zbv", "--layout.shard=optimizer")),
    "interleaved x tensor": (4, (*PIPELINE, "--pipeline.schedule=interleaved", "--layout.tensor=2")),
    "pipeline x context": (4, (*PIPELINE, "--layout.context=2")),
    "context x shard": (4, ("--layout.context=2", "--layout.shard=parameters")),
}
EXPERT = {
    "expert x replicate": (2, ("--layout.expert=2",)),
    "expert x context": (2, ("--layout.expert=2", "--layout.context=2")),
    "expert x shard": (4, ("--layout.expert=2", "--layout.shard=parameters")),
    "four experts x shard": (4, ("--layout.expert=4", "--layout.shard=parameters")),
    "expert x pipeline": (4, (*PIPELINE, "--layout.expert=2")),
    "expert x tensor": (4, ("--layout.tensor=2", "--layout.expert=2")),
}
EXPERTS = ("--model.experts=4", "--model.experts_shared=1")


def config_of(layout: tuple[int, tuple[str, ...]], model: tuple[str, ...]) -> RunConfig:
    ranks, options = layout
    config = small_config(*SIZES, *model, *options, ranks=ranks)
    validate(config)
    return config


def expected_values(name: str, shard: LocalShard) -> torch.Tensor:
    """The local values of a tensor whose content depends only on its name and the index of the element."""
    start = zlib.crc32(name.encode()) % 1000 + 1
    full = torch.arange(start, start + prod(shard.shape), dtype=torch.float64).reshape(shard.shape) / 7
    for dim, (offset, size) in enumerate(zip(shard.offset, shard.local.shape, strict=True)):
        full = full.narrow(dim, min(offset, full.shape[dim] - size), size)
    return full.to(shard.local.dtype)


def build(world: World, config: RunConfig) -> tuple[ParallelModel, Layout, CheckpointState]:
    layout = Layout.from_config(config.layout)
    parallel_model = build_parallel_decoder(config, layout, Precision(config.precision, world.device), world)
    optimizer = build_optimizer(
        parallel_model.parameters(), config.optimizer, layout, world, parallel_model.block_patterns
    )
    return (
        parallel_model,
        layout,
        collect_state(parallel_model.module, parallel_model.parameters(), optimizer.moments()),
    )


@torch.no_grad()
def save_and_load(world: World, configs: dict[str, RunConfig], folder: str, sources: list[str]) -> dict[str, list[str]]:
    """Build each layout and save its state, unless that is done; then load the checkpoints of `sources` in each. Return
    the tensors that differ, by layout.
    """
    models = {name: build(world, config) for name, config in configs.items()}
    for name, (_, layout, state) in models.items():
        if (store := PosixStore(f"{folder}/{name}")).list_names("checkpoints"):
            continue
        for key, tensor in state.items():
            local_shard(tensor).local.copy_(expected_values(key, local_shard(tensor)))
        mode = CheckpointConfig(mode="sync")
        saver = CheckpointSaver(
            mode, store, world, LINEAGE, 1, ATTEMPT_FIELDS, lambda state=state: state, layout=layout
        )
        (saved,) = saver.save(metadata_at(1))
        saver.close()
        if saved.error is not None:
            raise saved.error
    return {
        name: [
            tensor
            for source in sources
            for tensor in load_and_compare(world, parallel_model, state, f"{folder}/{source}", source)
        ]
        for name, (parallel_model, _, state) in models.items()
    }


def load_and_compare(
    world: World, parallel_model: ParallelModel, state: CheckpointState, folder: str, source: str
) -> list[str]:
    """The tensors of a layout that differ after the checkpoint of a folder is loaded."""
    for tensor in state.values():
        local_shard(tensor).local.fill_(-1)
    options = {"fallback": False, "on_damaged": lambda *_: None}
    assert restore(PosixStore(folder), world, LINEAGE, state, lambda _: None, **options) is not None
    parallel_model.after_update()
    parallel_model.reshard()
    different = [
        f"{source}: {key}"
        for key, tensor in state.items()
        if not torch.equal(local_shard(tensor).local, expected_values(key, local_shard(tensor)))
    ]
    for name in parallel_model.tied_copies:
        weight = dict(parallel_model.module.named_parameters())[name]
        if not torch.equal(
            local_tensor(weight), expected_values("model/decoder.embedding.weight", local_shard(weight))
        ):
            different.append(f"{source}: {name}")
    return different


def check_all(tmp_path, layouts, model: tuple[str, ...], hubs: list[str] | None = None) -> None:
    """Load the checkpoint of each layout in each other; with `hubs`, layouts of four ranks, only from each hub to all
    layouts and from all layouts to each hub. Layouts with the same number of ranks share a launch.
    """
    configs = {name: config_of(layout, model) for name, layout in layouts.items()}
    for name in layouts:
        (tmp_path / name).mkdir()
    by_ranks = {
        ranks: {name: config for name, config in configs.items() if layouts[name][0] == ranks} for ranks in (4, 2, 1)
    }
    for ranks, group in by_ranks.items():
        check(tmp_path, ranks, group, hubs or [name for name in layouts if layouts[name][0] >= ranks])
    second_pass = {4: {hub: configs[hub] for hub in hubs}} if hubs else {ranks: by_ranks[ranks] for ranks in (4, 2)}
    for ranks, group in second_pass.items():
        check(
            tmp_path,
            ranks,
            group,
            [name for name in layouts if layouts[name][0] < ranks or (hubs and name not in hubs)],
        )
    digests = {name: state_digest(list_published(PosixStore(tmp_path / name))[0]) for name in layouts}
    assert len(set(digests.values())) == 1, digests


def check(tmp_path, ranks: int, configs: dict[str, RunConfig], sources: list[str]) -> None:
    for different in run_ranks(save_and_load, ranks, configs, str(tmp_path), sources):
        assert different == {name: [] for name in configs}


@pytest.mark.long
def test_moe_checkpoint_loads_on_every_layout(tmp_path):
    check_all(tmp_path, DENSE | EXPERT, (EXPERTS[0], "--model.tie=true"), ["expert x shard"])


def test_dense_checkpoint_loads_on_every_pipeline_schedule(tmp_path):
    names = ("one", "1f1b", "interleaved", "zbv", "zbv x shard", "interleaved x tensor", "context x shard")
    check_all(tmp_path, {name: DENSE[name] for name in names}, (), ["zbv x shard"])


@pytest.mark.long
@pytest.mark.parametrize("tie", ["true", "false"])
def test_moe_checkpoint_of_each_layout_loads_on_each_other(tmp_path, tie):
    check_all(tmp_path, DENSE | EXPERT, (*EXPERTS, f"--model.tie={tie}"))


@pytest.mark.long
@pytest.mark.parametrize("tie", ["true", "false"])
def test_dense_checkpoint_of_each_layout_loads_on_each_other(tmp_path, tie):
    check_all(tmp_path, DENSE, (f"--model.tie={tie}",))
