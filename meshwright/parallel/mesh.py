"""The layout as torch's DeviceMesh: one group of ranks for every axis in use."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.layout import AXES, Layout


def mesh_of(layout: Layout, device: str) -> DeviceMesh | None:
    """None where the one group of all ranks is enough: whole copies, or one rank alone."""
    used = set(layout.used)
    if used <= {"replicate"}:
        return None
    if "replicate" in used:
        used.add("shard")  # FSDP2 speaks of copies only as copies of shards, be it one shard
    axes = [axis for axis in AXES if axis in used]
    return init_device_mesh(device, tuple(getattr(layout, axis) for axis in axes), mesh_dim_names=tuple(axes))


def group_names(mesh: DeviceMesh | None) -> dict[str, str]:
    """Process group name -> axis."""
    if mesh is None:
        return {}
    return {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}
