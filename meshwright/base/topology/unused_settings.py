"""Settings that a config changes and that have no effect on its layout or model, with the reason. Torch-free.

They are reported and not refused: a sweep over layouts may keep the settings of an axis that some of its runs do not
use. Settings of the data are refused by `train` and `evaluate`, whose results would be those of other data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

from meshwright.base.config import RunConfig, SourceConfig
from meshwright.base.config.data import BYTES, SOURCE_KINDS
from meshwright.base.config.reader import shorten
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.optimizer_state import kinds_that_read
from meshwright.base.topology.parameter_shards import uses_ddp, uses_fsdp
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class UnusedSettings:
    """Settings that are unused under one condition."""

    keys: tuple[str, ...]
    reason: Callable[[RunConfig, Layout], str]
    """why they have no effect, or '' if they have one"""


def _ddp_reason(_config: RunConfig, layout: Layout) -> str:
    if uses_ddp(layout):
        return ""
    return "this layout uses FSDP2 instead of DDP" if uses_fsdp(layout) else "there is one data-parallel rank"


def _resharding_reason(config: RunConfig, layout: Layout) -> str:
    if config.layout.shard == "parameters" and layout.shard > 1:
        return ""
    return "parameters are not sharded (layout.shard = parameters on two or more ranks)"


def _prompts_reason(config: RunConfig) -> str:
    return f"rl.objective = {config.rl.objective} trains on prompts" if config.rl.enabled else ""


def _source_reason(key: str, kinds: tuple[str, ...], config: RunConfig, _layout: Layout) -> str:
    for_all = key in ("tokenizer", "end_of_document", "chat_template")  # of the sources of a mixture
    if config.rl.enabled:
        return "" if key in ("tokenizer", "end_of_document") else _prompts_reason(config)
    if config.data.mixture and not for_all and key != "shard_cache":
        return "data.mixture names the sources"
    used = [source.kind for source in config.data.sources]
    if any(kind in kinds for kind in used) or (key, config.data.tokenizer) == ("tokenizer", BYTES):
        return ""
    return f"data.kind is {', '.join(used)}"


def _switched_off(section: str, key: str, off: Any) -> UnusedSettings:
    """The other settings of a section whose setting `key` has the value with which the section does nothing."""
    names = [setting.name for setting in fields(getattr(RunConfig(), section)) if setting.name != key]
    reason = f"{section}.{key} = {off}" if off != "" else f"{section}.{key} is empty"
    return UnusedSettings(
        tuple(f"{section}.{name}" for name in names),
        lambda config, _layout: reason if getattr(getattr(config, section), key) == off else "",
    )


def _kind_reason(kinds: tuple[str, ...], config: RunConfig, _layout: Layout) -> str:
    return "" if config.optimizer.kind in kinds else f"optimizer.kind is {config.optimizer.kind}"


DATA_SETTINGS = (
    *(UnusedSettings((f"data.{key}",), partial(_source_reason, key, kinds)) for key, kinds in SOURCE_KINDS.items()),
    UnusedSettings(("data.kind", "data.mixture"), lambda config, _layout: _prompts_reason(config)),
    UnusedSettings(
        ("data.kind",), lambda config, _layout: "data.mixture names the sources" if config.data.mixture else ""
    ),
    UnusedSettings(("data.weight",), lambda _config, _layout: "it is that of a source in data.mixture"),
)
"""What `train` and `evaluate` refuse."""
FILE_SETTINGS = ("data.path", "data.tokenizer", "data.chat_template")
SWITCHES = {
    "lora": ("rank", 0),
    "rl": ("objective", "none"),
    "early_stopping": ("patience", 0),
    "profile": ("steps", ""),
}
"""Section -> the setting that switches the section off, and the value with which it does."""
UNUSED_SETTINGS = (
    *DATA_SETTINGS,
    *(_switched_off(section, key, value) for section, (key, value) in SWITCHES.items()),
    UnusedSettings(
        ("pipeline.schedule", "pipeline.stages"),
        lambda _config, layout: "layout.pipeline = 1" if layout.pipeline == 1 else "",
    ),
    UnusedSettings(
        ("context.method",),
        lambda _config, layout: "layout.context = 1" if layout.context == 1 else "",
    ),
    UnusedSettings(("ddp.bucket_cap_mb", "ddp.gradient_as_bucket_view"), _ddp_reason),
    UnusedSettings(
        ("ddp.static_graph", "ddp.find_unused_parameters", "ddp.comm_hook"),
        lambda _config, layout: "" if uses_ddp(layout) or uses_fsdp(layout) else "there is one data-parallel rank",
    ),
    UnusedSettings(
        ("layout.shard",),
        lambda config, layout: (
            "there is one rank to shard over" if config.layout.shard != "none" and layout.shard == 1 else ""
        ),
    ),
    UnusedSettings(
        ("fsdp.prefetch",),
        lambda _config, layout: "" if uses_fsdp(layout) else "this layout does not use FSDP2",
    ),
    UnusedSettings(("fsdp.reshard_after_forward",), _resharding_reason),
    UnusedSettings(
        (
            "model.experts_active",
            "model.experts_shared",
            "model.router_bias_rate",
            "model.router_aux_loss",
            "model.capacity_factor",
        ),
        lambda config, _layout: "" if config.model.experts else "model.experts = 0",
    ),
    UnusedSettings(
        ("kernels.loss",),
        lambda config, _layout: (
            f"rl.objective = {config.rl.objective} needs the logits of every token"
            if config.rl.enabled and config.kernels.loss == "fused"
            else ""
        ),
    ),
    UnusedSettings(
        ("precision.loss_scale", "precision.scale_interval"),
        lambda config, _layout: "" if config.precision.compute == "fp16" else "precision.compute is not fp16",
    ),
    UnusedSettings(
        ("precision.weights",),
        lambda config, _layout: (
            "optimizer.cpu_offload = true"
            if config.optimizer.cpu_offload and config.precision.weights == "bf16"
            else ""
        ),
    ),
    *(UnusedSettings((f"optimizer.{key}",), partial(_kind_reason, kinds)) for key, kinds in kinds_that_read().items()),
    UnusedSettings(
        ("activation_checkpoint.memory_budget",),
        lambda config, _layout: "blocks are not compiled" if config.compile.enabled is False else "",
    ),
    UnusedSettings(
        ("schedule.decay",),
        lambda config, _layout: "" if config.schedule.kind == "wsd" else "schedule.kind is not wsd",
    ),
    UnusedSettings(
        ("data.worker_kind", "data.prefetch"),
        lambda config, _layout: "" if config.data.workers else "data.workers = 0",
    ),
    UnusedSettings(
        ("data.bad_sample_budget",),
        lambda config, _layout: (
            "" if config.data.on_bad_sample == "quarantine" else "data.on_bad_sample is not quarantine"
        ),
    ),
    UnusedSettings(
        ("numerics.skip_budget",),
        lambda config, _layout: "" if config.numerics.on_nonfinite == "skip" else "numerics.on_nonfinite is not skip",
    ),
    UnusedSettings(
        ("eval.every", "eval.samples"),
        lambda config, _layout: "" if config.eval.holdout else "eval.holdout = 0",
    ),
    UnusedSettings(
        (
            "checkpoint.seconds",
            "checkpoint.every",
            "checkpoint.overhead",
            "checkpoint.keep",
            "checkpoint.keep_every",
            "checkpoint.on_failure",
            "checkpoint.memory_every",
        ),
        lambda config, _layout: "checkpoint.mode = off" if config.checkpoint.mode == "off" else "",
    ),
    UnusedSettings(
        ("rl.clip", "rl.clip_high", "rl.scale_rewards"),
        lambda config, _layout: "" if config.rl.objective == "grpo" else f"rl.objective = {config.rl.objective}",
    ),
    UnusedSettings(("rl.vllm_model",), lambda config, _layout: "" if config.rl.vllm_url else "rl.vllm_url is empty"),
    UnusedSettings(
        ("checkpoint.best",),
        lambda config, _layout: "" if config.checkpoint.keep_best else "checkpoint.keep_best is empty",
    ),
    UnusedSettings(("metrics.host",), lambda config, _layout: "" if config.metrics.port else "metrics.port = 0"),
    UnusedSettings(
        ("trackers.project", "trackers.every"),
        lambda config, _layout: (
            ""
            if config.trackers.tensorboard or config.trackers.wandb != "off" or config.trackers.mlflow
            else "no tracker is on"
        ),
    ),
    UnusedSettings(
        ("launch.min_hosts", "launch.resize", "launch.preflight", "launch.host_timeout"),
        lambda config, _layout: "launch.hosts = 1" if config.launch.hosts == 1 else "",
    ),
    UnusedSettings(
        ("compile.scope",), lambda config, _layout: "compile.enabled = false" if config.compile.enabled is False else ""
    ),
    UnusedSettings(
        ("checkpoint.memory_every",),
        lambda config, _layout: "launch.hosts = 1" if config.launch.hosts == 1 else "",
    ),
    UnusedSettings(
        ("checkpoint.overhead",),
        lambda config, _layout: (
            "checkpoint.seconds = 0"
            if config.checkpoint.mode != "off" and not (config.checkpoint.seconds or config.checkpoint.memory_every)
            else ""
        ),
    ),
)


def require_data_settings(config: RunConfig, begun: bool = False) -> None:
    """Raises a ConfigError for a setting of the data without effect: the run would read other data than is meant.
    Beside prompts only a path is refused. Of a run that has begun, only files are: its other settings are identity.
    """
    layout, changed = Layout.from_config(config.layout), changed_settings(config)
    for rule in DATA_SETTINGS:
        for key in (key for key in rule.keys if key in changed):
            refused = key == "data.path" or not (config.rl.enabled or (begun and key not in FILE_SETTINGS))
            if refused and (reason := rule.reason(config, layout)):
                raise unread_error(key, changed[key], reason)
    for index, source in enumerate(config.data.mixture):
        for key, kinds in SOURCE_KINDS.items():
            value, default = (getattr(settings, key, None) for settings in (source, SourceConfig()))
            if value not in (default, BYTES) and source.kind not in kinds:
                raise unread_error(f"data.mixture[{index}].{key}", value, f"its kind is {source.kind}")


def unread_error(key: str, value: Any, reason: str) -> ConfigError:
    section, _, name = key.rpartition(".")
    kinds = SOURCE_KINDS.get(name, ()) if "kind is" in reason else ()
    change = f"{section}.kind = {' or '.join(kinds)}, or " if kinds else ""
    return ConfigError(f"{key} = {shorten(text(value))} has no effect: {reason}", f"try {change}without {key}")


def unused_settings(config: RunConfig, own_model: bool = False) -> list[str]:
    """One line per setting that differs from its default and has no effect; `own_model` if the user passes a model."""
    layout = Layout.from_config(config.layout)
    changed = changed_settings(config)
    unused = [key for key in changed if own_model and key.startswith("model.")]
    reasons = dict.fromkeys(unused, "the run trains a custom model")
    for rule in UNUSED_SETTINGS:
        if reason := rule.reason(config, layout):
            reasons |= {key: reason for key in rule.keys if key not in reasons}
    return [f"{key} = {text(changed[key])} has no effect: {reasons[key]}" for key in changed if key in reasons]


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of all sections that differ from their defaults, by key."""
    changed = {}
    for section in fields(config):
        values = getattr(config, section.name)
        if is_dataclass(values) and not isinstance(values, type):
            defaults = type(values)()
            for setting in fields(values):
                value = getattr(values, setting.name)
                if value != getattr(defaults, setting.name):
                    changed[f"{section.name}.{setting.name.rstrip('_')}"] = value
    return changed


def text(value: Any) -> str:
    """A value as a run file writes it, without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)
