"""docs/planner.md lists the fitted values of devices and trainers as they are in the code."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.calibration.profile_fit import FITTED_FIELDS
from meshwright.planner.hardware.cluster import GB, NODE_TYPES, TERA
from meshwright.planner.workload import trainer_profiles

FITTED_PROFILES = (
    trainer_profiles.MESHWRIGHT,
    trainer_profiles.MESHWRIGHT_COMPILED,
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


def test_planner_page_names_modules_that_exist() -> None:
    package = Path(trainer_profiles.__file__).parents[2]
    named = [word for word in PAGE.replace("`", " ").split() if word.startswith("planner/") and word.endswith(".py")]
    assert named
    assert [module for module in named if not (package / module).is_file()] == []
