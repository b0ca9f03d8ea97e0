"""Predicts a run before its first step, for plan.json, and saves what it measured for later plans; torch-free.

Times need a known machine: this one as measured, or one that the user names. Memory and communication volume are
predicted for every run of Meshwright's decoder, communication volume exactly.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.base.hardware.cluster import NODE_TYPES, UNKNOWN_HOST, Cluster, preset_cluster
from meshwright.base.hardware.cluster_file import cluster_table
from meshwright.base.hardware.resolve_cluster import machine_file, measured_machine, resolve_cluster
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.parameter_shards import uses_ddp
from meshwright.errors import ConfigError
from meshwright.planner.calibration.calibration_log import CalibrationRecord, append_record
from meshwright.planner.calibration.corrections import UNCORRECTED, is_this_machine
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.prediction import VERSION, prediction_record
from meshwright.planner.cost.comm_volume import comm_volume, has_exact_volume
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import state_memory
from meshwright.planner.cost.trace.activation_messages import data_dependent_axes
from meshwright.planner.generation import plan_generators
from meshwright.planner.workload.planned_job import PlannedJob

MAX_EXACT_SECONDS = 0.04
"""Time at the start of a run for exact formulas; pipeline ranks that are left then are omitted."""
TIME_KEYS = (
    "seconds",
    "low",
    "high",
    "main_uncertainty",
    "phases",
    "exposed_seconds",
    "tokens_per_second",
    "mfu",
    "hfu",
)
"""Keys of a prediction that are null if the machine is unknown."""


@dataclass(frozen=True)
class RunPrediction:
    """The prediction of a run."""

    record: dict[str, Any]
    """the content of plan.json"""
    uncorrected: Estimate | None = None
    """the estimate before correction, if the run is on this machine and the machine was measured"""

    def save_measurement(self, seconds: float, tensors: float | None) -> dict[str, Any] | None:
        """Appends the median step time and the peak tensor bytes of rank 0 to the calibration log."""
        if self.uncorrected is None:
            return None
        memory = (self.uncorrected.memory_by_rank[0].tensors, tensors) if tensors else None
        record = CalibrationRecord.from_job(self.uncorrected.job, (self.uncorrected.seconds, seconds), memory)
        append_record(record)
        return asdict(record)


def predict_run(
    config: RunConfig,
    attempt: int,
    device: str,
    cluster: str | None = None,
    trace: Callable[[], TracedModel] | None = None,
) -> RunPrediction:
    """Predicts a run; an error in the prediction is noted and does not stop the run.

    Args:
        config: the run.
        attempt: number of the attempt.
        device: torch's name of the device, or `cpu`.
        cluster: the name of a cluster; default: this machine as measured.
        trace: traces the user's model that the run trains; None if the run trains the model of its config.
    """
    header = {"version": VERSION, "attempt": attempt}
    try:
        return predict_job(header, config, device, cluster, trace() if trace is not None else None)
    except Exception as error:  # noqa: BLE001  a prediction must not stop a run
        return RunPrediction(header | {"notes": [f"no prediction: {type(error).__name__}: {error}"]})


def predict_job(
    header: dict[str, Any], config: RunConfig, device: str, name: str | None, traced: TracedModel | None
) -> RunPrediction:
    """Predicts a run of the model of its config, or of a user's model."""
    cluster, note = find_cluster(config, device, name)
    known = cluster is not None
    job = PlannedJob.from_config(config, cluster or stand_in_cluster(device), traced=traced)
    assert job.run_config is not None
    config = job.run_config  # with the values of the device
    corrected = estimate(job)
    uncorrected = estimate(job, corrections=UNCORRECTED) if known and is_this_machine(job.cluster) else None
    exact = exact_record(job, config, device == "cpu") if traced is None else custom_record(job, config, traced, device)
    record = header | prediction_record(corrected) | exact
    record["notes"] = [*record["notes"], *([note] if note else [])]
    record["host"] = socket.gethostname()
    record["cluster_file"] = cluster_table(job.cluster) if known else None
    record["peak_flops"] = corrected.peak_flops if known or device_preset(device) else None
    record["uncorrected"] = (
        {"seconds": uncorrected.seconds, "tensors": uncorrected.memory_by_rank[0].tensors} if uncorrected else None
    )
    if config.rl.enabled and known:
        record["generators"] = plan_generators(job, config.rl, corrected.seconds).to_json()
    if not known:
        record |= dict.fromkeys((*TIME_KEYS, "cluster", "fits"))
        record["memory"]["capacity"] = None
        record["device"] = device
        untimed = {"link": None, "seconds": None, "exposed_seconds": None}
        record["communication"] = [row | untimed for row in record["communication"]]
    return RunPrediction(record, uncorrected)


def exact_record(job: PlannedJob, config: RunConfig, on_cpu: bool) -> dict[str, Any]:
    """Returns what the counters of every rank must measure, by the first rank of each pipeline rank.

    All ranks with the same pipeline stages communicate the same amount. State memory is exact on CPU only.
    """
    layout, batch, deadline = job.layout, job.batch, monotonic() + MAX_EXACT_SECONDS
    communication: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    for rank in range(0, layout.ranks, layout.stride("pipeline")):
        if monotonic() > deadline:
            break
        communication[str(rank)] = [asdict(row) for row in comm_volume(config, layout, batch, rank)]
        if on_cpu:
            memory[str(rank)] = asdict(state_memory(config, layout, batch, rank))
    return {
        "communication_exact": communication,
        "communication_data_dependent": data_dependent_axes(config, layout),
        "state_memory_exact": memory,
    }


def custom_record(job: PlannedJob, config: RunConfig, traced: TracedModel, device: str) -> dict[str, Any]:
    """The same for a user's model: exact under data parallelism."""
    layout, batch = job.layout, job.batch
    if not has_exact_volume(layout):
        return {"communication_exact": {}, "communication_data_dependent": {}, "state_memory_exact": {}}
    # With FSDP2, memory depends on the order in which backward computes gradients.
    exact_memory = device == "cpu" and (uses_ddp(layout) or layout.ranks == 1)
    memory = {"0": asdict(state_memory(config, layout, batch, traced=traced))} if exact_memory else {}
    return {
        "communication_exact": {"0": [asdict(row) for row in comm_volume(config, layout, batch, traced=traced)]},
        "communication_data_dependent": {},
        "state_memory_exact": memory,
    }


def find_cluster(config: RunConfig, device: str, name: str | None) -> tuple[Cluster | None, str]:
    """Returns the cluster of a run, or None and the reason why step time cannot be predicted."""
    ranks = PlannedJob.from_config(config, UNKNOWN_HOST).layout.ranks
    if name is None and not machine_file().exists():
        return None, "step time is not predicted: this machine was never measured (meshwright plan measure)"
    try:
        cluster = measured_machine() if name is None else resolve_cluster(name)
    except ConfigError as error:
        return None, f"step time is not predicted: {error.message}"
    if name is None and not (cluster.device.is_cpu if device == "cpu" else cluster.device.name == device):
        return None, f"step time is not predicted: the measured device of this machine is {cluster.device.name}"
    if ranks > cluster.device_count or (ranks > cluster.devices_per_node and ranks % cluster.devices_per_node):
        return None, f"step time is not predicted: {ranks} ranks on {cluster.device_count} devices of {cluster.name}"
    return cluster.with_devices(ranks), ""


def stand_in_cluster(device: str) -> Cluster:
    """Returns a cluster of such devices, from which only bytes are used."""
    if device == "cpu":
        return UNKNOWN_HOST
    return preset_cluster(device_preset(device) or "h100")


def device_preset(name: str) -> str | None:
    """Returns the planner's name of a device from torch's: `NVIDIA H100 80GB HBM3` is h100."""
    words = re.findall(r"[a-z]+[0-9]+x?", name.lower())
    memory = re.search(r"([0-9]+) ?gb", name.lower())
    for word in words:
        for known in (word, f"{word}-{memory[1]}" if memory else word):
            if known in NODE_TYPES:
                return known
    return None
