"""The DeviceMeshes and process groups of a layout.

Parameters live on the dense mesh. For them, a rank with other sequence chunks is like a rank with other samples: both
contribute to the gradients of the same weights. So the context axis has no dimension of its own there; it joins the
shard dimension, or the replicate dimension if nothing is sharded. Expert weights live on another mesh of the same
ranks, in which that dimension is divided into the expert dimension and the ranks that have the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import dense_shard_group, expert_shard_group, uses_ddp

MODEL_DIMS = ("pipeline", "expert", "tensor")
"""Mesh dimensions over which FSDP2 does not shard."""


@dataclass(frozen=True)
class Meshes:
    """The meshes and groups of one rank. `dense_mesh` is None if the default group suffices: DDP, or one rank."""

    dense_mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None = None
    context_group: dist.ProcessGroup | None = None
    sequence_group: dist.ProcessGroup | None = None
    """all ranks with chunks of the same sequences: context and tensor together"""
    expert_group: dist.ProcessGroup | None = None
    """a group separate from the mesh: if the mesh dimension covers all ranks, its group is the default group, and its
    collectives would be counted for another axis
    """

    @property
    def data_mesh(self) -> DeviceMesh:
        """The dimensions over which FSDP2 shards and replicates parameters."""
        assert self.dense_mesh is not None
        return data_submesh(self.dense_mesh)

    @property
    def expert_data_mesh(self) -> DeviceMesh:
        """The dimensions over which FSDP2 shards and replicates expert weights."""
        assert self.expert_mesh is not None
        return data_submesh(self.expert_mesh)

    def submesh(self, name: str) -> DeviceMesh | None:
        """One dimension of the dense mesh, or None if its degree is 1."""
        mesh = self.dense_mesh
        return mesh[name] if mesh is not None and name in (mesh.mesh_dim_names or ()) else None

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
    return mesh[tuple(axis for axis in mesh.mesh_dim_names or () if axis not in MODEL_DIMS)]


def build_meshes(layout: Layout, device: str, experts: bool = False) -> Meshes:
    """Creates all meshes and groups, in the same order on every rank; `experts` if the model has any."""
    context_group = new_group(layout, "context")
    sequence_group = new_group(layout, "context", "tensor") if experts else None
    if uses_ddp(layout) or layout.ranks == 1:
        return Meshes(None, None, context_group, sequence_group)
    dense_mesh = init_mesh(dense_mesh_dims(layout), device)
    expert_mesh = init_mesh(expert_mesh_dims(layout), device) if layout.expert > 1 else None
    expert_group = new_group(layout, "expert") if layout.expert > 1 else None
    return Meshes(dense_mesh, expert_mesh, context_group, sequence_group, expert_group)


def dense_mesh_dims(layout: Layout) -> dict[str, int]:
    """Dimension name -> degree, outermost first."""
    group = dense_shard_group(layout, 0)
    data = drop_trivial({group.replicate_axis: group.replicas}) | {group.shard_axis: group.shards}
    # FSDP2 needs a shard dimension beside the replicate dimension, even of degree 1.
    data = data if group.replicas * group.shards > 1 else {}
    return drop_trivial({"pipeline": layout.pipeline}) | data | drop_trivial({"tensor": layout.tensor})


def expert_mesh_dims(layout: Layout) -> dict[str, int]:
    group = expert_shard_group(layout, 0)
    return (
        drop_trivial({"pipeline": layout.pipeline, group.replicate_axis: group.replicas})
        | {group.shard_axis: group.shards, "expert": layout.expert}
        | drop_trivial({"tensor": layout.tensor})
    )


def drop_trivial(dims: dict[str, int]) -> dict[str, int]:
    """Without dimensions of degree 1."""
    return {name: degree for name, degree in dims.items() if degree > 1}


def init_mesh(dims: dict[str, int], device: str) -> DeviceMesh:
    return init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))


def new_group(layout: Layout, *axes: str) -> dist.ProcessGroup | None:
    """This rank's process group of an axis, or of several axes together; None if it would have one rank."""
    groups = [ranks for ranks in layout.groups(*axes) if len(ranks) > 1]
    if not groups:
        return None
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group  # type: ignore[no-any-return]
