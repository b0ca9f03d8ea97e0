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
from dataclasses import dataclass
from typing import Any

from meshwright.base.models.architecture import Architecture
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_records import parse_measurement
from meshwright.planner.workload.planned_job import PlannedJob

CONVENTIONS: tuple[tuple[str, str], ...] = (
    (r"hardware|\bhfu\b|\b8 ?n ?d?\b|\b96 ?b", "hardware"),
    (r"(?:without|no|excluding|exclude|ignoring) (?:the )?attention", "without attention"),
    (r"(?<!non )(?<!not )(?<!no )causal", "causal half"),
    (r"full|causal|\b6 ?n plus|\b12 ?l|\bpalm\b|chowdhery|\b72 ?b", "full attention"),
    (r"\b6 ?n ?(?:d|t)?\b|\b6 ?p\b|kaplan", "without attention"),
)
"""A pattern in the letters and digits of a run's name of its FLOP convention -> the convention; the first match counts.
6 N d is that of Kaplan et al. 2020, 6 N + 12 L h Q T that of PaLM (Chowdhery et al. 2022), and 72 B s l h^2 and
96 B s l h^2 those of Narayanan et al. 2021 without and with recomputation."""
NEGATED_HARDWARE = re.compile(r"\b(?:no|not|non|without|excluding)(?: \w+)? (?:hardware|recompute|recomputation)\b")
SOURCE_CONVENTIONS: tuple[tuple[str, str], ...] = (
    (r"bigscience|\bbloom\b|2211\.05100|narayanan|sc21", "hardware"),
    (r"megatron-bridge|automodel|maxtext", "causal half"),
)
"""A pattern in the source of a run that states no convention -> the one that its tokens per second agree with."""


def flop_convention(row: dict[str, Any]) -> tuple[str, bool]:
    """Returns how the source of a run counts FLOPs, and whether that is assumed."""
    stated = next((str(row[key]) for key in ("flops_convention", "flop_convention") if row.get(key)), "")
    words = NEGATED_HARDWARE.sub("", " ".join(re.findall(r"[a-z0-9]+", stated.lower())))
    for pattern, convention in CONVENTIONS:
        if re.search(pattern, words):
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


@dataclass(frozen=True)
class StepSeconds:
    """The step time of a run."""

    value: float | None
    """None if the run reports nothing that it follows from"""
    derived: tuple[str, ...] = ()
    """how it follows from what the run reports"""
    assumptions: tuple[str, ...] = ()


def parse_seconds(row: dict[str, Any], job: PlannedJob) -> StepSeconds:
    """Returns the step time that a run reports or that follows from what it reports."""
    reported, derived = row["reported"], row.get("derived") or {}
    if reported.get("step_time_s") is not None:
        return StepSeconds(parse_measurement(reported, "step_time_s"))
    if derived.get("step_time_s") is not None:
        by_collector = "step time that the collector derived from other figures"
        return StepSeconds(parse_measurement(derived, "step_time_s"), (by_collector,))
    if reported.get("samples_per_s") is not None:
        return StepSeconds(job.batch.global_ / parse_measurement(reported, "samples_per_s"))
    for key, devices in (("tokens_per_s", 1), ("tokens_per_s_per_gpu", job.layout.ranks)):
        if reported.get(key) is not None:
            return StepSeconds(job.tokens_per_step / parse_measurement(reported, key) / devices)
    convention, is_assumed = flop_convention(row)
    for key in ("tflops_per_gpu", "mfu", "hfu"):
        if reported.get(key) is None:
            continue
        counted = "hardware" if key == "hfu" else convention
        seconds = reported_flops(job, counted) / reported_rate(reported, key, job) / job.layout.ranks
        assumed = f"FLOPs of the convention {counted!r}, which the run does not state"
        return StepSeconds(
            seconds,
            (f"step time from {key} with FLOPs of the convention {counted!r}",),
            (assumed,) if is_assumed and key != "hfu" else (),
        )
    return StepSeconds(None)


def reported_rate(stated: dict[str, Any], key: str, job: PlannedJob) -> float:
    """FLOP/s of a device that a run reports as TFLOP/s, or as a fraction or a percentage of the peak in bf16. Raises
    ConfigError if the device is not so fast in the precision of the run.
    """
    reported, device = parse_measurement(stated, key), job.cluster.device
    peaks = device.peak_flops
    bf16_peak = peaks["fp16"] if job.precision == "fp16" else peaks["bf16"]
    rate = reported * (1e12 if key == "tflops_per_gpu" else bf16_peak * (0.01 if reported > 1 else 1.0))
    peak = max(bf16_peak, peaks[job.precision])
    if rate > peak:
        raise ConfigError(
            f"{key} = {reported:,.5g} is above the peak of {device.name}, {peak / 1e12:,.5g} TFLOP/s",
            f"expected at most {100 * peak / bf16_peak:,.5g} percent" if key != "tflops_per_gpu" else "",
        )
    return rate


def parse_memory(reported: dict[str, Any], notes: str) -> tuple[float | None, str]:
    """Returns memory in bytes and its kind: nvidia-smi's figures are in GB, torch's are in GiB.

    A source that reports memory by class, such as Korthikanti et al., counts tensors.
    """
    keys = [key for key in ("memory_gb_params_opt", "memory_gb_activations") if reported.get(key) is not None]
    if reported.get("memory_gb") is None:
        classes = [parse_measurement(reported, key) for key in keys]
        return (sum(classes) * (1 << 30), "tensors") if len(classes) == 2 else (None, "total")
    nvidia_smi = "nvidia-smi" in notes
    bytes_per_unit = 1e9 if nvidia_smi else 1 << 30
    return parse_measurement(reported, "memory_gb") * bytes_per_unit, "total" if nvidia_smi else "reserved"
