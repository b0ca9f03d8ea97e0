"""Every axis writes the same checkpoint, and reads any other's: parameters, moments and router biases bit for bit."""

from __future__ import annotations

import zlib
from math import prod

import pytest
import torch
from small_checkpoints import FACTS, LINEAGE, notes_at
from small_run import small_config

from meshwright.checkpoint.listing import list_published
from meshwright.checkpoint.restore import restore
from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.checkpoint.state import CheckpointState, collect_state
from meshwright.checkpoint.unsharded import state_digest
from meshwright.config import CheckpointConfig, RunConfig
from meshwright.optim.adamw import AdamW
from meshwright.parallel.local_shard import LocalShard, local_shard, local_tensor
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.world import World
from meshwright.store.posix import PosixStore
from meshwright.testing import run_ranks
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate
from meshwright.trainer.loop import build_parallel_decoder
from meshwright.trainer.precision import Precision

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
    ranks, words = layout
    config = small_config(*SIZES, *model, *words, ranks=ranks)
    validate(config)
    return config


def numbers(name: str, block: LocalShard) -> torch.Tensor:
    """What a block holds of a tensor whose content depends on its name and on the place in the whole alone."""
    start = zlib.crc32(name.encode()) % 1000 + 1
    whole = torch.arange(start, start + prod(block.shape), dtype=torch.float64).reshape(block.shape) / 7
    for dim, (offset, size) in enumerate(zip(block.offset, block.local.shape, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim] - size), size)
    return whole.to(block.local.dtype)


def built(world: World, config: RunConfig) -> tuple[ParallelModel, Layout, CheckpointState]:
    layout = Layout.from_config(config.layout)
    spread = build_parallel_decoder(config, layout, Precision(config.precision, world.device), world)
    optimizer = AdamW(spread.parameters(), config.optimizer, layout, world)
    return spread, layout, collect_state(spread.module, spread.parameters(), optimizer.moments())


@torch.no_grad()
def carry(world: World, configs: dict[str, RunConfig], folder: str, sources: list[str]) -> dict[str, list[str]]:
    """Builds each layout and writes what it holds, unless that was done; then each loads what `sources` hold. What was
    off, by layout.
    """
    made = {name: built(world, config) for name, config in configs.items()}
    for name, (_, layout, state) in made.items():
        if (store := PosixStore(f"{folder}/{name}")).list_names("checkpoints"):
            continue
        for key, tensor in state.items():
            local_shard(tensor).local.copy_(numbers(key, local_shard(tensor)))
        mode = CheckpointConfig(mode="sync")
        saver = CheckpointSaver(mode, store, world, LINEAGE, 1, FACTS, lambda state=state: state, layout=layout)
        (saved,) = saver.save(notes_at(1))
        saver.close()
        if saved.error is not None:
            raise saved.error
    return {
        name: [off for source in sources for off in loaded(world, spread, state, f"{folder}/{source}", source)]
        for name, (spread, _, state) in made.items()
    }


def loaded(world: World, spread: ParallelModel, state: CheckpointState, folder: str, source: str) -> list[str]:
    """What of a layout's state is not what the checkpoint in a folder holds."""
    for tensor in state.values():
        local_shard(tensor).local.fill_(-1)
    quiet = {"fallback": False, "on_damaged": lambda *_: None}
    assert restore(PosixStore(folder), world, LINEAGE, state, lambda _: None, **quiet) is not None
    spread.after_update()
    spread.reshard()
    off = [
        f"{source}: {key}"
        for key, tensor in state.items()
        if not torch.equal(local_shard(tensor).local, numbers(key, local_shard(tensor)))
    ]
    for copy in spread.tied_copies:
        weight = dict(spread.module.named_parameters())[copy]
        if not torch.equal(local_tensor(weight), numbers("model/decoder.embedding.weight", local_shard(weight))):
            off.append(f"{source}: {copy}")
    return off


def carried(tmp_path, layouts, model: tuple[str, ...], hubs: list[str] | None = None) -> None:
    """From each layout into each; or with `hubs`, of four ranks, from each of those into all and from all into them.
    Layouts of as many ranks share a launch.
    """
    configs = {name: config_of(layout, model) for name, layout in layouts.items()}
    for name in layouts:
        (tmp_path / name).mkdir()
    of = {ranks: {name: config for name, config in configs.items() if layouts[name][0] == ranks} for ranks in (4, 2, 1)}
    for ranks, mine in of.items():
        check(tmp_path, ranks, mine, hubs or [name for name in layouts if layouts[name][0] >= ranks])
    again = {4: {hub: configs[hub] for hub in hubs}} if hubs else {ranks: of[ranks] for ranks in (4, 2)}
    for ranks, mine in again.items():
        check(
            tmp_path, ranks, mine, [name for name in layouts if layouts[name][0] < ranks or (hubs and name not in hubs)]
        )
    digests = {name: state_digest(list_published(PosixStore(tmp_path / name))[0]) for name in layouts}
    assert len(set(digests.values())) == 1, digests


def check(tmp_path, ranks: int, configs: dict[str, RunConfig], sources: list[str]) -> None:
    for off in run_ranks(carry, ranks, configs, str(tmp_path), sources):
        assert off == {name: [] for name in configs}


@pytest.mark.long
def test_experts_on_every_layout_by_way_of_one(tmp_path):
    carried(tmp_path, DENSE | EXPERT, (EXPERTS[0], "--model.tie=true"), ["expert x shard"])


def test_a_dense_model_in_every_kind_of_pipeline_by_way_of_one(tmp_path):
    names = ("one", "1f1b", "interleaved", "zbv", "zbv x shard", "interleaved x tensor", "context x shard")
    carried(tmp_path, {name: DENSE[name] for name in names}, (), ["zbv x shard"])


@pytest.mark.long
@pytest.mark.parametrize("tie", ["true", "false"])
def test_experts_from_each_layout_into_each(tmp_path, tie):
    carried(tmp_path, DENSE | EXPERT, (*EXPERTS, f"--model.tie={tie}"))


@pytest.mark.long
@pytest.mark.parametrize("tie", ["true", "false"])
def test_a_dense_model_from_each_layout_into_each(tmp_path, tie):
    carried(tmp_path, DENSE, (f"--model.tie={tie}",))
