"""The software of a run as the planner sees it: what it keeps, fuses, overlaps, and how well its kernels do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Stack:
    """One generation of one trainer. Constants that were fitted to published runs are listed in docs/planner.md."""

    name: str
    flash: bool = True
    """attention without its matrix of scores"""
    fused: bool = False
    """norms, activations and residual sums in compiled or hand-written kernels: fewer passes over memory, less kept"""
    cut_sequence: bool = True
    """the sequence is divided between the matrices that the tensor axis divides"""
    weights: float = 4
    """bytes a parameter is held in"""
    computed: float = 0
    """bytes of a second copy in the precision of compute, kept through the step; 0: made when it is used"""
    gradients: float = 4
    """bytes a gradient is held in"""
    state: float = 8
    """bytes of the optimizer a parameter, master weights included where they are not the weights"""
    residual: float = 4
    """bytes of a number between blocks; 0: as in compute"""
    dropout: bool = False
    """masks of dropout are kept: one byte a number, after attention and after the feed-forward"""
    gathers_again: bool = False
    """what the tensor axis gathers before a matrix is kept in pieces, and gathered again in backward"""
    selective: Literal["products", "half", "attention"] = "products"
    """selective recomputation keeps products and attention, or attention and every other product, or all but scores"""
    torch: bool = True
    """FSDP2's units, torch's pipelines, DTensor; else whole parameters and gradients in buffers, as in Megatron"""
    keeps_stages: bool = False
    """units of a pipeline's stages stay gathered through the step"""
    keeps_outputs: bool = True
    """a stage's output is kept until its backward pass, though the next stage has it"""
    accumulated: float = 0
    """bytes of a second gradient that micro-steps are added up in, whole whatever is sharded"""
    logits: float = 0
    """bytes of a logit at the peak of the loss; 0: cross-entropy step by step in float32"""
    shares_context: bool = False
    """ranks of the context axis share what is sharded also where no other ranks do"""
    folds_tensor: bool = False
    """experts are divided over ranks of the tensor axis, too"""
    bucket: float = 0
    """bytes of buffers in which gradients and parameters travel between ranks that share them"""
    communicator: float = 0
    """bytes that the library of collectives takes for a group of ranks"""
    slack: float = 0
    """what the allocator holds beyond its tensors, as a share of those that come and go"""
    context: float = 0
    """bytes of the device before the first tensor: kernels, handles, workspaces"""


CONTEXT, COMMUNICATOR = 1.0e9, 0.25e9
"""A CUDA context with the libraries' workspaces, and NCCL's buffers for one group: as seen on A100 and H100 nodes."""
SLACK = 0.15
"""Fitted to what torchtitan's allocator reserves beyond the tensors that these formulas count."""


def device(name: str, **fields: Any) -> Stack:
    return Stack(name, **({"context": CONTEXT, "communicator": COMMUNICATOR, "slack": SLACK} | fields))


OWN = device("meshwright", slack=0.05)
"""Measured on one H200: 1.3 to 2.6 GiB beside 12 to 28 GiB of tensors, the gradients of a step among them."""
OWN_COMPILED = replace(OWN, name="meshwright compiled", fused=True)
TORCHTITAN = device("torchtitan", fused=True, residual=0, selective="half", keeps_stages=True, shares_context=True)
TORCHTITAN_2025 = replace(TORCHTITAN, name="torchtitan 2025", logits=4)
"""From 2025 on its loss is compiled, too: logits and their gradient, in the precision of compute."""
COMPOSER_FSDP = device("composer", fused=True, residual=0, shares_context=True, logits=4)
"""Its loss is one kernel, which writes the gradient where the logits were: two times the precision of compute."""
MEGATRON = device(
    "megatron",
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
MEGATRON_2021 = replace(MEGATRON, name="megatron 2021", flash=False, dropout=True, cut_sequence=False)
MEGATRON_2022 = replace(MEGATRON_2021, name="megatron 2022", cut_sequence=True)
"""With the sequence cut between matrices (Korthikanti 2022)."""
MEGATRON_DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    flash=False,
    cut_sequence=False,
    gradients=2,
    state=16,
    keeps_outputs=True,
    bucket=2e9,
    context=2.5e9,
    communicator=0.5e9,
)
"""In fp16: gradients of a rank's part of the optimizer are copied to float32 for the update, 20 bytes a parameter. Two
buckets of 5e8 numbers, DeepSpeed's default. Context and communicators are fitted: what nvidia-smi shows on Jean Zay
beyond tensors, the same for all layouts."""
MEGATRON_DEEPSPEED_BF16 = replace(MEGATRON_DEEPSPEED, name="megatron-deepspeed bf16", accumulated=4, state=12)
"""Gradients of micro-steps are added up in float32, whole on every rank."""
MEGATRON_BRIDGE = replace(MEGATRON, name="megatron-bridge", gradients=2, folds_tensor=True, logits=6)
"""Its recipes reduce gradients in bf16; logits in bf16, and once in float32."""
