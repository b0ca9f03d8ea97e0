"""What a preflight expects of the hosts: the settings of the run and the planner's figures. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.hardware.cluster import Cluster
from meshwright.base.hardware.links import cluster_links, collective_seconds, group_placement
from meshwright.ops.preflight.measurements import DeviceMeasurement, GroupMeasurement


@dataclass(frozen=True)
class Expectations:
    """Each value is None where it is not known."""

    hosts: int | None = None
    """number of hosts of the job"""
    checkpoint_bytes: int | None = None
    """parameters and optimizer state of one checkpoint"""
    kept_checkpoints: int = 0
    """checkpoints on disk at once: `checkpoint.keep`, and one that is being written"""
    rank_bytes: int | None = None
    """parameters and optimizer state of the rank that has most of them"""
    cluster: Cluster | None = None
    """the cluster that the planner assumes"""
    inferred: bool = False
    """whether the cluster follows from the name of the device alone: its network is then not known"""
    remarks: tuple[str, ...] = ()

    @property
    def disk_bytes(self) -> int | None:
        """Bytes that the run folder needs."""
        return None if self.checkpoint_bytes is None else self.checkpoint_bytes * self.kept_checkpoints

    def matmul_rate(self, device: DeviceMeasurement) -> float | None:
        """FLOP/s that the planner assumes for large matmuls of a device."""
        if self.cluster is None or self.cluster.device.is_cpu != (device.type == "cpu"):
            return None
        planned = self.cluster.device
        if planned.measured_matmuls:
            rates = [row.flops_per_second for row in planned.measured_matmuls if row.precision == device.precision]
            return max(rates, default=None)
        peak, fraction = planned.peak_flops.get(device.precision), planned.sustained_fraction.get(device.precision)
        return peak * fraction if peak and fraction else None

    def memory_bandwidth(self, device: DeviceMeasurement) -> float | None:
        """Bytes/s that the planner assumes for memory-bound kernels of a device."""
        if self.cluster is None or self.cluster.device.is_cpu != (device.type == "cpu"):
            return None
        planned = self.cluster.device
        return planned.memory_bandwidth * (1.0 if planned.measured_matmuls else planned.memory_efficiency)

    def pair_bandwidth(self, message_bytes: int) -> float | None:
        """Bytes/s that the planner assumes between two ranks of different hosts."""
        if self.cluster is None or self.inferred:
            return None
        return cluster_links(self.cluster).device_rate(message_bytes)

    def group_seconds(self, group: GroupMeasurement) -> float | None:
        """Seconds that the planner assumes for a collective."""
        if self.cluster is None or self.inferred:
            return None
        stride = group.ranks[1] - group.ranks[0]
        placement = group_placement(self.cluster.devices_per_node, len(group.ranks), stride)
        return collective_seconds(self.cluster, group.collective, group.message_bytes, placement)
