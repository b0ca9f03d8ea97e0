"""Finds the profile of the trainer that ran a published run, from the software, the year and the flags that it states.

To add a trainer, define one `TrainerProfile` and add one row to `SOFTWARE`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.workload import trainer_profiles
from meshwright.planner.workload.expert_settings import release_of, with_expert_settings
from meshwright.planner.workload.trainer_profile import TrainerProfile, with_matmul_precision

NEWEST = 9999
"""The year of software that states none."""
UNKNOWN_ACCURACY = 0.3
"""Relative accuracy of computation in software that the planner does not know."""


@dataclass(frozen=True)
class Stated:
    """What a run states of its software."""

    year: int
    """the year of the software, or of its publication; NEWEST if it is not stated"""
    precision: str
    flags: frozenset[str]
    """keys of FLAGS"""
    release: tuple[int, int] | None = None
    """the release of its container, such as (26, 4)"""
    on_grace: bool = False
    """whether its host is a Grace CPU"""


Generation = Callable[[Stated], TrainerProfile]


def only(profile: TrainerProfile) -> Generation:
    """A trainer with one generation."""
    return lambda _stated: profile


def torchtitan(stated: Stated) -> TrainerProfile:
    """torchtitan by its flags. Its float8 needs compiled blocks; its loss is compiled with them from 2025 on."""
    newer = stated.year > 2024
    if "compile" not in stated.flags and stated.precision != "fp8":
        return trainer_profiles.TORCHTITAN if newer else trainer_profiles.TORCHTITAN_2024
    if newer:
        return trainer_profiles.TORCHTITAN_COMPILED
    return trainer_profiles.TORCHTITAN_2024_COMPILED


def deepspeed(stated: Stated) -> TrainerProfile:
    """Megatron-DeepSpeed, which accumulates bf16 gradients in float32."""
    return trainer_profiles.DEEPSPEED_BF16 if stated.precision == "bf16" else trainer_profiles.DEEPSPEED


def megatron(stated: Stated) -> TrainerProfile:
    """Megatron-LM, Megatron-Core and NeMo by year."""
    generations = (
        (2021, trainer_profiles.MEGATRON_2021),
        (2022, trainer_profiles.MEGATRON_2022),
        (2024, trainer_profiles.MEGATRON_2024),
        (2025, trainer_profiles.BRIDGE_2025),
    )
    return next((profile for year, profile in generations if stated.year <= year), trainer_profiles.BRIDGE)


def megatron_bridge(stated: Stated) -> TrainerProfile:
    """Megatron-Bridge by its release, on which its experts depend."""
    quantized = stated.precision in ("fp8", "fp4")
    return with_expert_settings(megatron(stated), stated.release, stated.on_grace, quantized)


SOFTWARE: tuple[tuple[str, Generation], ...] = (
    (r"bigscience|\bbloom\b|2211\.05100|mt-nlg|\bturing\b|turing-nlg", deepspeed),
    (r"vtrain|narayanan", only(trainer_profiles.MEGATRON_2021)),
    (r"korthikanti", only(trainer_profiles.MEGATRON_2022)),
    (r"llm-foundry|mosaicml|composer", only(trainer_profiles.COMPOSER)),
    (r"torchtitan", torchtitan),
    (r"automodel", only(trainer_profiles.AUTOMODEL)),
    (r"fms-fsdp|foundation-model-stack", only(trainer_profiles.FMS_FSDP)),
    (r"nanotron|ultra-?scale", only(trainer_profiles.NANOTRON)),
    (r"megatron-bridge", megatron_bridge),
    (r"2407\.21783|llama.?3 herd|herd of models", only(trainer_profiles.META_2024)),
    (r"\bhai-?llm\b|2412\.19437", only(trainer_profiles.HAI_LLM)),
    (r"megascale|nemotron", only(trainer_profiles.MEGATRON_2024)),
    (r"megatron-deepspeed", deepspeed),
    (r"nemo\b|nemo[- ]|megatron|mcore", megatron),
    (r"deepspeed", deepspeed),
)
"""A pattern in the software or the source of a run -> its trainer. The first row that matches counts."""
YEARS = (r"\b(2\d)\.(?:0[1-9]|1[0-2])(?:\.\d+)?\b", r"arxiv[: ] ?(2\d)\d\d\.", r"(?<!\d)20(1\d|2\d)(?:\d\d)?(?!\d)")
"""How software states its year: the version of a container, an arXiv identifier, or a year with or without a month."""
FLAGS = {
    "compile": r"\bcompiled?\b",
    "async_tp": r"async[-_ ]?(?:tp|tensor)",
    "rowwise": r"row-?wise",
    "blockwise": r"block-?wise|sub-?channel|fp8-sc\b",
    "interleaved": r"interleaved",
}
NEGATIONS = r"\b(?:no|not|without|non)[- ](?:torch\.)?(?:{0})|(?:{0})(?: ?[:=] ?| )(?:no|none|off|false|disabled)\b"
"""How a text denies a flag: "without compile", "compile: off"."""


@dataclass(frozen=True)
class Software:
    """The trainer of a run, and what had to be assumed about it."""

    profile: TrainerProfile
    assumptions: tuple[str, ...]
    flags: frozenset[str]


def run_software(row: dict[str, Any], precision: str, shards_parameters: bool, on_grace: bool = False) -> Software:
    """Returns the trainer of a run; of unknown software, a similar trainer with a wide interval."""
    stated_software = [str(row[key]) for key in ("software", "trainer", "framework") if row.get(key)]
    texts = [*stated_software, str(row["source"])]
    flags = stated_flags(row)
    stated = Stated(stated_year(texts), precision, flags, release_of(" ".join(texts)), on_grace)
    for text in texts:
        for pattern, generation in SOFTWARE:
            if re.search(pattern, text, re.IGNORECASE):
                return Software(with_flags(generation(stated), stated), (), flags)
    if shards_parameters:
        similar = torchtitan(stated)
    else:
        similar = megatron(replace(stated, year=2024 if stated.year == NEWEST else stated.year))
    name = f"unknown (like {similar.name})"
    profile = replace(similar, name=name, splits_batch_by_stage=False, kernel_accuracy=UNKNOWN_ACCURACY)
    return Software(with_flags(profile, stated), (f"software {name}",), flags)


def with_flags(profile: TrainerProfile, stated: Stated) -> TrainerProfile:
    """Returns a profile with what flags change in any trainer."""
    changes: dict[str, Any] = {}
    if "async_tp" in stated.flags and profile.torch_native:
        changes |= trainer_profiles.ASYNC_TENSOR
    for recipe in ("rowwise", "blockwise"):
        if recipe in stated.flags and stated.precision == "fp8":
            changes |= {"float8_recipe": recipe}
    return with_matmul_precision(replace(profile, **changes) if changes else profile, stated.precision)


def stated_flags(row: dict[str, Any]) -> frozenset[str]:
    """Returns the flags that a run states, in a field of their name or in its text."""
    flags = row.get("flags") or ()
    words = " ".join([flags] if isinstance(flags, str) else flags)
    words += " ".join(f" {row[key]}" for key in ("notes", "precision", "software") if row.get(key))
    words += " " + str((row.get("layout") or {}).get("schedule") or "")
    found = set()
    for flag, pattern in FLAGS.items():
        named = row.get(flag)
        if isinstance(named, bool):
            if named:
                found.add(flag)
        elif re.search(pattern, re.sub(NEGATIONS.format(pattern), "", words, flags=re.IGNORECASE), re.IGNORECASE):
            found.add(flag)
    return frozenset(found)


def stated_year(texts: list[str]) -> int:
    """Returns the year that the texts state, the first one that states any; NEWEST if none does."""
    for text in texts:
        for pattern in YEARS:
            if match := re.search(pattern, text, re.IGNORECASE):
                return 2000 + int(match[1])
    return NEWEST
