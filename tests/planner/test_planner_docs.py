"""docs/planner.md lists the fitted values of devices and trainers as they are in the code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.base.config import RunConfig, load_config
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.hardware.cluster import GB, NODE_TYPES, TERA, preset_cluster
from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.profile_fit import FITTED_FIELDS
from meshwright.planner.cost.comm_volume import run_trace
from meshwright.planner.cost.trace.operations import Communicate
from meshwright.planner.workload import trainer_profiles
from meshwright.planner.workload.optimizer_bytes import ALL_TRAINED
from meshwright.planner.workload.own_trainer import own_trainer
from meshwright.planner.workload.planned_job import PlannedJob

CUDA_DEFAULTS = with_device_defaults(RunConfig(), "cuda")
FITTED_PROFILES = (
    trainer_profiles.MESHWRIGHT,
    trainer_profiles.MESHWRIGHT_COMPILED,
    replace(own_trainer(CUDA_DEFAULTS, Layout(), 1, ALL_TRAINED), name="meshwright on CUDA"),
    trainer_profiles.COMPOSER,
    trainer_profiles.TORCHTITAN_2024,
    trainer_profiles.TORCHTITAN_COMPILED,
    trainer_profiles.MEGATRON_2021,
    trainer_profiles.DEEPSPEED,
    trainer_profiles.BRIDGE_2025,
    trainer_profiles.BRIDGE,
)
"""Profiles whose step time was fitted; the others share the fitted fields of one of them."""
PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


def device_rows() -> list[str]:
    rows = []
    for name, node in NODE_TYPES.items():
        device = node.device
        precisions = ("bf16", "fp8", "fp4")
        peaks = "/".join(f"{device.peak_flops[precision] / TERA:g}" for precision in precisions)
        default = device.sustained_fraction["bf16"]
        sustained = "/".join(f"{device.sustained_fraction.get(precision, default):g}" for precision in precisions)
        memory = f"{device.memory_bandwidth / TERA:g} | {device.memory / 2**30:.1f}"
        links = f"{node.devices} x {node.intra_node.bandwidth / GB:g} | {node.inter_node.bandwidth / GB:g}"
        rows.append(f"| {name} | {peaks} | {sustained} | {memory} | {links} |")
    return rows


def trainer_rows() -> list[str]:
    rows = ["| field | " + " | ".join(profile.name for profile in FITTED_PROFILES) + " |"]
    for field in FITTED_FIELDS:
        values = " | ".join(f"{getattr(profile, field):g}" for profile in FITTED_PROFILES)
        rows.append(f"| `{field}` | {values} |")
    return rows


def test_planner_page_lists_every_device() -> None:
    assert [row for row in device_rows() if row not in PAGE] == []


def test_planner_page_lists_every_fitted_field_of_the_trainers() -> None:
    assert [row for row in trainer_rows() if row not in PAGE] == []


TENSOR_TRAINERS = {
    "meshwright": None,
    "torchtitan": trainer_profiles.TORCHTITAN,
    "megatron, meta-2024": trainer_profiles.META_2024,
    "megatron-2021, deepspeed": trainer_profiles.DEEPSPEED,
}
MODES = ("none", "selective", "full")


def block_collectives(trainer: trainer_profiles.TrainerProfile | None, mode: str) -> Counter[str]:
    """The collectives of the tensor axis for one block of Llama 8B and one micro-batch."""
    config = load_config(None, ["--preset=llama-8b", "--layout.tensor=2", f"--activation_checkpoint.mode={mode}"])
    job = PlannedJob.from_config(config, preset_cluster("h100", 2))
    if trainer is not None:
        job = replace(job, trainer=trainer, run_config=None)
    [builder] = run_trace(job, 0).builders
    [block] = [part for part in builder.parts if part.block is not None and part.repeats > 1][:1]
    messages: Counter[str] = Counter()
    for collective in (*block.messages.forward, *block.messages.backward, *block.messages.recomputed):
        assert isinstance(collective, Communicate)
        assert collective.message_bytes == 2 * job.tokens_per_micro_batch * job.model.width
        messages[collective.collective] += int(collective.calls)
    return messages


def tensor_rows() -> list[str]:
    rows = []
    for name, trainer in TENSOR_TRAINERS.items():
        cells = []
        for mode in MODES:
            counts = block_collectives(trainer, mode)
            if counts["all_reduce"]:
                cells.append(f"{counts['all_reduce']} all-reduces")
            else:
                cells.append(f"{counts['all_gather']} all-gathers, {counts['reduce_scatter']} reduce-scatters")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def test_planner_page_lists_the_collectives_of_tensor_parallelism() -> None:
    assert [row for row in tensor_rows() if row not in PAGE] == []


@pytest.mark.parametrize("name", trainer_profiles.TRAINERS)
def test_planner_page_lists_every_trainer(name: str) -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| `")]
    assert any(f"`{name}`" in row.split(" | ")[0] for row in rows) or name == "meshwright-eager"


def test_planner_page_names_modules_that_exist() -> None:
    package = Path(trainer_profiles.__file__).parents[2]
    named = [word for word in PAGE.replace("`", " ").split() if word.startswith("planner/") and word.endswith(".py")]
    assert named
    assert [module for module in named if not (package / module).is_file()] == []
