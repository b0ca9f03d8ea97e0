"""Converts the figures that a published run reports to seconds per step and bytes.

| reported | seconds per step |
|---|---|
| step time | itself |
| samples or tokens per second | the global batch divided by it |
| TFLOP/s per device | the FLOPs of a step, as the source counts them, divided by it and by the devices |
| MFU, HFU | the same, with the fraction of the device's peak in bf16 |

| FLOPs of a source | per token, for P parameters in matrices that a token uses, with the head |
|---|---|
| model, full attention | 6 P + 12 L a d s |
| model, causal half | 6 P + 6 L a d s |
| model, without attention | 6 P |
| hardware | 8 P - 2 V h + 16 L a d s with full checkpointing (Narayanan et al. 2021), else as full attention |
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.models.architecture import Architecture
from meshwright.planner.calibration.published.published_fields import parse_measurement
from meshwright.planner.workload.planned_job import PlannedJob

CONVENTIONS: tuple[tuple[str, str], ...] = (
    (r"hardware|8 ?n\b", "hardware"),
    (r"causal", "causal half"),
    (r"full|6n_plus|12 ?\*? ?l", "full attention"),
    (r"6 ?n\b|without attention|no attention", "without attention"),
)
"""A pattern in a run's name of its FLOP convention -> the convention; the first match counts."""
SOURCE_CONVENTIONS: tuple[tuple[str, str], ...] = (
    (r"bigscience|narayanan|sc21", "hardware"),
    (r"megatron-bridge|automodel|maxtext", "causal half"),
)
"""A pattern in the source of a run that states no convention -> the one that its tokens per second agree with."""


def flop_convention(row: dict[str, Any]) -> tuple[str, bool]:
    """Returns how the source of a run counts FLOPs, and whether that is assumed."""
    stated = next((str(row[key]) for key in ("flops_convention", "flop_convention") if row.get(key)), "")
    for pattern, convention in CONVENTIONS:
        if re.search(pattern, stated, re.IGNORECASE):
            return convention, False
    for pattern, convention in SOURCE_CONVENTIONS:
        if re.search(pattern, str(row["source"]), re.IGNORECASE):
            return convention, False
    return "full attention", True


def reported_flops(job: PlannedJob, convention: str) -> float:
    """FLOPs of a step over all devices, as a source with this convention counts them."""
    model = job.model
    if not isinstance(model, Architecture):
        raise TypeError("FLOPs of a published run need the sizes of its model")
    layers = ((0, model.layers - model.moe_layers), (model.layers - 1, model.moe_layers))  # a dense and a MoE layer
    blocks = sum(model.active_matrix_parameters(layer) * count for layer, count in layers)
    head = model.vocab * model.width
    full_attention = 6.0 * job.sequence * model.attention_width * model.layers
    recomputes = convention == "hardware" and job.activation_checkpoint == "full"
    attention = {"causal half": 0.5, "without attention": 0.0}.get(convention, 1.0) * full_attention
    per_token = 6.0 * (blocks + head) + attention + ((2.0 * blocks + full_attention / 3) if recomputes else 0.0)
    return job.tokens_per_step * per_token


def parse_seconds(row: dict[str, Any], job: PlannedJob) -> tuple[float | None, tuple[str, ...]]:
    """Returns the step time that a run reports or that follows from what it reports, and how it follows."""
    reported, derived = row.get("reported", {}), row.get("derived") or {}
    if reported.get("step_time_s") is not None:
        return parse_measurement(reported["step_time_s"]), ()
    if derived.get("step_time_s") is not None:
        return parse_measurement(derived["step_time_s"]), ("step time that the collector derived from other figures",)
    if reported.get("samples_per_s") is not None:
        return job.batch.global_ / parse_measurement(reported["samples_per_s"]), ()
    for key, devices in (("tokens_per_s", 1), ("tokens_per_s_per_gpu", job.layout.ranks)):
        if reported.get(key) is not None:
            return job.tokens_per_step / parse_measurement(reported[key]) / devices, ()
    convention, is_assumed = flop_convention(row)
    for key in ("tflops_per_gpu", "mfu", "hfu"):
        if reported.get(key) is None:
            continue
        counted = "hardware" if key == "hfu" else convention
        rate = parse_measurement(reported[key])
        if key == "tflops_per_gpu":
            rate *= 1e12
        else:
            peaks = job.cluster.device.peak_flops
            peak = peaks.get("fp16", peaks["bf16"]) if job.precision == "fp16" else peaks["bf16"]
            rate *= (0.01 if rate > 1 else 1.0) * peak
        seconds = reported_flops(job, counted) / rate / job.layout.ranks
        assumed = ", which is assumed" if is_assumed and key != "hfu" else ""
        return seconds, (f"step time from {key} with FLOPs of the convention {counted!r}{assumed}",)
    return None, ()


def parse_memory(reported: dict[str, Any], notes: str) -> tuple[float | None, str]:
    """Returns memory in bytes and its kind: nvidia-smi's figures are in GB, torch's are in GiB.

    A source that reports memory by class, such as Korthikanti et al., counts tensors.
    """
    stated = [reported.get(key) for key in ("memory_gb_params_opt", "memory_gb_activations")]
    classes = [value for value in stated if value is not None]
    if reported.get("memory_gb") is None:
        return (sum(map(parse_measurement, classes)) * (1 << 30), "tensors") if len(classes) == 2 else (None, "total")
    nvidia_smi = "nvidia-smi" in notes
    bytes_per_unit = 1e9 if nvidia_smi else 1 << 30
    return parse_measurement(reported["memory_gb"]) * bytes_per_unit, "total" if nvidia_smi else "reserved"
