"""The planner's page lists what was fitted, as it is in the code."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.hardware.cluster import DEVICES, GB, NODES, TERA
from meshwright.planner.workload import trainer_profiles
from meshwright.planner.workload.trainer_profiles import FITTED_FIELDS

KNOWN = (
    trainer_profiles.MESHWRIGHT,
    trainer_profiles.MESHWRIGHT_COMPILED,
    trainer_profiles.COMPOSER,
    trainer_profiles.TORCHTITAN,
    trainer_profiles.MEGATRON_2021,
    trainer_profiles.DEEPSPEED,
    trainer_profiles.BRIDGE_2025,
    trainer_profiles.BRIDGE,
)
"""Those whose seconds were fitted; others have the same constants as one of them."""
PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


def device_rows() -> list[str]:
    rows = []
    for name, device in DEVICES.items():
        per_node, inside, between = NODES[name]
        rates = "/".join(f"{device.peak_flops[kind] / TERA:g}" for kind in ("bf16", "fp8", "fp4"))
        reached = "/".join(
            f"{device.sustained_fraction.get(kind, device.sustained_fraction['bf16']):g}"
            for kind in ("bf16", "fp8", "fp4")
        )
        links = f"{per_node} x {inside.bandwidth / GB:g} | {between.bandwidth / GB:g}"
        memory = f"{device.memory_bandwidth / TERA:g} | {device.memory / 2**30:.1f}"
        rows.append(f"| {name} | {rates} | {reached} | {memory} | {links} |")
    return rows


def software_rows() -> list[str]:
    rows = []
    for stack in KNOWN:
        values = [getattr(stack, name) for name in FITTED_FIELDS]
        rows.append(f"| {stack.name} | " + " | ".join(f"{value:g}" for value in values) + " |")
    return rows


def test_devices_and_what_of_them_is_fitted_are_listed() -> None:
    assert [row for row in device_rows() if row not in PAGE] == []


def test_what_is_fitted_of_every_software_is_listed() -> None:
    assert "| software | " + " | ".join(FITTED_FIELDS) + " |" in PAGE
    assert [row for row in software_rows() if row not in PAGE] == []
