"""Builds the workload that the arguments of `meshwright plan` describe, and notes what was assumed; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.config import PrecisionConfig, RunConfig, config_from_dict, config_to_dict, load_config
from meshwright.base.config.reader import read_toml
from meshwright.base.dtypes import COMPUTE_BYTES, PRECISIONS
from meshwright.base.models.registry import model_architecture
from meshwright.base.models.traced_model import TracedModel
from meshwright.errors import ConfigError
from meshwright.planner.workload.resolve_model import resolve_model
from meshwright.planner.workload.trainer_profiles import in_16_bits, trainer_profile
from meshwright.planner.workload.workload import SEARCHED_KEYS, Workload, count_samples

OWN_TRAINER, OWN_EAGER = "meshwright", "meshwright-eager"
"""Meshwright in `plan --trainer`, with the defaults of the device and without compiled blocks."""
DEFAULT_TOKENS_PER_STEP = 4 << 20
"""Tokens per step if no batch is given: published runs of large models start with about as many."""
DEFAULT_SEQUENCE = 4096
"""Tokens per sample if no sequence length is given."""


def build_workload(
    model: str,
    overrides: Sequence[str] = (),
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
) -> Workload:
    """Builds the workload of `meshwright plan MODEL`.

    Args:
        model: a preset, a run file, a Hugging Face config.json or its folder.
        overrides: `--KEY=VALUE` options; those of SEARCHED_KEYS are pinned, the others change the run's config.
        batch: samples per step over all ranks; default: the run's.
        sequence: tokens per sample; default: the run's.
        precision: precision of matmuls; default: the run's.
    """
    pinned, settings = split_overrides(overrides)
    resolved = resolve_model(model, settings)
    config = resolved.run_config
    notes = [resolved.note] if resolved.note else []
    assumed: list[str] = []
    if config is None:
        assumed = assumed_size(batch, sequence)
        batch, sequence = default_size(batch, sequence)
        if resolved.model_config is not None:
            config = config_from_dict({"model": config_to_dict(resolved.model_config)})
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision} is unknown", f"expected one of {', '.join(PRECISIONS)}")
    if config is None:
        global_batch, tokens = default_size(batch, sequence)
        pins, notes = parse_pins(pinned), [*notes, *assumed]
        return Workload(resolved.architecture, global_batch, tokens, precision or "auto", None, pins, tuple(notes))
    tree: dict[str, Any] = config_to_dict(config)
    tree["batch"] |= {"micro": None, **({"global": batch} if batch is not None else {})}
    tree["data"] |= {"sequence": sequence} if sequence is not None else {}
    if precision in COMPUTE_BYTES:
        tree["precision"]["compute"] = precision
    config = config_from_dict(tree)
    trainable = precision is None or precision in COMPUTE_BYTES
    if not trainable:
        notes.append(f"{precision} can be planned but not trained: Meshwright trains in {', '.join(COMPUTE_BYTES)}")
    return Workload(
        resolved.architecture,
        config.batch.global_,
        config.data.sequence,
        precision or config.precision.compute,
        config if trainable else None,
        parse_pins(pinned),
        (*notes, *assumed),
        precision_is_default=precision is None and not states_precision(model, settings, config.precision),
    )


def states_precision(model: str, settings: Sequence[str], config: PrecisionConfig) -> bool:
    """Whether the options or the run file set the compute dtype, or what needs bf16, and not only the preset."""
    if config.float8 or "bf16" in (config.weights, config.residual):
        return True
    if any(option.removeprefix("--").partition("=")[0] == "precision.compute" for option in settings):
        return True
    return model.endswith(".toml") and "compute" in read_toml(Path(model)).get("precision", {})


def workload_from_config(
    config: RunConfig, overrides: Sequence[str] = (), traced: TracedModel | None = None
) -> Workload:
    """Builds the workload of a run, with the SEARCHED_KEYS that `--KEY=VALUE` options pin. `traced` is a user's model,
    which replaces that of the config.
    """
    pinned, _ = split_overrides(overrides)
    free = replace(config, batch=replace(config.batch, micro=None))
    model = traced or model_architecture(config.model, config.preset)
    sequence, precision = traced.sequence if traced else config.data.sequence, config.precision.compute
    return Workload(model, config.batch.global_, sequence, precision, free, parse_pins(pinned))


def for_trainer(work: Workload, name: str, headroom: float | None = None) -> Workload:
    """Returns the workload as another trainer runs it, and with another headroom.

    Raises:
        ConfigError: the trainer is unknown or cannot run a model of one's own, or the headroom is out of range.
    """
    if headroom is not None:
        if not 0 <= headroom < 1:
            raise ConfigError(
                f"headroom {headroom} is out of range", "expected a share of device memory from 0 to 0.99"
            )
        work = replace(work, headroom=headroom)
    name = name.lower()
    if name == OWN_TRAINER:
        return work
    profile = trainer_profile(name)
    if name == OWN_EAGER:
        if work.pinned.get("compile.enabled"):
            raise ConfigError(f"{name} does not compile blocks", f"try --trainer {OWN_TRAINER}")
        return replace(work, trainer_name=name, pinned={**work.pinned, "compile.enabled": False})
    if isinstance(work.model, TracedModel):
        raise ConfigError(f"trainer {name} cannot be planned for a model of one's own", f"expected {OWN_TRAINER}")
    if work.base_config is not None:
        require_plain_training(work.base_config, name)
    profile = profile if work.precision in ("fp8", "fp4") else in_16_bits(profile)
    return replace(work, trainer_name=name, trainer=profile, base_config=None)


def require_plain_training(config: RunConfig, name: str) -> None:
    """Raises ConfigError if a run has settings that change its memory and its time, and that the profile of another
    trainer does not model: it trains all parameters of a language model with AdamW.
    """
    own = f"or --trainer {OWN_TRAINER}"
    frozen = any(group.frozen for group in config.optimizer.groups)
    expected = {
        "lora.rank": (config.lora.enabled, f"expected lora.rank = 0, {own}"),
        "optimizer.kind": (config.optimizer.kind != "adamw", f"expected optimizer.kind = adamw, {own}"),
        "optimizer.groups": (frozen, f"expected no frozen group, {own}"),
        "rl.objective": (config.rl.enabled, f"expected rl.objective = none, {own}"),
        "precision.float8": (config.precision.float8, "try --precision fp8, with precision.float8 = false"),
    }
    for key, (is_set, hint) in expected.items():
        if is_set:
            raise ConfigError(f"the profile of {name} does not model {key}", hint)


def split_overrides(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits `--KEY=VALUE` options into values of SEARCHED_KEYS by key, and the options that are left."""
    pinned: dict[str, str] = {}
    settings = []
    for option in overrides:
        key, _, value = option.removeprefix("--").partition("=")
        if key in SEARCHED_KEYS:
            pinned[key] = value
        else:
            settings.append(option)
    return pinned, settings


def default_size(batch: int | None, sequence: int | None) -> tuple[int, int]:
    """Fills in the global batch and the sequence length."""
    sequence = sequence or DEFAULT_SEQUENCE
    return batch or max(1, DEFAULT_TOKENS_PER_STEP // sequence), sequence


def assumed_size(batch: int | None, sequence: int | None) -> list[str]:
    """Notes what `default_size` fills in."""
    global_batch, tokens = default_size(batch, sequence)
    if batch is None:
        return [f"assumed batch: {count_samples(global_batch)} of {tokens:,} tokens per step"]
    return [] if sequence is not None else [f"assumed sequence: {tokens:,} tokens per sample"]


def parse_pins(pinned: dict[str, str]) -> dict[str, int | str | bool]:
    """Parses and validates pinned values as the config does."""
    parsed: dict[str, int | str | bool] = {}
    for key, value in pinned.items():
        section, _, name = key.partition(".")
        required = {"layout.shard_degree": ["--layout.shard=optimizer"]}.get(key, [])  # valid only with this setting
        config = load_config(None, [f"--{key}={value}", *required])
        setting = getattr(getattr(config, section), name)
        if setting is not None:
            parsed[key] = setting
    return parsed
