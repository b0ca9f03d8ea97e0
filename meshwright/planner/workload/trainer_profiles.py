"""The software that the planner knows: our own, and generations of the trainers whose runs were published.

What is fitted is said beside it; docs/planner.md has the list with the error that it leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.planner.workload.trainer_profile import TrainerProfile

CONTEXT, COMMUNICATOR = 1.0e9, 0.25e9
"""A CUDA context with the libraries' workspaces, and NCCL's buffers for one group: as seen on A100 and H100 nodes."""
SLACK = 0.15
"""Fitted to what torchtitan's allocator reserves beyond the tensors that these formulas count."""


def on_device(name: str, **fields: Any) -> TrainerProfile:
    return TrainerProfile(name, **({"context": CONTEXT, "communicator": COMMUNICATOR, "slack": SLACK} | fields))


MESHWRIGHT = on_device(
    "meshwright",
    slack=0.05,
    wide=80,
    inner=12,
    loss=60,
    attention=0.95,
    recast=9,
    host=1.1e-3,
    host_experts=2e-3,
    passed=4,
    step=4e-3,
    cast=5.2,
)
"""Fitted to thirteen runs on one H200: GPT-2, Llama-1B and eight layers of Llama-8B, eager and compiled, with and
without recomputation; memory beside tensors was 1.3 to 2.6 GiB."""
MESHWRIGHT_COMPILED = replace(MESHWRIGHT, name="meshwright compiled", fused=True, wide=14, inner=4, host=5e-4)

COMPOSER = on_device(
    "Composer 2023",
    fused=True,
    residual=0,
    shares_context=True,
    logits=4,
    wide=47,
    inner=9,
    attention=0.46,
    newer=0.65,
    loss=15,
    contended=0.12,
    cast=1.2,
    sharding="parameters",
)
"""Its loss is one kernel, which writes the gradient where the logits were: two times the precision of compute."""

TORCHTITAN = on_device(
    "torchtitan 2024",
    fused=True,
    residual=0,
    selective="half",
    keeps_stages=True,
    shares_context=True,
    wide=50,
    inner=13,
    loss=40,
    attention=0.6,
    contended=0.12,
    sharding="parameters",
    method="gather",
    splits=True,
    pieces=1.5,
    tensor_hidden=0.26,
    cast=5.2,
)
TORCHTITAN_2025 = replace(TORCHTITAN, name="torchtitan 2025", logits=4)
"""From 2025 on its loss is compiled, too: logits and their gradient, in the precision of compute."""

MEGATRON = on_device(
    "Megatron-LM",
    fused=True,
    residual=0,
    weights=2,
    state=12,
    selective="attention",
    gathers_again=True,
    torch=False,
    keeps_outputs=False,
    shares_context=True,
)
"""Weights in the precision of compute, gradients in float32, masters with the optimizer: 18 bytes a parameter."""
MEGATRON_2021 = replace(
    MEGATRON,
    name="Megatron-LM 2021",
    flash=False,
    dropout=True,
    cut_sequence=False,
    wide=16,
    inner=9.5,
    scores=9.5,
    loss=110,
    host=1.2e-3,
    reduced=2,
    flat=True,
    scatters=True,
    one_adapter=True,
    misaligned=4.3,
    step=0.03,
)
"""Where it is compared with ZeRO-3, that is DeepSpeed's of the year, whose gathers reached one adapter's rate."""
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 2022", cut_sequence=True)
"""With the sequence cut between matrices (Korthikanti 2022)."""
DEEPSPEED = replace(
    MEGATRON_2021,
    name="Megatron-DeepSpeed 2022",
    dropout=False,
    gradients=2,
    state=16,
    keeps_outputs=True,
    bucket=2e9,
    context=2.5e9,
    communicator=0.5e9,
    scatters=False,
    all_reduces=True,
    gap=4.1e-3,
)
"""In fp16: gradients of a rank's part of the optimizer are copied to float32 for the update, 20 bytes a parameter. Two
buckets of 5e8 numbers, DeepSpeed's default. Context and communicators are fitted: what nvidia-smi shows on Jean Zay
beyond tensors, the same for all layouts. So is the gap in which its checkpoints wait for the host, layer by layer."""
DEEPSPEED_BF16 = replace(DEEPSPEED, name="Megatron-DeepSpeed 2022 bf16", accumulated=4, state=12)
"""Gradients of micro-steps are added up in float32, whole on every rank."""

BRIDGE = replace(
    MEGATRON,
    name="Megatron-Bridge 2026",
    gradients=2,
    folds_tensor=True,
    logits=6,
    wide=38,
    inner=8.7,
    attention=0.48,
    products=1.1,
    tensor_hidden=0.8,
    sends_hidden=0.8,
    deduplicates=True,
    sharding="optimizer",
    cast=3,
    host=60e-6,
    step=0.02,
)
"""Its recipes reduce gradients in bf16; logits in bf16, and once in float32."""
BRIDGE_2025 = replace(BRIDGE, name="Megatron-Bridge 2025", host_experts=1.7e-3)

SOURCES: tuple[tuple[str, TrainerProfile], ...] = (
    ("bigscience", DEEPSPEED),
    ("vTrain", MEGATRON_2021),
    ("Narayanan", MEGATRON_2021),
    ("Smith", MEGATRON_2021),
    ("Korthikanti", MEGATRON_2022),
    ("mosaicml", COMPOSER),
    ("torchtitan docs/performance", TORCHTITAN),
    ("torchtitan_", TORCHTITAN),
    ("202412_torchtitan", TORCHTITAN),
    ("torchtitan", TORCHTITAN_2025),
    ("Automodel", TORCHTITAN_2025),
    ("fms-fsdp", TORCHTITAN),
    ("(25.", BRIDGE_2025),
    ("Megatron-Bridge", BRIDGE),
    ("NeMo", BRIDGE_2025),
    ("MegaScale", BRIDGE_2025),
)
"""Words of a source, and the software that it ran; the first that is found."""


def profile_for_run(source: str, sharding: str, device: str, precision: str) -> TrainerProfile:
    """Of a published run: by who published it, or else by what it did on which devices."""
    found = next((stack for word, stack in SOURCES if word.lower() in source.lower()), None)
    if found is None:
        old = MEGATRON_2021 if device.startswith("a100") else BRIDGE_2025
        found = TORCHTITAN if sharding in ("fsdp", "zero3", "zero2") else old
    return DEEPSPEED_BF16 if found is DEEPSPEED and precision == "bf16" else found


NEAREST_PROFILE = {
    MEGATRON_2021.name: DEEPSPEED,
    MEGATRON_2022.name: DEEPSPEED,
    DEEPSPEED.name: MEGATRON_2021,
    DEEPSPEED_BF16.name: MEGATRON_2021,
    COMPOSER.name: TORCHTITAN,
    TORCHTITAN.name: COMPOSER,
    TORCHTITAN_2025.name: COMPOSER,
    BRIDGE_2025.name: TORCHTITAN,
    BRIDGE.name: TORCHTITAN,
}
"""The nearest software of somebody else."""

FITTED_FIELDS = (
    "wide",
    "inner",
    "scores",
    "loss",
    "attention",
    "newer",
    "pieces",
    "products",
    "misaligned",
    "gap",
    "host",
    "host_experts",
    "tensor_hidden",
    "sends_hidden",
    "contended",
    "step",
    "cast",
)
"""What of a software's seconds is fitted, not known."""


def unfitted_profile(stack: TrainerProfile) -> TrainerProfile:
    """With what one would plan, had this software never been measured: the constants of the nearest other one."""
    near = NEAREST_PROFILE.get(stack.name, stack)
    return replace(stack, **{name: getattr(near, name) for name in FITTED_FIELDS})
