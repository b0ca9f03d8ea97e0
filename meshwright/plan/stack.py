"""The software of a run as the planner sees it: what it keeps, fuses, overlaps, and how well its kernels do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    """selective recomputation keeps products and attention, those and every other product, or all but attention"""
    own: bool = True
    """this trainer: FSDP2's units, torch's schedules, eager blocks under autocast"""
    accumulated: float = 0
    """bytes of a second gradient that micro-steps are added up in, whole whatever is sharded"""
    logits: float = 0
    """bytes of a logit at the peak of the loss; 0: as this trainer's own loss"""
    folds_tensor: bool = False
    """experts are divided over ranks of the tensor axis, too"""
    bucket: float = 0
    """bytes of buffers in which gradients or parameters of several layers travel together"""
    communicator: float = 0
    """bytes that the library of collectives takes for a group of ranks"""
    slack: float = 0
    """what the allocator holds beyond its tensors, as a share of those that come and go"""
    context: float = 0
    """bytes of the device before the first tensor: kernels, handles"""


OWN = Stack("meshwright")
OWN_COMPILED = Stack("meshwright compiled", fused=True)
