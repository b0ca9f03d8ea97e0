"""The layout as torch's DeviceMeshes, and as the groups of ranks that nothing but a message needs.

Parameters live on one mesh. To them a rank with another piece of a sequence is as good as one with other samples: both
bring gradients of the same weights. So context has no dimension of its own there, and is folded into the shards, or
into the copies where nothing is sharded. Experts live on a mesh of the same ranks, in which the same dimension is
divided again: into groups that share the experts, and ranks that hold the same of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import dense_shard_group, expert_shard_group, uses_ddp

NOT_DATA = ("pipeline", "expert", "tensor")
"""Dimensions over which FSDP2 spreads nothing."""


@dataclass(frozen=True)
class Meshes:
    """`dense` is None where the one group of all ranks is enough: whole copies, or one rank alone."""

    dense_mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None = None
    context_group: dist.ProcessGroup | None = None
    sequence_group: dist.ProcessGroup | None = None
    """all ranks with pieces of the same sequences: context and tensor together"""
    expert_group: dist.ProcessGroup | None = None
    """a group of its own: that of a mesh's dimension is the world's where it covers all ranks, and counts as another
    axis's
    """

    @property
    def data_mesh(self) -> DeviceMesh:
        """Over which FSDP2 spreads parameters: copies beside shards, or shards alone."""
        assert self.dense_mesh is not None
        return data_submesh(self.dense_mesh)

    @property
    def expert_data_mesh(self) -> DeviceMesh:
        assert self.expert_mesh is not None
        return data_submesh(self.expert_mesh)

    def submesh(self, name: str) -> DeviceMesh | None:
        """One dimension of the dense mesh, where it is in use."""
        return (
            self.dense_mesh[name]
            if self.dense_mesh is not None and name in (self.dense_mesh.mesh_dim_names or ())
            else None
        )

    def group_names(self) -> dict[str, str]:
        """Process group name -> axis."""
        names: dict[str, str] = {}
        if self.context_group is not None:
            names[self.context_group.group_name] = "context"
        if self.sequence_group is not None:
            names.setdefault(self.sequence_group.group_name, "context+tensor")
        if self.expert_group is not None:
            names[self.expert_group.group_name] = "expert"
        for mesh in (self.expert_mesh, self.dense_mesh):
            for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
                names[mesh.get_group(axis).group_name] = axis  # type: ignore[union-attr]
        if self.dense_mesh is None and dist.is_initialized() and dist.group.WORLD is not None:
            names[dist.group.WORLD.group_name] = "replicate" if self.context_group is None else "replicate+context"
        return names


def data_submesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh[tuple(axis for axis in mesh.mesh_dim_names or () if axis not in NOT_DATA)]


def build_meshes(layout: Layout, device: str, experts: bool = False) -> Meshes:
    """`experts`: whether the model has any. Every rank makes all of them, in one order."""
    context = new_group(layout, "context")
    pieces = new_group(layout, "context", "tensor") if experts else None
    if uses_ddp(layout) or layout.ranks == 1:
        return Meshes(None, None, context, pieces)
    dense = init_mesh(dense_mesh_dims(layout), device)
    spread = init_mesh(expert_mesh_dims(layout), device) if layout.expert > 1 else None
    expert = new_group(layout, "expert") if layout.expert > 1 else None
    return Meshes(dense, spread, context, pieces, expert)


def dense_mesh_dims(layout: Layout) -> dict[str, int]:
    over = dense_shard_group(layout, 0)
    data = used({over.replicate_axis: over.replicas}) | {over.shard_axis: over.shards}
    # FSDP2 speaks of copies only as copies of shards, be it one shard.
    data = data if over.replicas * over.shards > 1 else {}
    return used({"pipeline": layout.pipeline}) | data | used({"tensor": layout.tensor})


def expert_mesh_dims(layout: Layout) -> dict[str, int]:
    over = expert_shard_group(layout, 0)
    return (
        used({"pipeline": layout.pipeline, over.replicate_axis: over.replicas})
        | {over.shard_axis: over.shards, "expert": layout.expert}
        | used({"tensor": layout.tensor})
    )


def used(dimensions: dict[str, int]) -> dict[str, int]:
    return {name: degree for name, degree in dimensions.items() if degree > 1}


def init_mesh(dimensions: dict[str, int], device: str) -> DeviceMesh:
    return init_device_mesh(device, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def new_group(layout: Layout, *axes: str) -> dist.ProcessGroup | None:
    """This rank's group of an axis, or of several together; None where it would be alone."""
    groups = [ranks for ranks in layout.groups(*axes) if len(ranks) > 1]
    if not groups:
        return None
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own  # type: ignore[no-any-return]
