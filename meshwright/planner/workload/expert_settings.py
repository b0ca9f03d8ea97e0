"""How generations of Megatron-Bridge run MoE layers: CUDA graphs, overlapped all-to-alls and host time; torch-free.

The releases publish step times without these flags; their recipes (`scripts/performance/configs` and `perf_recipes` in
NVIDIA-NeMo/Megatron-Bridge) have them. Recipes of Qwen3, DeepSeek-V3 and gpt-oss were read at one commit each, not at
the tags of the releases, and differ between models; which release began with which flag is inferred from its step
times:

| release | devices | dispatcher | CUDA graphs | all-to-all overlapped |
|---|---|---|---|---|
| 25.09 | all | NCCL, with a capacity that drops tokens | none; no token count waits for the host | no |
| to 26.04 | HGX (x86 host) | NCCL, later HybridEP | none, or of the router | across nodes, if stages interleave |
| to 26.04 | NVL72 (Grace host) | HybridEP | attention, router, preprocessing | no |
| from 26.06, 8 bits | all | HybridEP | the whole iteration, with padded experts | yes, and a fused grouped MLP |

To 26.04, the recipes of latent attention recompute its up-projections. Seconds and fractions are fitted to the runs of
those releases.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from meshwright.planner.workload.trainer_profile import TrainerProfile

UNGRAPHED_MOE_LAUNCH = 3.6e-3
"""Seconds in which an x86 host launches the forward kernels of an MoE layer, with the synchronizations of its token
counts: 48 layers of Qwen3-30B take 9.2 ms per layer in both passes on B200 (25.11) and 9.5 ms on H100 (26.04)."""
DROPPING_MOE_LAUNCH = 1.7e-3
"""The same if a capacity drops tokens, so that every token count is known to the host."""
DROPLESS = (25, 11)
"""The first release whose recipes drop no tokens."""
PARTLY_GRAPHED = 0.6
"""Fraction of the kernels of an MoE layer in graphs of attention, router and preprocessing."""
WHOLE_ITERATION = (26, 6)
"""The release whose 8-bit recipes capture the whole iteration."""

DUALPIPE: dict[str, Any] = {
    "expert_overlap": 1.0,
    "contention": 20 / 132,
    "deduplicates_tokens": True,
    "dispatch_bytes": 1,
    "float8_recipe": "blockwise",
    "saves_quantized_inputs": True,
    "recomputes_latent_projections": True,
    "selective_policy": "all_but_pointwise",
    "defers_matmuls_only": True,
    "attention_output_bytes": 1.5,
    "activation_input_bytes": 1,
}
"""What DeepSeek-V3's own trainer changes (arXiv:2412.19437, sections 3.2 and 3.3): all-to-alls run on 20 of the 132
multiprocessors of an H800 while another micro-batch computes, send a token to a node once and in 8 bits; matmuls have a
scale per block; norms, the up-projections of latent attention and the products of SwiGLU are recomputed; the inputs of
SwiGLU are saved in 8 bits, and the output of attention once, in 12 bits (E5M6). Its published schedule
(deepseek-ai/DualPipe) keeps the operands of weight gradients that wait, and nothing else. From these sources, not
fitted; that hidden all-to-alls slow computation by the share of their multiprocessors is an assumption."""


def release_of(source: str) -> tuple[int, int] | None:
    """Returns the release that a source names, such as (26, 4) for "26.04.01 container"."""
    match = re.search(r"\b(2[0-9])\.([01][0-9])\b", source)
    return (int(match[1]), int(match[2])) if match else None


def with_expert_settings(
    profile: TrainerProfile, release: tuple[int, int] | None, on_grace: bool, quantized: bool
) -> TrainerProfile:
    """Returns the profile of Megatron-Bridge with the MoE settings of a release; `on_grace` if Grace is the host."""
    if release is None:
        return profile
    if release >= WHOLE_ITERATION and quantized:
        return replace(
            profile,
            moe_layer_launch_seconds=UNGRAPHED_MOE_LAUNCH,
            graphed_kernels=1.0,
            expert_overlap=0.9,
            fused_experts=True,
        )
    return replace(
        profile,
        moe_layer_launch_seconds=UNGRAPHED_MOE_LAUNCH if release >= DROPLESS else DROPPING_MOE_LAUNCH,
        graphed_kernels=PARTLY_GRAPHED if on_grace and release >= DROPLESS else 0.0,
        interleaved_expert_overlap=0.9,
        recomputes_latent_projections=True,
    )
