"""What a run is to take, said before it begins: the record that its report lays beside what was measured; torch-free.

Seconds are those of a machine that is known: this one as measured, or one that was named. Bytes held and sent are known
of every run of our own decoder, those sent exactly.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.planner.calibration.calibration_log import CalibrationRecord, append_record
from meshwright.planner.calibration.corrections import UNCORRECTED, is_this_machine
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.prediction import VERSION, prediction_record
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.exact.activation_messages import data_dependent_axes
from meshwright.planner.exact.comm_volume import comm_volume
from meshwright.planner.exact.state_memory import state_memory
from meshwright.planner.hardware.cluster import NODE_TYPES, Cluster, Device, Link, preset_cluster
from meshwright.planner.hardware.resolve_cluster import machine_file, measured_machine, resolve_cluster
from meshwright.planner.workload.planned_job import PlannedJob

LONGEST = 0.04
"""Seconds that a start may spend on exact bytes; ranks of a pipeline that are left then are not told."""
UNTIMED = ("seconds", "low", "high", "main_uncertainty", "phases", "exposed_seconds", "tokens_per_second", "mfu", "hfu")
"""What nobody can say of a machine that nobody knows."""
ANY = Cluster("unknown", Device("cpu", 1e18, 1e9, {"bf16": 1e9}, is_cpu=True), 1, 1, Link(1e9, 1e-6), Link(1e9, 1e-6))
"""The host of a run, where it was never measured: formulas of memory ask what kind of device it is."""


@dataclass(frozen=True)
class RunPrediction:
    """A prediction, and what is kept of it to learn from."""

    record: dict[str, Any]
    uncorrected: Estimate | None = None
    """uncorrected, where the machine is this one and was measured"""

    def save_measurement(self, seconds: float, tensors: float | None) -> CalibrationRecord | None:
        """Remembers what the first rank measured, for later plans on this machine."""
        if self.uncorrected is None:
            return None
        weighed = (self.uncorrected.memory_by_rank[0].tensors, tensors) if tensors else None
        record = CalibrationRecord.from_job(self.uncorrected.job, (self.uncorrected.seconds, seconds), weighed)
        append_record(record)
        return record


def predict_run(
    config: RunConfig, attempt: int, device: str, word: str | None = None, own_model: bool = False
) -> RunPrediction:
    """Of a run on a device by torch's name for it, or `cpu`; `word` names the cluster. Whatever goes wrong here must
    not keep the run from beginning: it is noted.
    """
    head = {"version": VERSION, "attempt": attempt}
    if own_model:
        return RunPrediction(head | {"notes": ["a model of your own: nothing is predicted of it"]})
    try:
        return of_decoder(head, config, device, word)
    except Exception as error:  # noqa: BLE001  see above
        return RunPrediction(head | {"notes": [f"nothing is predicted: {type(error).__name__}: {error}"]})


def of_decoder(head: dict[str, Any], config: RunConfig, device: str, word: str | None) -> RunPrediction:
    cluster, note = cluster_for(config, device, word)
    known = cluster is not None
    job = PlannedJob.from_config(config, cluster or likely(device))
    found = estimate(job)
    here = known and is_this_machine(job.cluster)
    plain = estimate(job, lessons=UNCORRECTED) if here else None
    tree = head | prediction_record(found) | exactly(job, config, host=device == "cpu")
    tree["notes"] = [*tree["notes"], *([note] if note else [])]
    tree["peak_flops"] = found.peak_flops if known or device_preset(device) else None
    tree["uncorrected"] = {"seconds": plain.seconds, "tensors": plain.memory_by_rank[0].tensors} if plain else None
    if not known:
        tree |= dict.fromkeys((*UNTIMED, "cluster", "fits"))
        tree["memory"]["capacity"] = None
        tree["device"] = device
        tree["traffic"] = [row | {"link": None, "seconds": None, "exposed_seconds": None} for row in tree["traffic"]]
    return RunPrediction(tree, plain)


def exactly(job: PlannedJob, config: RunConfig, host: bool) -> dict[str, Any]:
    """What the ledger of every rank must count: ranks with the same stages of a pipeline send the same. Peaks of state
    are exact on the host alone.
    """
    layout, batch, until = job.layout, job.batch, monotonic() + LONGEST
    sent: dict[str, Any] = {}
    holds: dict[str, Any] = {}
    for rank in range(0, layout.ranks, layout.stride("pipeline")):
        if monotonic() > until:
            break
        sent[str(rank)] = [asdict(row) for row in comm_volume(config, layout, batch, rank)]
        if host:
            holds[str(rank)] = asdict(state_memory(config, layout, batch, rank))
    return {"traffic_exact": sent, "traffic_untold": data_dependent_axes(config, layout), "held_exact": holds}


def cluster_for(config: RunConfig, device: str, word: str | None) -> tuple[Cluster | None, str]:
    """The machine of a run, or none and why."""
    ranks = PlannedJob.from_config(config, ANY).layout.ranks
    if word is None and not machine_file().exists():
        return None, "this machine was never measured (meshwright plan measure): no seconds are predicted"
    try:
        whole = measured_machine() if word is None else resolve_cluster(word)
    except ConfigError as error:
        return None, f"no seconds are predicted: {error.message}"
    if word is None and not (whole.device.is_cpu if device == "cpu" else whole.device.name == device):
        return None, f"what was measured of this machine is its {whole.device.name}: no seconds are predicted"
    if ranks > whole.device_count or (ranks > whole.devices_per_node and ranks % whole.devices_per_node):
        return None, f"{ranks} ranks on {whole.device_count} devices of {whole.name}: no seconds are predicted"
    return whole.with_devices(ranks), ""


def likely(device: str) -> Cluster:
    """A cluster of such devices, to ask for bytes alone."""
    if device == "cpu":
        return ANY
    return preset_cluster(device_preset(device) or "h100")


def device_preset(name: str) -> str | None:
    """Our name of a device by torch's: `NVIDIA H100 80GB HBM3` is h100."""
    words = re.findall(r"[a-z]+[0-9]+x?", name.lower())
    memory = re.search(r"([0-9]+) ?gb", name.lower())
    for word in words:
        for known in (word, f"{word}-{memory[1]}" if memory else word):
            if known in NODE_TYPES:
                return known
    return None
